// Rows of medium length that are solved together, as many as a vector has lanes: their thresholds
// are the lanes of a vector, so that they share the latency of all that a step does besides its
// sums, while the candidates of each row lie side by side as in the solution of a single row.

#if defined(PULLBACK_ENTMAX_BATCH_ROWS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_BATCH_ROWS_INL_HPP
#undef PULLBACK_ENTMAX_BATCH_ROWS_INL_HPP
#else
#define PULLBACK_ENTMAX_BATCH_ROWS_INL_HPP
#endif

#include "cpu/ahead-inl.hpp"
#include "ops/entmax/cpu/forward_row-inl.hpp"
#include "ops/entmax/cpu/lanes-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

template <class P, class T>
class BatchRows {
 public:
  using R = Real<T>;
  static_assert(kLanes<R> <= entmax::kMostBatchRows);

  void Clear() { rows_ = 0; }
  void Add(const RowView<T>& row) { row_[rows_++] = row; }
  std::int64_t rows() const { return static_cast<std::int64_t>(rows_); }
  const RowResult& result(std::int64_t k) const { return result_[k]; }

 protected:
  BatchRows(const P& power, std::size_t length, const entmax::BatchScratch& scratch)
      : power_(power),
        length_(length),
        pitch_(
            static_cast<std::size_t>(entmax::candidates_pitch(static_cast<std::int64_t>(length)))),
        candidates_(reinterpret_cast<R*>(scratch.candidates)) {}

  // Lower bounds of the thresholds. Also finds the maxima, and which rows have a distribution.
  Lane<R> Bound(bool prefetch) {
    const LaneTag<R> d;
    HWY_ALIGN R maxima[kLanes<R> * kMaxima];
    HWY_ALIGN R z[kMaxima * kLanes<R>];
    for (std::size_t k = 0; k < kLanes<R>; ++k) {
      R* own = maxima + k * kMaxima;
      max_[k] = k < rows_ ? MaxOfRow(row_[k].x, length_, own, prefetch)
                          : std::numeric_limits<R>::quiet_NaN();
      valid_[k] = std::isfinite(max_[k]) ? R{1} : R{0};
      if (valid_[k] != 0) continue;
      // A single element stands in, whose threshold is there from the start.
      empty_[k] = max_[k] < 0;
      max_[k] = 0;
      std::fill_n(own, kMaxima, -std::numeric_limits<R>::infinity());
      own[0] = 0;
    }
    RowsToLanes(maxima, static_cast<std::int64_t>(kMaxima), kMaxima, z);
    const auto shift = hn::Load(d, max_);
    auto sum = hn::Zero(d);  // of the largest few
    for (std::size_t i = 0; i < kLanes<R>; ++i) {
      auto highest = hn::Set(d, -std::numeric_limits<R>::infinity());
      for (std::size_t k = 0; k < kAccumulators; ++k) {
        R* at = z + (k * kLanes<R> + i) * kLanes<R>;
        const auto v = hn::Sub(hn::Load(d, at), shift);
        hn::Store(v, d, at);
        highest = hn::Max(highest, v);
      }
      sum = hn::Add(sum, highest);
    }
    const auto start = SafeBound<R>(power_, MeanBound<R>(power_, sum, kLanes<R>));
    return SafeBound<R>(power_, SolveLanes<R>(power_, start, z, kMaxima, kBoundTolerance).theta);
  }

  // The rows that follow the batch in memory are fetched by Fetch(), line by line.
  void FetchNext() {
    const T* end = row_[rows_ - 1].x + length_;
    next_ = LinesAhead(
        reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(end) - LinesAhead::kLead));
    lines_ = rows_ * length_ * sizeof(T) / LinesAhead::kLine;
  }
  // A line of the next batch, as long as there are some.
  HWY_INLINE void Fetch() {
    if (lines_ == 0) return;
    --lines_;
    next_.Step();
  }
  // Those that row k and the ones after it have to share.
  void FetchShare(std::size_t k) {
    for (std::size_t left = lines_ / (rows_ - k); left > 0; --left) Fetch();
  }

  // z of the elements of row k that are active at theta; keep(mask) sees each vector's.
  template <class Keep>
  HWY_INLINE void FindCandidates(std::size_t k, R theta, const Keep& keep) {
    const LaneTag<R> d;
    const auto& power = power_.OfRow(k);
    const T* x = row_[k].x;
    R* z = candidates_ + k * pitch_;
    const auto shift = hn::Set(d, max_[k]), at = hn::Set(d, theta);
    std::size_t count = 0;
    const auto take = [&](auto loaded) HWY_ATTR {
      const auto v = hn::Sub(loaded, shift);
      const auto active = power.Active(d, power.Excess(d, v, at));
      count += StoreActive(d, v, active, z + count);
      keep(active);
    };
    std::size_t i = 0;
    for (; i + 2 * kLanes<R> <= length_; i += 2 * kLanes<R>) {
      Fetch();
      take(LoadAs(d, x + i));
      take(LoadAs(d, x + i + kLanes<R>));
    }
    if (i + kLanes<R> <= length_) {
      take(LoadAs(d, x + i));
      i += kLanes<R>;
    }
    if (i < length_) {
      take(LoadFirstAs(d, x + i, length_ - i, -std::numeric_limits<Real<T>>::infinity()));
    }
    PadCandidates(z, count);
    count_[k] = count;
  }

  // One step is mostly enough: the candidates that a better bound would drop are a few.
  static constexpr double kBoundTolerance = 3;
  static constexpr std::size_t kMaxima = kAccumulators * kLanes<R>;  // of a row

  const P power_;
  const std::size_t length_, pitch_;
  R* const candidates_;
  std::size_t rows_ = 0;
  LinesAhead next_{nullptr};
  std::size_t lines_ = 0;  // of the next batch that are still to be fetched
  RowView<T> row_[kLanes<R>];
  RowResult result_[kLanes<R>];
  HWY_ALIGN R max_[kLanes<R>];
  HWY_ALIGN R valid_[kLanes<R>];  // 1 or 0
  bool empty_[kLanes<R>];
  std::size_t count_[kLanes<R>];
};

