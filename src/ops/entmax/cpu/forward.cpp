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
  // The size is that of y's support: at an exact tie with the threshold theta would count others.
  const bool writes = row.y || row.support || row.wants_size;
  return {power.Tau(max, threshold.theta, threshold.rest),
          writes ? WriteY(power, row, max, threshold) : 0};
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
  return DegenerateRow(row, false);
}

// Up to this length, rows with an alpha each are computed in the lanes: powers that go by
// logarithms are better computed of candidates only.
constexpr std::int64_t kRowsPowerLength = 48;

// The rows of a tile, where they have unit stride: many at a time from the first one on, and the
// rest one by one.
template <class T>
class ForwardRows {
 public:
  using R = Real<T>;

  ForwardRows(const ForwardTile& tile, const TensorRows& x, const TensorRows& y)
      : tile_(tile),
        x_(x),
        y_(y),
        stages_bits_(tile.support && !tile.support.contiguous()),
        ahead_(x.row<T>(0)) {}

  void Compute() {
    if constexpr (kHasLanes) {
      const bool short_rows =
          tile_.length <= (tile_.alpha_per_row ? kRowsPowerLength : kLaneLength);
      if (!short_rows && tile_.batch.candidates != nullptr && !stages_bits_) Batches();
      if (short_rows && tile_.length > 0 && !stages_bits_) ShortRows();
    }
    while (r_ < tile_.rows) OneByOne(r_ + 1);
  }

 private:
  static constexpr auto kRows = static_cast<std::int64_t>(kLanes<R>);

  RowView<T> View(std::int64_t r) const {
    return {x_.row<T>(r),
            static_cast<std::size_t>(tile_.length),
            y_ ? y_.row<T>(r) : nullptr,
            stages_bits_    ? tile_.bits
            : tile_.support ? tile_.support.row<std::uint8_t>(r)
                            : nullptr,
            tile_.stream && y_.data != tile_.packed_y,
            static_cast<bool>(tile_.support_size),
            r + 1 < tile_.rows ? x_.row<T>(r + 1) : nullptr};
  }
  // Whether rows follow each other, so that the next ones can be fetched.
  bool Fetches() const { return x_.row_step == tile_.length; }

  void Finish(std::int64_t r, const RowResult& result) const {
    if (tile_.tau) *tile_.tau.row<R>(r) = static_cast<R>(result.tau);
    if (tile_.support_size) {
      *tile_.support_size.row<std::int32_t>(r) = static_cast<std::int32_t>(
          std::min<std::int64_t>(result.support_size, std::numeric_limits<std::int32_t>::max()));
    }
    for (std::int64_t i = 0; stages_bits_ && i < (tile_.length + 7) / 8; ++i) {
      tile_.support.row<std::uint8_t>(r)[i * tile_.support.step] = tile_.bits[i];
    }
  }

  void OneByOne(std::int64_t end) {
    for (; r_ < end; ++r_) {
      Finish(r_, ForwardRow(View(r_), tile_.alpha_of<R>(r_), tile_.elements));
    }
  }

  // Where kRows rows from `first` on leave what they have besides y.
  auto SinkOf(std::int64_t first) {
    const auto finish_kth = [this, first](std::size_t k, const RowResult& result) {
      const std::int64_t row = first + static_cast<std::int64_t>(k);
      Finish(row, result);
      if (Fetches()) ahead_.StepTo(x_.row<T>(row + 1));
    };
    const auto store_taus = [this, first](const double* taus) {
      if (!tile_.tau) return;
      auto* const to = tile_.tau.row<R>(first);
      const std::int64_t apart = tile_.tau.row_step;
      if (apart == 1) {
        for (std::int64_t k = 0; k < kRows; ++k) to[k] = static_cast<R>(taus[k]);
      } else {
        for (std::int64_t k = 0; k < kRows; ++k) to[k * apart] = static_cast<R>(taus[k]);
      }
    };
    return RowSink{finish_kth, store_taus, ahead_, Fetches()};
  }

  void ShortRows() {
    if constexpr (kPowersOfLanes<R>) {
      if (tile_.alpha_per_row) return ShortRowsOfAlphas();
    }
    WithPowerOfLanes<R>(tile_, [&](const auto& power) {
      while (r_ + kRows <= tile_.rows) ShortRowsBy(power);
      return true;
    });
  }

  template <class P>
  void ShortRowsBy(const P& power) {
    const RowStep<T> step = Step();
    constexpr bool kByRows = P::family == Family::softmax || P::family == Family::sparsemax;
    bool done;
    if (kByRows && ShortGroup<T>::InLanes(View(r_))) {
      done = OneGroup<T>(power, View(r_), SinkOf(r_), step);
    } else if constexpr (P::family == Family::softmax) {
      done = ShortSoftmax<T>(View(r_), step, SinkOf(r_).finish);
    } else if constexpr (P::family == Family::sparsemax) {
      done = ShortSparsemax<T>(power, View(r_), step, SinkOf(r_));
    } else {
      const std::int64_t second = r_ + kRows;
      if (second + kRows <= tile_.rows &&
          TwoGroups<T>(power, View(r_), SinkOf(r_), View(second), SinkOf(second), step)) {
        r_ = second + kRows;
        return;
      }
      done = OneGroup<T>(power, View(r_), SinkOf(r_), step);
    }
    Passed(done);
  }
  // kRows rows that are done, or have to be computed one by one.
  void Passed(bool done) {
    if (done) {
      r_ += kRows;
    } else {
      OneByOne(r_ + kRows);
    }
  }

