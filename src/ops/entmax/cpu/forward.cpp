// The forward pass of entmax (solve-inl.hpp has the formula). Short rows, and rows in neighbouring
// columns, are many at a time (forward_lanes-inl.hpp), and so are longer ones whose powers take a
// logarithm (forward_batch-inl.hpp); else it is one row at a time:
//   1. the maximum, and NaN; the maxima of the SIMD lanes are a subset of the row whose threshold
//      bounds the row's from below;
//   2. the few elements above that bound go to scratch, and give the exact threshold;
//   3. y.
// A row is read from memory once and from L2 twice. Softmax needs exp of every element: it goes
// through the row in blocks.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/entmax/cpu/forward.cpp"
#include <hwy/foreach_target.h>

#include "cpu/ahead-inl.hpp"
#include "cpu/simd-inl.hpp"
#include "ops/entmax/cpu/forward_batch-inl.hpp"
#include "ops/entmax/cpu/forward_lanes-inl.hpp"
#include "ops/entmax/cpu/forward_mask-inl.hpp"
#include "ops/entmax/cpu/forward_row-inl.hpp"
#include "ops/entmax/cpu/solve-inl.hpp"
#include "ops/entmax/cpu/stream-inl.hpp"

#ifndef PULLBACK_ENTMAX_FORWARD_ONCE
#define PULLBACK_ENTMAX_FORWARD_ONCE
#include "ops/entmax/cpu/forward_tile.hpp"
#endif

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

using entmax::ForwardTile;
using entmax::RowResult;
using entmax::TensorRows;

// A block of softmax: x and exp(x) of it fit in L1.
constexpr std::size_t kSoftmaxVectors = 256;
static_assert(kSoftmaxVectors >= 64);  // vector_scratch_bytes() has room for one factor a block
// Below this length the bound from lane maxima costs more than it saves.
constexpr std::size_t kMinLengthForBound = 256;

// z = x - max of the elements that are active at theta; their number.
template <class P, class R, class T>
std::size_t Candidates(const P& power, const T* x, std::size_t length, R max, R theta,
                       R* HWY_RESTRICT z) {
  const hn::ScalableTag<R> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto shift = hn::Set(d, max), at = hn::Set(d, theta);
  std::size_t count = 0, i = 0;
  const auto keep = [&](auto v) HWY_ATTR {
    const auto active = power.Active(d, power.Excess(d, v, at));
    count += StoreActive(d, v, active, z + count);
  };
  for (; i + 4 * lanes <= length; i += 4 * lanes) {
    const auto z0 = hn::Sub(LoadAs(d, x + i), shift);
    const auto z1 = hn::Sub(LoadAs(d, x + i + lanes), shift);
    const auto z2 = hn::Sub(LoadAs(d, x + i + 2 * lanes), shift);
    const auto z3 = hn::Sub(LoadAs(d, x + i + 3 * lanes), shift);
    const auto largest = hn::Max(hn::Max(z0, z1), hn::Max(z2, z3));
    if (hn::AllFalse(d, power.Active(d, power.Excess(d, largest, at)))) continue;
    keep(z0);
    keep(z1);
    keep(z2);
    keep(z3);
  }
  for (; i < length; i += lanes) {
    const auto v = LoadFirstAs(d, x + i, std::min(lanes, length - i),
                               -std::numeric_limits<Real<T>>::infinity());
    keep(hn::Sub(v, shift));
  }
  PadCandidates(z, count);
  return count;
}

// A lower bound of theta from the lane maxima, which become z.
template <class P, class R>
R LowerBound(const P& power, R max, R* lane_maxima) {
  const hn::ScalableTag<R> d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t count = kAccumulators * lanes;
  for (std::size_t i = 0; i < count; i += lanes) {
    hn::StoreU(hn::Sub(hn::LoadU(d, lane_maxima + i), hn::Set(d, max)), d, lane_maxima + i);
  }
  PadCandidates(lane_maxima, count);
  // The slack covers the rounding of sums: the bound must not drop an element of the support.
  constexpr R kSlack = 16 * std::numeric_limits<R>::epsilon();
  return std::max(P::start, RoughSolve(power, P::start, lane_maxima, count) - kSlack);
}