// Where a pass over x gives y: sparsemax and 1.5-entmax.
template <Family kFamily, class T>
class SparseBatch : public BatchRows<LanePower<kFamily, Real<T>>, T> {
  using Base = BatchRows<LanePower<kFamily, Real<T>>, T>;
  using Base::candidates_, Base::count_, Base::empty_, Base::max_, Base::pitch_, Base::power_,
      Base::result_, Base::row_, Base::rows_, Base::valid_;

 public:
  using R = Real<T>;

  SparseBatch(double alpha, std::size_t length, const entmax::BatchScratch& scratch)
      : Base(LanePower<kFamily, R>(alpha), length, scratch) {}

  static constexpr std::int64_t most_rows() { return kLanes<R>; }

  // With `prefetch`, the rows that follow the batch in memory are fetched meanwhile.
  void Compute(bool prefetch) {
    const LaneTag<R> d;
    const auto bound = this->Bound(false);
    HWY_ALIGN R theta[kLanes<R>], rest[kLanes<R>], scale[kLanes<R>];
    hn::Store(bound, d, theta);
    if (prefetch) this->FetchNext();
    std::fill_n(count_, kLanes<R>, std::size_t{0});
    for (std::size_t k = 0; k < rows_; ++k) {
      if (valid_[k] != 0) this->FindCandidates(k, theta[k], [](auto) {});
    }
    const auto threshold =
        SolveLanes<R>(power_, bound, hn::Ne(hn::Load(d, valid_), hn::Zero(d)), power_.tolerance,
                      [&](Lane<R> at, hn::Mask<LaneTag<R>>) HWY_ATTR { return Evaluate(at); });
    hn::Store(threshold.theta, d, theta);
    hn::Store(threshold.rest, d, rest);
    hn::Store(threshold.scale, d, scale);
    for (std::size_t k = 0; k < rows_; ++k) {
      const RowView<T>& row = row_[k];
      if (valid_[k] != 0) {
        result_[k] = {power_.Tau(max_[k], theta[k], rest[k]),
                      WriteY(power_, row, max_[k], Threshold<R>{theta[k], rest[k], scale[k]})};
      } else {
        result_[k] = DegenerateRow(row, empty_[k]);
      }
      this->FetchShare(k);
    }
  }

 private:
  LaneSums<R> Evaluate(Lane<R> theta) {
    const LaneTag<R> d;
    HWY_ALIGN R at[kLanes<R>];
    HWY_ALIGN R first[kLanes<R> * kLanes<R>];
    HWY_ALIGN R second[kLanes<R> * kLanes<R>];
    HWY_ALIGN R least[kLanes<R> * kLanes<R>];
    hn::Store(theta, d, at);
    const auto power = power_;
    for (std::size_t k = 0; k < kLanes<R>; ++k) {
      const LaneSums<R> sums = EvaluateLanes(power, hn::Set(d, at[k]), candidates_ + k * pitch_,
                                             (count_[k] + kLanes<R> - 1) / kLanes<R>);
      hn::Store(sums.f, d, first + k * kLanes<R>);
      hn::Store(sums.slope, d, second + k * kLanes<R>);
      hn::Store(sums.bend, d, least + k * kLanes<R>);
    }
    LaneSums<R> sums{SumsOfRows(first), SumsOfRows(second), hn::Zero(d)};
    if constexpr (kFamily == Family::sparsemax) {
      sums.bend = CombineRows<0, kLanes<R>>(
          d, [&](std::size_t k) HWY_ATTR { return hn::Load(d, least + k * kLanes<R>); },
          MinLanesOf());
    }
    return sums;
  }
};

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
