// The forward pass of rows in batches (batch_rows-inl.hpp) for an alpha whose powers take a
// logarithm. y is computed where the candidates are, and spread over the row by their places.

#if defined(PULLBACK_ENTMAX_FORWARD_BATCH_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_FORWARD_BATCH_INL_HPP
#undef PULLBACK_ENTMAX_FORWARD_BATCH_INL_HPP
#else
#define PULLBACK_ENTMAX_FORWARD_BATCH_INL_HPP
#endif

#include "cpu/compress-inl.hpp"
#include "ops/entmax/cpu/batch_rows-inl.hpp"
#include "ops/entmax/cpu/stream-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

template <class P, class T>
class RowBatch : public BatchRows<P, T> {
  using Base = BatchRows<P, T>;
  using Base::candidates_, Base::count_, Base::empty_, Base::length_, Base::max_, Base::pitch_,
      Base::power_, Base::result_, Base::row_, Base::rows_, Base::valid_;

 public:
  using R = Real<T>;

  RowBatch(const P& power, std::size_t length, const entmax::BatchScratch& scratch)
      : Base(power, length, scratch),
        places_pitch_(
            static_cast<std::size_t>(entmax::places_pitch(static_cast<std::int64_t>(length)))),
        bends_(candidates_ + scratch.rows * pitch_),
        places_(reinterpret_cast<std::uint8_t*>(scratch.places)),
        most_shift_(MostShift(power)) {}

  // Long rows go one by one: what is computed of them then stays in L1.
  static std::int64_t MostRows(std::size_t length) {
    constexpr std::size_t kElements = 32768;
    return static_cast<std::int64_t>(std::clamp<std::size_t>(kElements / length, 1, kLanes<R>));
  }
  std::int64_t most_rows() const { return MostRows(length_); }

  // With `prefetch`, the rows that follow the batch in memory are fetched meanwhile.
  void Compute(bool prefetch) {
    const LaneTag<R> d;
    const auto bound = this->Bound(most_rows() == 1);
    HWY_ALIGN R theta[kLanes<R>], rest[kLanes<R>];
    hn::Store(bound, d, theta);
    if (prefetch && most_rows() > 1) this->FetchNext();  // else while the maximum is sought
    const auto solve = [&](Lane<R> start, const R* open, double tolerance) HWY_ATTR {
      return SolveLanes<R>(power_, start, hn::Ne(hn::Load(d, open), hn::Zero(d)), tolerance,
                           [&](Lane<R> at, hn::Mask<LaneTag<R>> still_open)
                               HWY_ATTR { return Evaluate(at, still_open); });
    };
    // Where many elements survive, a part of the row tells the threshold well enough to begin with,
    // and to leave out what is far below.
    auto start = bound, cut = bound;
    std::fill_n(sampled_, kLanes<R>, R{0});
    if (length_ >= kLeastSampled && FindSamples(theta)) {
      const auto sampled = hn::Ne(hn::Load(d, sampled_), hn::Zero(d));
      start = solve(bound, sampled_, kSampleTolerance).theta;
      const auto below = hn::Mul(start, hn::Set(d, 1 + kSampleError));
      cut = hn::IfThenElse(sampled, hn::Max(bound, below), bound);
    }
    hn::Store(cut, d, theta);
    std::fill_n(weight_, kLanes<R>, R{1});
    FindPlaces(valid_, theta);
    auto threshold = solve(start, valid_, power_.tolerance);
    const auto missed = hn::Lt(threshold.theta, cut);
    if (!hn::AllFalse(d, missed)) {
      HWY_ALIGN R again[kLanes<R>];
      hn::Store(hn::IfThenElseZero(missed, hn::Load(d, valid_)), d, again);
      hn::Store(bound, d, theta);
      FindPlaces(again, theta);
      const auto found =
          solve(hn::IfThenElse(missed, bound, threshold.theta), again, power_.tolerance);
      threshold.theta = found.theta;
      threshold.rest = hn::IfThenElse(missed, found.rest, threshold.rest);
    }
    hn::Store(threshold.theta, d, theta);
    hn::Store(threshold.rest, d, rest);
    for (std::size_t k = 0; k < rows_; ++k) {
      if (valid_[k] != 0) {
        result_[k].tau = power_.TauOf(k, max_[k], theta[k], rest[k]);
        result_[k].support_size = ComputeY(k, theta[k], rest[k]);
      } else {
        result_[k] = DegenerateRow(row_[k], empty_[k]);
      }
      this->FetchShare(k);
      // Not right after y of the same row, which would be loaded before it is stored.
      if (k > 0) SpreadY(k - 1);
    }
    SpreadY(rows_ - 1);
  }

