// The backward pass of entmax. With s = y^(2-alpha) on the support, S = sum s, per row
//   d_x = s (d_y - <s, d_y> / S)
// Two passes over the row, the second from L2. Where y (or the support mask) is zero, d_y is not
// read: what a sparse row moves is y (or V/8 bytes) and d_x.
//   d_alpha = [ <p,R> (<d_y,p> - b <d_y,pL>) - (sum p - b sum pL) <d_y,pR> ] / S
// with b = alpha - 1, L = ln p, R = L^2 (e^t - 1 - t) / t^2 at t = -b L: README.md derives it.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/entmax/cpu/backward.cpp"
#include <hwy/foreach_target.h>

#include "ops/entmax/cpu/backward_alpha-inl.hpp"
#include "ops/entmax/cpu/backward_columns-inl.hpp"
#include "ops/entmax/cpu/backward_row-inl.hpp"
#include "ops/entmax/cpu/backward_short-inl.hpp"
#include "ops/entmax/cpu/backward_support-inl.hpp"

#ifndef PULLBACK_ENTMAX_BACKWARD_ONCE
#define PULLBACK_ENTMAX_BACKWARD_ONCE
#include <utility>

#include "ops/entmax/cpu/backward_tile.hpp"
#endif

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

using entmax::BackwardTile;
using entmax::TensorRows;

// Calls f.template operator()<family>() for an alpha up to 2; false for others.
template <class F>
bool WithSmoothFamily(double alpha, const F& f) {
  switch (entmax::family_of(alpha)) {
    case Family::softmax:
      f.template operator()<Family::softmax>();
      return true;
    case Family::near_one:
    case Family::general:
      f.template operator()<Family::general>();
      return true;
    case Family::entmax15:
      f.template operator()<Family::entmax15>();
      return true;
    case Family::sparsemax:
      f.template operator()<Family::sparsemax>();
      return true;
    default:
      return false;
  }
}

// Rows [begin, end), of one alpha.
template <class T>
void GradientsFromY(const TensorRows& y, const TensorRows& d_y, const TensorRows& d_x,
                    std::int64_t begin, std::int64_t end, std::size_t length, double alpha,
                    bool stream, std::byte* scratch) {
  const auto write_with = [&]<Family kFamily, class R>(const auto& slope) {
    for (std::int64_t r = begin; r < end; ++r) {
      const DenseWeights weights(y.row<T>(r), slope);
      const T* g = d_y.row<T>(r);
      auto* s = reinterpret_cast<R*>(scratch);
      if constexpr (kFamily == Family::steep) {
        const SplitMean mean = SteepMean(weights, g, length, s);
        WriteGradient<R>(StoredWeights(s), mean, g, d_x.row<T>(r), length, stream);
      } else if constexpr (kFamily == Family::general) {
        const R mean = WeightedMean<R>(weights, y.row<T>(r), g, length, s);
        WriteGradient<R>(StoredWeights(s), mean, g, d_x.row<T>(r), length, stream);
      } else {
        Gradient<R>(weights, y.row<T>(r), g, d_x.row<T>(r), length, stream);
      }
    }
  };
  // One row is worth no tables unless it is long.
  constexpr std::size_t kWorthTables = 2048;
  const auto write = [&]<Family kFamily, class R>() {
    if (kFamily == Family::general && end - begin == 1 && length < kWorthTables) {
      return write_with.template operator()<kFamily, R>(RowSlope<R>(alpha));
    }
    write_with.template operator()<kFamily, R>(Slope<kFamily, R>(alpha));
  };
  const auto smooth = [&]<Family kFamily>() { write.template operator()<kFamily, Real<T>>(); };
  if (WithSmoothFamily(alpha, smooth)) return;
  if (entmax::family_of(alpha) == Family::steep) {
    return write.template operator()<Family::steep, double>();
  }
  for (std::int64_t r = begin; r < end; ++r) FillNaN(d_x.row<T>(r), length);
}

template <class T>
TensorRows Packed(const TensorRows& from, const BackwardTile& tile, std::byte* scratch) {
  if (!from || from.contiguous()) return from;
  const TensorRows packed{scratch, tile.pitch, 1};
  entmax::packed_copy<T>(from, tile.rows, tile.length, packed);
  return packed;
}