template <Family kFamily, class R, class T>
RowResult SparseRow(const RowView<T>& row, double alpha, R* elements) {
  const Power<kFamily, R> power(alpha);
  const bool prefetch = row.length * sizeof(T) > kNextBytes;  // PrefetchNext() does for less
  const R max = MaxOfRow(row.x, row.length, elements, prefetch);
  if (!std::isfinite(max)) return DegenerateRow(row, max < 0);
  PrefetchNext(row);
  const bool bounded = row.length >= kMinLengthForBound;
  const R low = bounded ? LowerBound(power, max, elements) : power.start;
  const std::size_t count = Candidates(power, row.x, row.length, max, low, elements);
  const Threshold<R> threshold = Solve(power, low, elements, count);
  if (row.y || row.support) WriteY(power, row, max, threshold);
  return {power.Tau(max, threshold.theta, threshold.rest),
          static_cast<std::int64_t>(threshold.count)};
}

// Block by block, so that a row is read from memory once, and while exp is busy: exp(x - maximum of
// the block) goes to scratch, and the last pass scales it by a factor for each block.
template <class T>
RowResult SoftmaxRow(const RowView<T>& row, Real<T>* elements) {
  using R = Real<T>;
  const hn::ScalableTag<R> d;
  const std::size_t lanes = hn::Lanes(d), block = kSoftmaxVectors * lanes;
  constexpr R kLowest = -std::numeric_limits<R>::infinity();
  R* const factors = elements + (row.length + lanes - 1) / lanes * lanes;
  R maximum = kLowest;
  double sum = 0;  // of exp(x - maximum)
  HWY_ALIGN R lane_maxima[kAccumulators * hn::MaxLanes(d)];
  LinesAhead ahead(row.x);
  for (std::size_t begin = 0; begin < row.length; begin += block) {
    const std::size_t end = std::min(row.length, begin + block);
    const R highest = MaxOfRow(row.x + begin, end - begin, lane_maxima, false);
    if (!(highest < std::numeric_limits<R>::infinity())) return DegenerateRow(row, false);
    factors[begin / block] = highest;
    const auto shift = hn::Set(d, highest > kLowest ? highest : R{0});
    double added = 0;
    for (std::size_t i = begin; i < end;) {
      auto part0 = hn::Zero(d), part1 = hn::Zero(d);
      const auto take = [&](auto v, auto& part) HWY_ATTR {
        const auto e = ExpNonPositive(d, hn::Sub(v, shift));
        part = hn::Add(part, e);
        hn::StoreU(e, d, elements + i);
        i += lanes;
      };
      const std::size_t part_end = std::min(end, i + kSumVectors * lanes);
      while (i + 2 * lanes <= part_end) {
        ahead.StepTo(row.x + i);
        take(Load(d, row.x + i), part0);
        take(Load(d, row.x + i), part1);
      }
      while (i < part_end) {
        take(LoadFirst(d, row.x + i, std::min(lanes, part_end - i), kLowest), part0);
      }
      added += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, hn::Add(part0, part1))));
    }
    if (highest > maximum) {
      const double less = static_cast<double>(maximum) - static_cast<double>(highest);
      sum = (sum > 0 ? sum * std::exp(less) : 0) + added;
      maximum = highest;
    } else if (highest > kLowest) {
      sum += added * std::exp(static_cast<double>(highest) - static_cast<double>(maximum));
    }
  }
  if (!(sum > 0)) return DegenerateRow(row, true);
  PrefetchNext(row);
  for (std::size_t begin = 0; begin < row.length; begin += block) {
    R& factor = factors[begin / block];
    const double less = static_cast<double>(factor) - static_cast<double>(maximum);
    factor = static_cast<R>((less == 0 ? 1 : std::exp(less)) / sum);
  }
  const auto fill = [&](T* to, std::size_t begin, std::size_t count, auto store) HWY_ATTR {
    const std::size_t end = begin + count;
    for (std::size_t i = begin; i < end;) {
      const auto scale = hn::Set(d, factors[i / block]);
      const std::size_t stop = std::min(end, (i / block + 1) * block);
      for (; i + lanes <= stop; i += lanes) {
        store(d, hn::Mul(scale, hn::LoadU(d, elements + i)), to + (i - begin));
      }
      if (i == stop) continue;
      StoreFirst(d, hn::Mul(scale, hn::LoadU(d, elements + i)), to + (i - begin), stop - i);
      i = stop;
    }
  };
  if (row.y) WriteRow(row.y, row.length, row.stream, fill);
  RowResult result{static_cast<double>(maximum) + std::log(sum), 0};
  // All but -inf, also where exp underflows.
  for (std::size_t i = 0; row.wants_size && i < row.length; ++i) {
    result.support_size += static_cast<R>(row.x[i]) > kLowest;
  }
  return result;
}