 private:
  static constexpr std::size_t kSampleStride = 8, kLeastSampled = 1024;
  static constexpr std::size_t kGlance = 16 * kSampleStride;  // vectors that tell sparse rows
  static constexpr double kSampleTolerance = 0.3;             // one step more leaves 0.02
  // Of a sample's theta; a row whose root is below that is done again without a sample.
  static constexpr R kSampleError = R{0.06};
  static constexpr std::size_t kPlaceBytes = (kLanes<R> + 7) / 8;  // of a vector

  // The candidates of one vector in so many of each row, which count for the others; false if they
  // are too few in each.
  bool FindSamples(const R* theta) {
    const LaneTag<R> d;
    bool found = false;
    std::fill_n(weight_, kLanes<R>, R{1});
    for (std::size_t k = 0; k < rows_; ++k) {
      if (valid_[k] == 0) continue;
      const auto& power = power_.OfRow(k);
      R* const z = candidates_ + k * pitch_;
      const auto shift = hn::Set(d, max_[k]), at = hn::Set(d, theta[k]);
      std::size_t count = 0, looked_at = 0;
      for (std::size_t i = 0; i + kLanes<R> <= length_; i += kSampleStride * kLanes<R>) {
        const auto v = hn::Sub(LoadAs(d, row_[k].x + i), shift);
        count += StoreActive(d, v, power.Active(d, power.Excess(d, v, at)), z + count);
        looked_at += kLanes<R>;
        if (i == kGlance * kLanes<R> && 2 * count * length_ < kLeastSampled * looked_at) break;
      }
      PadCandidates(z, count);
      count_[k] = count;
      weight_[k] = static_cast<R>(length_) / static_cast<R>(looked_at);
      sampled_[k] = count * kSampleStride >= kLeastSampled ? R{1} : R{0};
      found |= sampled_[k] != 0;
    }
    return found;
  }

  // The candidates, and the places of them, of the open rows.
  void FindPlaces(const R* open, const R* theta) {
    const LaneTag<R> d;
    for (std::size_t k = 0; k < rows_; ++k) {
      if (open[k] == 0) continue;
      std::uint8_t* places = places_ + k * places_pitch_;
      this->FindCandidates(k, theta[k], [&](auto active) HWY_ATTR {
        hn::StoreMaskBits(d, active, places);
        places += kPlaceBytes;
      });
    }
  }

  LaneSums<R> Evaluate(Lane<R> theta, hn::Mask<LaneTag<R>> open) {
    const LaneTag<R> d;
    HWY_ALIGN R at[kLanes<R>];
    HWY_ALIGN R f[kLanes<R> * kLanes<R>];
    HWY_ALIGN R slope[kLanes<R> * kLanes<R>];
    HWY_ALIGN R bend[kLanes<R> * kLanes<R>];
    hn::Store(theta, d, at);
    const P powers = power_;  // compilers take stores of vectors for stores to members
    const unsigned bits = BitsOf(d, open);
    for (std::size_t k = 0; k < kLanes<R>; ++k) {
      const auto& power = powers.OfRow(k);
      auto sum = hn::Zero(d), lost = sum, slopes = sum, bends = sum;
      const R* z = candidates_ + k * pitch_;
      const auto own = hn::Set(d, at[k]);
      if (bits >> k & 1) last_theta_[k] = at[k];
      // Of rows that did not begin close to the root, the last step is too long for a series.
      R* const kept = bends_ + k * pitch_;
      const std::size_t keep = sampled_[k] != 0 ? 1 : 0;
      const std::size_t count = bits >> k & 1 ? count_[k] : 0;
      for (std::size_t i = 0; i < count;) {
        const std::size_t end = std::min(count, i + kSumVectors * kLanes<R>);
        auto part = hn::Zero(d);
        for (; i < end; i += kLanes<R>) {
          this->Fetch();
          const auto both = power.Both(d, power.Excess(d, hn::LoadU(d, z + i), own));
          part = hn::Add(part, both.value);
          slopes = hn::Add(slopes, both.slope);
          bends = hn::Add(bends, both.bend);
          hn::StoreU(both.bend, d, kept + i * keep);
        }
        const auto next = hn::Add(sum, part);
        lost = hn::Add(lost, hn::Sub(part, hn::Sub(next, sum)));
        sum = next;
      }
      hn::Store(hn::Add(sum, lost), d, f + k * kLanes<R>);
      hn::Store(slopes, d, slope + k * kLanes<R>);
      hn::Store(bends, d, bend + k * kLanes<R>);
    }
    const auto times = hn::Load(d, weight_);
    return {hn::Mul(times, SumsOfRows(f)), hn::Mul(times, SumsOfRows(slope)),
            hn::Mul(times, SumsOfRows(bend))};
  }