// Rows side by side in columns: a row in each lane.
template <Family kFamily, class T>
void GradientOfStripe(const BackwardTile& tile) {
  using R = Real<T>;
  const hn::ScalableTag<R> d;
  constexpr std::size_t kMostRows = 256;
  constexpr std::int64_t kRowsAhead = 32, kLine = 64;
  const Slope<kFamily, R> slope(tile.alpha);
  const DenseWeights weights(static_cast<const T*>(nullptr), slope);
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t rows = tile.rows, width = (rows + lanes - 1) / lanes * lanes;
  const std::int64_t bytes = rows * static_cast<std::int64_t>(sizeof(T));
  R* const stored = reinterpret_cast<R*>(tile.stripe);
  HWY_ALIGN R sums[kMostRows] = {}, dots[kMostRows] = {};
  double totals[kMostRows] = {}, total_dots[kMostRows] = {};
  const auto for_lanes = [&](const auto& body) HWY_ATTR {
    for (std::int64_t r = 0; r < rows; r += lanes) {
      body(r, static_cast<std::size_t>(std::min(lanes, rows - r)));
    }
  };
  for (std::int64_t i = 0; i < tile.length; ++i) {
    const T* y = tile.y.row<T>(0) + i * tile.y.step;
    const T* d_y = tile.d_y.row<T>(0) + i * tile.d_y.step;
    // The lines of neighbouring axis positions are far apart, which no hardware foresees.
    const auto prefetch = [&](const T* from, std::int64_t step) {
      const auto ahead = reinterpret_cast<std::uintptr_t>(from) +
                         static_cast<std::uintptr_t>(kRowsAhead * step) * sizeof(T);
      for (std::int64_t byte = 0; byte < bytes; byte += kLine) {
        __builtin_prefetch(reinterpret_cast<const void*>(ahead + static_cast<std::uintptr_t>(byte)),
                           0, 2);
      }
    };
    prefetch(y, tile.y.step);
    prefetch(d_y, tile.d_y.step);
    R* const to = stored + 2 * i * width;
    for_lanes([&](std::int64_t r, std::size_t count) HWY_ATTR {
      const auto w = LoadSome(d, y + r, count);
      const auto active = weights.Active(d, w);
      const auto s = hn::IfThenElseZero(active, weights.Weight(d, w));
      const auto g = hn::IfThenElseZero(active, LoadSome(d, d_y + r, count));
      hn::Store(hn::Add(hn::Load(d, sums + r), s), d, sums + r);
      hn::Store(hn::MulAdd(s, g, hn::Load(d, dots + r)), d, dots + r);
      hn::StoreU(s, d, to + r);
      hn::StoreU(g, d, to + width + r);
    });
    if ((i + 1) % static_cast<std::int64_t>(kSumVectors) != 0 && i + 1 < tile.length) continue;
    for (std::int64_t r = 0; r < rows; ++r) {
      totals[r] += static_cast<double>(std::exchange(sums[r], R{0}));
      total_dots[r] += static_cast<double>(std::exchange(dots[r], R{0}));
    }
  }
  R* const means = sums;
  for (std::int64_t r = 0; r < rows; ++r) means[r] = static_cast<R>(total_dots[r] / totals[r]);
  const bool stream = std::is_same_v<T, R> && tile.stream && tile.d_x.data != tile.d_y.data &&
                      rows % lanes == 0 && tile.d_x.step % lanes == 0 &&
                      reinterpret_cast<std::uintptr_t>(tile.d_x.data) %
                              (static_cast<std::uintptr_t>(lanes) * sizeof(T)) ==
                          0;
  for (std::int64_t i = 0; i < tile.length; ++i) {
    const R* from = stored + 2 * i * width;
    T* to = tile.d_x.row<T>(0) + i * tile.d_x.step;
    for_lanes([&](std::int64_t r, std::size_t count) HWY_ATTR {
      const auto s = hn::LoadU(d, from + r);
      const auto difference = hn::Sub(hn::LoadU(d, from + width + r), hn::Load(d, means + r));
      const auto active = hn::Not(hn::Eq(s, hn::Zero(d)));
      const auto gradient = hn::IfThenElseZero(active, hn::Mul(s, difference));
      if constexpr (std::is_same_v<T, R>) {
        if (stream) return hn::Stream(gradient, d, to + r);
      }
      if (count == static_cast<std::size_t>(lanes)) {
        StoreAs(d, gradient, to + r);
      } else {
        StoreFirstAs(d, gradient, to + r, count);
      }
    });
  }
}