template <class T>
RowResult ForwardRow(const RowView<T>& row, double alpha, std::byte* elements) {
  using R = Real<T>;
  auto* reals = reinterpret_cast<R*>(elements);
  switch (entmax::family_of(alpha)) {
    case Family::softmax:
      return SoftmaxRow(row, reals);
    case Family::near_one:
      return SparseRow<Family::near_one, R>(row, alpha, reals);
    case Family::entmax15:
      return SparseRow<Family::entmax15, R>(row, alpha, reals);
    case Family::general:
      return SparseRow<Family::general, R>(row, alpha, reals);
    case Family::sparsemax:
      return SparseRow<Family::sparsemax, R>(row, alpha, reals);
    case Family::steep:
      return SparseRow<Family::steep, double>(row, alpha, reinterpret_cast<double*>(elements));
    case Family::invalid:
      break;
  }
  return DegenerateRow(row, row.length == 0);
}

// Up to this length, rows with an alpha each are computed in the lanes: powers that go by
// logarithms are better computed of candidates only.
constexpr std::int64_t kRowsPowerLength = 48;

// Those of `rows` rows from r on, and more of the last one for lanes without a row; false if there
// is one that RowsPower does not serve.
template <class R>
bool AlphasOfLanes(const ForwardTile& tile, std::int64_t r, std::int64_t rows, R* alphas) {
  for (std::int64_t k = 0; k < static_cast<std::int64_t>(kLanes<R>); ++k) {
    const double alpha = tile.alpha_of<R>(r + std::min(k, rows - 1));
    if (!(alpha >= RowsPower<R>::kLeastAlpha && alpha <= 2)) return false;
    alphas[k] = static_cast<R>(alpha);
  }
  return true;
}