  // The root may lie so far, as a part of itself, from the last evaluation that the first three
  // terms of the series of excess^(1/b), whose powers are there, give y and its slope y^(2 -
  // alpha): the next one counts most for the largest elements or, where 1/b < 4, for those that the
  // shift takes to the edge of the support. Without curvature there is no such power.
  static R MostShift(const P& power) {
    if (!power.curved) return -1;
    const double q = static_cast<double>(hn::GetLane(power.inverse_lanes()));
    const double half = static_cast<double>(std::numeric_limits<R>::epsilon()) / 4;
    return static_cast<R>(
        std::min(std::cbrt(6 * half / (q * (q - 1) * (q - 2))), std::pow(half, 1 / (q - 1))));
  }

  // In place of the candidates. Returns how many are in the support, if that is wanted.
  std::int64_t ComputeY(std::size_t k, R theta, R rest) {
    const LaneTag<R> d;
    const auto& power = power_.OfRow(k);
    R* z = candidates_ + k * pitch_;
    const auto at = hn::Set(d, theta), less = hn::Set(d, rest);
    const bool counts = row_[k].wants_size;
    std::size_t support = 0;
    const R shift = (theta - last_theta_[k]) + rest;
    if (sampled_[k] != 0 && std::abs(shift) <= most_shift_ * std::abs(theta)) {
      const R* const bends = bends_ + k * pitch_;
      const auto last = hn::Set(d, last_theta_[k]), by = hn::Set(d, shift);
      const R q = hn::GetLane(power.inverse_lanes());
      const auto first = hn::Set(d, q * shift);
      const auto second = hn::Set(d, q * (q - 1) / 2 * shift * shift);
      for (std::size_t i = 0; i < count_[k]; i += kLanes<R>) {
        const auto excess = power.Excess(d, hn::LoadU(d, z + i), last);
        const auto active = hn::Gt(excess, by);
        if (counts) support += hn::CountTrue(d, active);
        const auto series = hn::MulAdd(excess, hn::Sub(excess, first), second);
        hn::StoreU(hn::IfThenElseZero(active, hn::Mul(hn::LoadU(d, bends + i), series)), d, z + i);
      }
      return static_cast<std::int64_t>(support);
    }
    for (std::size_t i = 0; i < count_[k]; i += kLanes<R>) {
      const auto excess = hn::Sub(power.Excess(d, hn::LoadU(d, z + i), at), less);
      if (counts) support += hn::CountTrue(d, power.Active(d, excess));
      hn::StoreU(power.Value(d, excess), d, z + i);
    }
    return static_cast<std::int64_t>(support);
  }

  void SpreadY(std::size_t k) {
    const LaneTag<R> d;
    if (valid_[k] == 0 || row_[k].y == nullptr) return;
    const R* y = candidates_ + k * pitch_;
    const std::uint8_t* places = places_ + k * places_pitch_;
    WriteRow(row_[k].y, length_, row_[k].stream,
             [&](T* to, std::size_t, std::size_t count, auto store) HWY_ATTR {
               const auto next = [&]() HWY_ATTR {
                 const auto v = Spread(d, places, y);
                 places += kPlaceBytes;
                 return v;
               };
               std::size_t i = 0;
               for (; i + kLanes<R> <= count; i += kLanes<R>) store(d, next(), to + i);
               if (i < count) StoreFirstAs(d, next(), to + i, count - i);
             });
  }

  const std::size_t places_pitch_;
  R* const bends_;  // excess^(1/b - 2) of the candidates at last_theta_
  std::uint8_t* const places_;
  const R most_shift_;
  HWY_ALIGN R last_theta_[kLanes<R>];  // of the last evaluation
  HWY_ALIGN R sampled_[kLanes<R>];     // 1 or 0
  HWY_ALIGN R weight_[kLanes<R>];      // of the sums over what stands for a row
};

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