// False when others have to do it.
template <class T>
bool StripeServes(const BackwardTile& tile) {
  if (tile.stripe == nullptr || tile.alpha_per_row || tile.d_alpha || !tile.d_x) return false;
  return WithSmoothFamily(tile.alpha,
                          [&]<Family kFamily>() { GradientOfStripe<kFamily, T>(tile); });
}

// False when others have to do it.
template <class T>
bool ShortRowsServe(const BackwardTile& tile) {
  using R = Real<T>;
  // Without elements y may be null, and support_size, too.
  if (tile.length == 0 || tile.length > kLaneLength || !tile.d_x) return false;
  if (!tile.d_y.contiguous() || !tile.d_x.contiguous()) return false;
  if (!tile.y) {
    if (!tile.support.contiguous()) return false;
    constexpr std::uint8_t kAll[] = {255, 255, 255, 255, 255, 255, 255, 255,
                                     255, 255, 255, 255, 255, 255, 255, 255};
    static_assert(sizeof(kAll) * 8 == kLaneLength);
    const auto weights = [&](std::int64_t r) {
      // A row of NaN has none in its support.
      if (*tile.support_size.row<std::int32_t>(r) < 0) {
        return MaskWeights<R>(kAll, std::numeric_limits<R>::quiet_NaN());
      }
      return MaskWeights<R>(tile.support.row<std::uint8_t>(r));
    };
    ShortGradients<false, T, decltype(weights)>(tile.length, weights).Compute(tile);
    return true;
  }
  if (!tile.y.contiguous()) return false;
  if (tile.alpha_per_row) {
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const double alpha = tile.alpha_of<R>(r);
      if (!(alpha >= 1 && alpha <= 2)) return false;
    }
    RowSlope<R> slope(1);  // of the row that is being worked on
    const auto weights = [&](std::int64_t r) {
      slope = RowSlope<R>(tile.alpha_of<R>(r));
      return DenseWeights(static_cast<const T*>(tile.y.row<T>(r)), slope);
    };
    ShortGradients<true, T, decltype(weights)>(tile.length, weights).Compute(tile);
    return true;
  }
  return WithSmoothFamily(tile.alpha, [&]<Family kFamily>() {
    const std::int64_t done = tile.length < static_cast<std::int64_t>(kLanes<R>)
                                  ? LaneGradients<kFamily, T>(tile).Compute()
                                  : 0;
    const Slope<kFamily, R> slope(tile.alpha);
    const auto weights = [&](std::int64_t r) {
      return DenseWeights(static_cast<const T*>(tile.y.row<T>(r)), slope);
    };
    ShortGradients<true, T, decltype(weights)>(tile.length, weights).Compute(tile, done);
  });
}

// If it is wanted. Before d_x, which may be d_y's memory.
template <class T>
void WriteDAlpha(const BackwardTile& tile, const TensorRows& y, const TensorRows& d_y) {
  using Statistic = Real<T>;
  const auto length = static_cast<std::size_t>(tile.length);
  for (std::int64_t r = 0; tile.d_alpha && r < tile.rows; ++r) {
    const double alpha = tile.alpha_of<Statistic>(r);
    const auto of_row = [&]<class R>() {
      return DAlphaOfRow<R>(y.row<T>(r), d_y.row<T>(r), length, alpha);
    };
    double d_alpha = std::numeric_limits<double>::quiet_NaN();
    switch (entmax::family_of(alpha)) {
      case Family::invalid:
        break;
      case Family::steep:
        d_alpha = of_row.template operator()<double>();
        break;
      default:
        d_alpha = of_row.template operator()<Real<T>>();
    }
    *tile.d_alpha.row<Statistic>(r) = static_cast<Statistic>(d_alpha);
  }
}