template <class T>
void ForwardTileOf(const ForwardTile& tile) {
  using Statistic = Real<T>;
  const auto stripe = [&](const auto& power) { return StripeInLanes<T>(tile, power); };
  if (tile.stripe != nullptr && !tile.support && !tile.support_size &&
      WithPowerOfLanes<Real<T>>(tile, stripe)) {
    if (tile.stream) hwy::FlushStream();
    return;
  }
  const bool packs_x = tile.mask || !tile.x.contiguous();
  const TensorRows x = packs_x ? TensorRows{tile.packed_x, tile.pitch, 1} : tile.x;
  if (tile.mask) {
    MaskedCopy<T>(tile, x);
  } else if (packs_x) {
    entmax::packed_copy<T>(tile.x, tile.rows, tile.length, x);
  }
  const bool packs_y = tile.y && !tile.y.contiguous();
  const TensorRows y = packs_y ? TensorRows{tile.packed_y, tile.pitch, 1} : tile.y;
  const std::int64_t support_bytes = (tile.length + 7) / 8;
  const bool packs_bits = tile.support && !tile.support.contiguous();
  const auto view = [&](std::int64_t r) {
    return RowView<T>{x.row<T>(r),
                      static_cast<std::size_t>(tile.length),
                      y ? y.row<T>(r) : nullptr,
                      packs_bits     ? tile.bits
                      : tile.support ? tile.support.row<std::uint8_t>(r)
                                     : nullptr,
                      tile.stream && !packs_y,
                      static_cast<bool>(tile.support_size),
                      r + 1 < tile.rows ? x.row<T>(r + 1) : nullptr};
  };
  const auto finish = [&](std::int64_t r, const RowResult& result) {
    if (tile.tau) *tile.tau.row<Statistic>(r) = static_cast<Statistic>(result.tau);
    if (tile.support_size) {
      *tile.support_size.row<std::int32_t>(r) = static_cast<std::int32_t>(
          std::min<std::int64_t>(result.support_size, std::numeric_limits<std::int32_t>::max()));
    }
    for (std::int64_t i = 0; packs_bits && i < support_bytes; ++i) {
      tile.support.row<std::uint8_t>(r)[i * tile.support.step] = tile.bits[i];
    }
  };
  const auto one_row = [&](std::int64_t r) {
    finish(r, ForwardRow(view(r), tile.alpha_of<Statistic>(r), tile.elements));
  };
  std::int64_t r = 0;
  const bool short_rows = tile.length <= (tile.alpha_per_row ? kRowsPowerLength : kLaneLength);
  constexpr auto kRows = static_cast<std::int64_t>(kLanes<Statistic>);
  const RowStep<T> step{x.row_step, y.row_step, tile.support.row_step};
  FourLinesAhead ahead(x.row<T>(0));
  const bool fetches = x.row_step == tile.length;
  const auto sink_of = [&](std::int64_t first) {
    const auto finish_kth = [&, first](std::size_t k, const RowResult& result) {
      const std::int64_t row = first + static_cast<std::int64_t>(k);
      finish(row, result);
      if (fetches) ahead.StepTo(x.row<T>(row + 1));
    };
    const auto store_taus = [&, first](const double* taus) {
      if (!tile.tau) return;
      auto* const to = tile.tau.row<Statistic>(first);
      const std::int64_t apart = tile.tau.row_step;
      if (apart == 1) {
        for (std::int64_t k = 0; k < kRows; ++k) to[k] = static_cast<Statistic>(taus[k]);
      } else {
        for (std::int64_t k = 0; k < kRows; ++k) {
          to[k * apart] = static_cast<Statistic>(taus[k]);
        }
      }
    };
    return RowSink{finish_kth, store_taus, ahead, fetches};
  };
  if (short_rows && !packs_bits) {
    WithPowerOfLanes<Statistic>(tile, [&](const auto& power) {
      constexpr Family kFamily = std::remove_reference_t<decltype(power)>::family;
      while (r + kRows <= tile.rows) {
        bool done;
        constexpr bool kByRows = kFamily == Family::softmax || kFamily == Family::sparsemax;
        if (kByRows && ShortGroup<T>::InLanes(view(r))) {
          done = OneGroup<T>(power, view(r), sink_of(r), step);
        } else if constexpr (kFamily == Family::softmax) {
          done = ShortSoftmax<T>(view(r), step, sink_of(r).finish);
        } else if constexpr (kFamily == Family::sparsemax) {
          done = ShortSparsemax<T>(power, view(r), step, sink_of(r));
        } else {
          const std::int64_t second = r + kRows;
          if (second + kRows <= tile.rows &&
              TwoGroups<T>(power, view(r), sink_of(r), view(second), sink_of(second), step)) {
            r = second + kRows;
            continue;
          }
          done = OneGroup<T>(power, view(r), sink_of(r), step);
        }
        for (std::int64_t k = 0; !done && k < kRows; ++k) one_row(r + k);
        r += kRows;
      }
      return true;
    });
  }
  Statistic alphas[kRows];
  if (short_rows && tile.alpha_per_row && tile.length > 0 && ShortGroup<T>::WantsY(view(0))) {
    for (; r + kRows <= tile.rows; r += kRows) {
      const bool done = AlphasOfLanes(tile, r, kRows, alphas) &&
                        OneGroup<T>(RowsPower<Statistic>(alphas), view(r), sink_of(r), step);
      for (std::int64_t k = 0; !done && k < kRows; ++k) one_row(r + k);
    }
  }
  const auto add_batch = [&](auto& batch, std::int64_t end) {
    batch.Clear();
    for (std::int64_t k = r; k < end; ++k) batch.Add(view(k));
    batch.Compute(fetches);
    for (std::int64_t k = r; k < end; ++k) finish(k, batch.result(k - r));
  };
  const auto batches = [&](auto batch) {
    for (; r < tile.rows; r += batch.rows()) {
      add_batch(batch, std::min(tile.rows, r + batch.most_rows()));
    }
  };
  if (tile.batch.candidates != nullptr && !short_rows && !packs_bits) {
    const auto length = static_cast<std::size_t>(tile.length);
    if (tile.alpha_per_row) {
      using Batch = RowBatch<RowsPower<Statistic>, T>;
      for (std::int64_t end; r < tile.rows; r = end) {
        end = std::min(tile.rows, r + Batch::MostRows(length));
        if (AlphasOfLanes(tile, r, end - r, alphas)) {
          Batch batch(RowsPower<Statistic>(alphas), length, tile.batch);
          add_batch(batch, end);
        } else {
          for (std::int64_t k = r; k < end; ++k) one_row(k);
        }
      }
    } else if (tile.alpha == 1.5) {
      batches(SparseBatch<Family::entmax15, T>(tile.alpha, length, tile.batch));
    } else if (tile.alpha == 2) {
      batches(SparseBatch<Family::sparsemax, T>(tile.alpha, length, tile.batch));
    } else {
      using General = LanePower<Family::general, Statistic>;
      batches(RowBatch<General, T>(General(tile.alpha), length, tile.batch));
    }
  }
  for (; r < tile.rows; ++r) one_row(r);
  if (packs_y) entmax::unpack<T>(y, tile.rows, tile.length, tile.y);
  if (tile.stream) hwy::FlushStream();
}