  void ShortRowsOfAlphas() {
    if (!ShortGroup<T>::WantsY(View(0))) return;
    while (r_ + kRows <= tile_.rows) {
      const bool done =
          AlphasOfLanes(kRows) && OneGroup<T>(RowsPower<R>(alphas_), View(r_), SinkOf(r_), Step());
      Passed(done);
    }
  }

  void Batches() {
    const auto length = static_cast<std::size_t>(tile_.length);
    if constexpr (kPowersOfLanes<R>) {
      if (tile_.alpha_per_row) return BatchesOfAlphas();
      if (entmax::family_of(tile_.alpha) == Family::general) {
        using General = LanePower<Family::general, R>;
        return Batches(RowBatch<General, T>(General(tile_.alpha), length, tile_.batch));
      }
    }
    if (tile_.alpha_per_row) return;
    if (tile_.alpha == 1.5) {
      Batches(SparseBatch<Family::entmax15, T>(tile_.alpha, length, tile_.batch));
    } else if (tile_.alpha == 2) {
      Batches(SparseBatch<Family::sparsemax, T>(tile_.alpha, length, tile_.batch));
    }
  }
  void BatchesOfAlphas() {
    const auto length = static_cast<std::size_t>(tile_.length);
    using Batch = RowBatch<RowsPower<R>, T>;
    while (r_ < tile_.rows) {
      const std::int64_t end = std::min(tile_.rows, r_ + Batch::MostRows(length));
      if (AlphasOfLanes(end - r_)) {
        Batch batch(RowsPower<R>(alphas_), length, tile_.batch);
        OneBatch(batch, end);
      } else {
        OneByOne(end);
      }
    }
  }
  template <class Batch>
  void Batches(Batch batch) {
    while (r_ < tile_.rows) OneBatch(batch, std::min(tile_.rows, r_ + batch.most_rows()));
  }
  template <class Batch>
  void OneBatch(Batch& batch, std::int64_t end) {
    batch.Clear();
    for (std::int64_t k = r_; k < end; ++k) batch.Add(View(k));
    batch.Compute(Fetches());
    for (std::int64_t k = r_; k < end; ++k) Finish(k, batch.result(k - r_));
    r_ = end;
  }

  RowStep<T> Step() const { return {x_.row_step, y_.row_step, tile_.support.row_step}; }

  // Those of `rows` rows, and more of the last one for lanes without a row; false if there is one
  // that RowsPower does not serve.
  bool AlphasOfLanes(std::int64_t rows) {
    for (std::int64_t k = 0; k < kRows; ++k) {
      const double alpha = tile_.alpha_of<R>(r_ + std::min(k, rows - 1));
      if (!(alpha >= RowsPower<R>::kLeastAlpha && alpha <= 2)) return false;
      alphas_[k] = static_cast<R>(alpha);
    }
    return true;
  }

  const ForwardTile& tile_;
  const TensorRows x_, y_;
  const bool stages_bits_;
  FourLinesAhead ahead_;
  std::int64_t r_ = 0;  // the next row
  R alphas_[kRows];
};

template <class T>
void ForwardTileOf(const ForwardTile& tile) {
  if constexpr (kHasLanes) {
    const auto stripe = [&](const auto& power) { return StripeInLanes<T>(tile, power); };
    if (tile.stripe != nullptr && !tile.support && !tile.support_size &&
        WithPowerOfLanes<Real<T>>(tile, stripe)) {
      if (tile.stream) hwy::FlushStream();
      return;
    }
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
  ForwardRows<T>(tile, x, y).Compute();
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
    WorkspaceLayout slot;
    if (problem.mask.given() || !walk_.contiguous(kX)) packed_x_ = slot.take(tile_elements(bytes));
    if (!walk_.contiguous(kY)) packed_y_ = slot.take(tile_elements(bytes));
    add_support_bits(slot, problem.support, kSupport);
    elements_ = slot.take(vector_scratch_bytes(length_, in_double));
    has_stripe_ = !problem.mask.given() && !walk_.contiguous(kX) && walk_.adjacent(kX) &&
                  walk_.adjacent(kY) && walk_.inner() >= kLeastStripeColumns &&
                  stripe_bytes(problem.x.dtype) <= kMostStripeBytes;
    if (has_stripe_) stripe_ = slot.take(stripe_bytes(problem.x.dtype));
    // Not of f64, whose powers go row by row.
    const bool general =
        problem.x.dtype != DType::f64 &&
        (problem.alpha_per_row.given() || family_of(problem.alpha) == Family::general);
    has_batch_ = general || ((problem.alpha == 2 || problem.alpha == 1.5) &&
                             walk_.tile_rows() >= kMostBatchRows);
    if (has_batch_) {
      batch_rows_ = static_cast<std::size_t>(std::min(walk_.tile_rows(), kMostBatchRows));
      const auto rows = static_cast<std::int64_t>(batch_rows_);
      const auto real = static_cast<std::int64_t>(size_of(accumulation_dtype(problem.x.dtype)));
      candidates_ = slot.take((general ? 2 : 1) * rows * candidates_pitch(length_) * real);
      if (general) places_ = slot.take(rows * places_pitch(length_));
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