template <class T>
void BackwardTileOf(const BackwardTile& tile) {
  const bool in_place = tile.y.contiguous() && tile.d_y.contiguous();
  if (in_place) WriteDAlpha<T>(tile, tile.y, tile.d_y);
  if constexpr (kHasLanes) {
    if (StripeServes<T>(tile) || ShortRowsServe<T>(tile)) {
      if (tile.stream) hwy::FlushStream();
      return;
    }
  }
  const auto length = static_cast<std::size_t>(tile.length);
  const TensorRows y = Packed<T>(tile.y, tile, tile.packed_y);
  const TensorRows d_y = Packed<T>(tile.d_y, tile, tile.packed_d_y);
  const bool packs_d_x = tile.d_x && !tile.d_x.contiguous();
  const TensorRows d_x = packs_d_x ? TensorRows{tile.packed_d_x, tile.pitch, 1} : tile.d_x;
  // In place the lines are cached already.
  const bool stream = tile.stream && !packs_d_x && d_x.data != d_y.data;
  if (!in_place) WriteDAlpha<T>(tile, y, d_y);
  const auto from_y = [&](std::int64_t begin, std::int64_t end) {
    GradientsFromY<T>(y, d_y, d_x, begin, end, length, tile.alpha_of<Real<T>>(begin), stream,
                      tile.weights);
  };
  if (tile.d_x && tile.y && !tile.alpha_per_row) from_y(0, tile.rows);
  // Here, too, they may be null.
  for (std::int64_t r = 0; tile.d_x && length > 0 && r < tile.rows; ++r) {
    if (!tile.y) {
      GradientFromSupport(tile, r, d_y, d_x.row<T>(r), stream);
    } else if (tile.alpha_per_row) {
      from_y(r, r + 1);
    }
  }
  if (packs_d_x) entmax::unpack<T>(d_x, tile.rows, tile.length, tile.d_x);
  if (stream) hwy::FlushStream();
}

// False when others have to do it.
template <class T>
bool SparseGradientsServe(const BackwardTile& tile) {
  if (!tile.sparse_columns || !tile.y || tile.d_alpha || !tile.d_x) return false;
  if constexpr (kHasLanes) {
    if (entmax::family_of(tile.alpha) == Family::sparsemax) {
      return SparseGradients<Family::sparsemax, T>(tile).Compute();
    }
    if (entmax::family_of(tile.alpha) == Family::entmax15) {
      return SparseGradients<Family::entmax15, T>(tile).Compute();
    }
    return SparseGradients<Family::general, T>(tile).Compute();
  }
  return false;
}