void RunForwardTile(const ForwardTile& tile) {
  dispatch_floating(tile.dtype, [&]<class T>() { ForwardTileOf<T>(tile); });
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pullback::entmax {
namespace {

HWY_EXPORT(RunForwardTile);

enum : std::size_t { kX, kMask, kY, kSupport, kAlpha, kTau, kSize };

Walk forward_walk(const EntmaxProblem& p) {
  std::vector<WalkTensor> tensors = {walk_with_axis(p, p.x),           walk_with_axis(p, p.mask),
                                     walk_with_axis(p, p.y),           walk_support(p.support),
                                     walk_per_row(p, p.alpha_per_row), walk_per_row(p, p.tau),
                                     walk_per_row(p, p.support_size)};
  return Walk(Outer(p), std::move(tensors));
}

class ForwardPlan final : public RowPlan {
 public:
  ForwardPlan(const EntmaxProblem& problem, const Device& device)
      : ForwardPlan(problem, device, forward_walk(problem)) {}

  void run(Stream, const EntmaxTensors& tensors, Workspace workspace) const override {
    for_each(tensors, workspace, kY, tensors.y, [&](const Task& task) {
      const ForwardTile tile{
          row_tile(task, kSupport, tensors.support, kAlpha, tensors.alpha_per_row),
          task.along_axis(kX, tensors.x),
          task.along_axis(kMask, tensors.mask),
          task.along_axis(kY, tensors.y),
          task.per_row(kTau, tensors.tau),
          task.per_row(kSize, tensors.support_size),
          task.scratch + packed_x_,
          task.scratch + packed_y_,
          task.scratch + elements_,
          has_stripe_ ? task.scratch + stripe_ : nullptr,
          {has_batch_ ? task.scratch + candidates_ : nullptr, task.scratch + places_, batch_rows_},
      };
      HWY_DYNAMIC_DISPATCH(RunForwardTile)(tile);
    });
  }

 private:
  ForwardPlan(const EntmaxProblem& problem, const Device& device, Walk walk)
      : RowPlan(problem, device, walk, packs(walk)) {
    const auto bytes = static_cast<std::int64_t>(size_of(problem.x.dtype));
    const bool in_double = problem.x.dtype == DType::f64 || problem.alpha_per_row.given() ||
                           family_of(problem.alpha) == Family::steep;
    ScratchLayout slot;
    if (problem.mask.given() || !walk_.contiguous(kX)) packed_x_ = slot.add(tile_elements(bytes));
    if (!walk_.contiguous(kY)) packed_y_ = slot.add(tile_elements(bytes));
    add_support_bits(slot, problem.support, kSupport);
    elements_ = slot.add(vector_scratch_bytes(length_, in_double));
    has_stripe_ = !problem.mask.given() && !walk_.contiguous(kX) && walk_.adjacent(kX) &&
                  walk_.adjacent(kY) && walk_.inner() >= kLeastStripeColumns &&
                  stripe_bytes(problem.x.dtype) <= kMostStripeBytes;
    if (has_stripe_) stripe_ = slot.add(stripe_bytes(problem.x.dtype));
    const bool general =
        problem.alpha_per_row.given() || family_of(problem.alpha) == Family::general;
    has_batch_ = general || ((problem.alpha == 2 || problem.alpha == 1.5) &&
                             walk_.tile_rows() >= kMostBatchRows);
    if (has_batch_) {
      batch_rows_ = static_cast<std::size_t>(std::min(walk_.tile_rows(), kMostBatchRows));
      const auto rows = static_cast<std::int64_t>(batch_rows_);
      const auto real = static_cast<std::int64_t>(size_of(accumulation_dtype(problem.x.dtype)));
      candidates_ = slot.add((general ? 2 : 1) * rows * candidates_pitch(length_) * real);
      if (general) places_ = slot.add(rows * places_pitch(length_));
    }
    finish(slot, problem.y, packs(walk_) || problem.mask.given());
  }

  static bool packs(const Walk& walk) { return !walk.contiguous(kX) || !walk.contiguous(kY); }

  // The columns of a tile in whole vectors, and one vector more for candidates.
  std::int64_t stripe_bytes(DType dtype) const {
    constexpr std::int64_t kMostLanes = 16;
    const std::int64_t columns = (walk_.tile_rows() / kMostLanes + 2) * kMostLanes;
    return columns * length_ * static_cast<std::int64_t>(size_of(accumulation_dtype(dtype)));
  }

  std::size_t packed_x_ = 0, packed_y_ = 0, elements_ = 0, stripe_ = 0, candidates_ = 0,
              places_ = 0, batch_rows_ = 0;
  bool has_stripe_ = false, has_batch_ = false;
};

}  // namespace

Body make_cpu_forward(const EntmaxProblem& problem, const Device& device) {
  return std::make_unique<ForwardPlan>(problem, device);
}

}  // namespace pullback::entmax
#endif  // HWY_ONCE