void RunBackwardTile(const BackwardTile& tile) {
  dispatch_floating(tile.dtype, [&]<class T>() {
    if (SparseGradientsServe<T>(tile)) {
      if (tile.stream) hwy::FlushStream();
    } else if (tile.sparse_columns) {
      for (std::int64_t r = 0; r < tile.rows; r += tile.packed_rows) {
        BackwardTileOf<T>(tile.template part<T>(r));
      }
    } else {
      BackwardTileOf<T>(tile);
    }
  });
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pullback::entmax {
namespace {

HWY_EXPORT(RunBackwardTile);

enum : std::size_t { kDY, kY, kDX, kSupport, kAlpha, kSize, kDAlpha };

Walk backward_walk(const EntmaxProblem& p) {
  std::vector<WalkTensor> tensors = {
      walk_with_axis(p, p.d_y),  walk_with_axis(p, p.y),           walk_with_axis(p, p.d_x),
      walk_support(p.support),   walk_per_row(p, p.alpha_per_row), walk_per_row(p, p.support_size),
      walk_per_row(p, p.d_alpha)};
  return Walk(Outer(p), std::move(tensors));
}

class BackwardPlan final : public RowPlan {
 public:
  BackwardPlan(const EntmaxProblem& problem, const Device& device)
      : BackwardPlan(problem, device, backward_walk(problem)) {}

  void run(Stream, const EntmaxTensors& tensors, Workspace workspace) const override {
    for_each(tensors, workspace, kDX, tensors.d_x, [&](const Task& task) {
      const BackwardTile tile{
          row_tile(task, kSupport, tensors.support, kAlpha, tensors.alpha_per_row),
          task.along_axis(kY, tensors.y),
          task.along_axis(kDY, tensors.d_y),
          task.along_axis(kDX, tensors.d_x),
          task.per_row(kSize, tensors.support_size),
          task.per_row(kDAlpha, tensors.d_alpha),
          task.scratch + packed_y_,
          task.scratch + packed_d_y_,
          task.scratch + packed_d_x_,
          task.scratch + weights_,
          has_stripe_ && tensors.y != nullptr ? task.scratch + stripe_ : nullptr,
          sparse_columns_,
          packed_rows_,
      };
      HWY_DYNAMIC_DISPATCH(RunBackwardTile)(tile);
    });
  }

 private:
  BackwardPlan(const EntmaxProblem& problem, const Device& device, Walk walk)
      : RowPlan(problem, device, walk, packs(walk),
                sparse_columns(problem, walk) ? kSparseColumns : 0),
        sparse_columns_(sparse_columns(problem, walk)) {
    const auto bytes = static_cast<std::int64_t>(size_of(problem.x.dtype));
    WorkspaceLayout slot;
    if (!walk_.contiguous(kY)) packed_y_ = slot.take(tile_elements(bytes));
    if (!walk_.contiguous(kDY)) packed_d_y_ = slot.take(tile_elements(bytes));
    if (!walk_.contiguous(kDX)) packed_d_x_ = slot.take(tile_elements(bytes));
    add_support_bits(slot, problem.support, kSupport);
    const Family family = family_of(problem.alpha);
    const bool any = problem.alpha_per_row.given();
    if (any || family == Family::near_one || family == Family::general || family == Family::steep) {
      weights_ = slot.take(vector_scratch_bytes(
          length_, any || family == Family::steep || problem.x.dtype == DType::f64));
    }
    constexpr std::int64_t kMostLanes = 16;
    const std::int64_t width = (packed_rows_ / kMostLanes + 1) * kMostLanes;
    const std::int64_t stripe_bytes =
        2 * width * length_ *
        static_cast<std::int64_t>(size_of(accumulation_dtype(problem.x.dtype)));
    has_stripe_ = packs(walk_) && walk_.adjacent(kY) && walk_.adjacent(kDY) &&
                  walk_.adjacent(kDX) && walk_.inner() >= kLeastStripeColumns &&
                  stripe_bytes <= kMostStripeBytes;
    if (has_stripe_) {
      stripe_ = slot.take(
          std::max(stripe_bytes, sparse_columns_ ? sparse_bytes(problem) : std::int64_t{0}));
    }
    finish(slot, problem.d_x, packs(walk_));
  }

  // Whether the support of rows in columns may be a small part of them.
  static bool sparse_columns(const EntmaxProblem& problem, const Walk& walk) {
    constexpr std::int64_t kLeastLength = 512, kLeastTiles = 4;  // for several threads
    return problem.alpha >= 1.125 && problem.alpha <= 2 && !problem.alpha_per_row.given() &&
           !problem.offsets.given() && packs(walk) && walk.adjacent(kY) && walk.adjacent(kDY) &&
           walk.adjacent(kDX) && row_length(problem) >= kLeastLength &&
           walk.inner() >= kLeastTiles * kSparseColumns &&
           sparse_bytes(problem) <= kMostStripeBytes;
  }
  // As SparseGradients cuts it: pairs of vectors, and a place of each.
  static std::int64_t sparse_bytes(const EntmaxProblem& problem) {
    const auto real = static_cast<std::int64_t>(size_of(accumulation_dtype(problem.x.dtype)));
    const std::int64_t kept = most_kept(row_length(problem)) + kColumnsChunk + 1;
    return kept * kSparseColumns * (2 * real + static_cast<std::int64_t>(sizeof(std::uint32_t)));
  }

  static bool packs(const Walk& walk) {
    return !walk.contiguous(kY) || !walk.contiguous(kDY) || !walk.contiguous(kDX);
  }

  std::size_t packed_y_ = 0, packed_d_y_ = 0, packed_d_x_ = 0, weights_ = 0, stripe_ = 0;
  bool has_stripe_ = false, sparse_columns_ = false;
};

}  // namespace

Body make_cpu_backward(const EntmaxProblem& problem, const Device& device) {
  return std::make_unique<BackwardPlan>(problem, device);
}

}  // namespace pullback::entmax
#endif  // HWY_ONCE
