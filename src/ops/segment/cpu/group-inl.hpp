// Folding as many short segments of a tensor with one column as a vector has lanes: each has a
// vector of its own, or a few, and the lanes of all of them are folded by transposing them.

#if defined(PULLBACK_SEGMENT_GROUP_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_GROUP_INL_HPP
#undef PULLBACK_SEGMENT_GROUP_INL_HPP
#else
#define PULLBACK_SEGMENT_GROUP_INL_HPP
#endif

#include <atomic>
#include <bit>

#include "cpu/compress-inl.hpp"
#include "ops/segment/cpu/column-inl.hpp"
#include "ops/segment/cpu/ends-inl.hpp"
#include "ops/segment/cpu/scan_rules-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

// Lane i of the result folds the lanes of v[i]; there are as many as there are lanes.
template <class D, class Op>
HWY_INLINE hn::Vec<D> FoldEach(D d, hn::Vec<D>* v, const Op& op) {
  constexpr std::size_t kLanes = hn::MaxLanes(d), kInBlock = 16 / sizeof(hn::TFromD<D>);
  constexpr std::size_t kBlocks = kLanes / kInBlock;
  // Within blocks of 16 bytes: of each kInBlock vectors one is left.
  const auto in_block = [&](const hn::Vec<D>* from) HWY_ATTR {
    const auto pair = [&](auto a, auto b) HWY_ATTR {
      return op(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
    };
    if constexpr (kInBlock == 2) {
      return pair(from[0], from[1]);
    } else {
      const hn::RepartitionToWide<D> wide;
      const auto a = hn::BitCast(wide, pair(from[0], from[1]));
      const auto b = hn::BitCast(wide, pair(from[2], from[3]));
      return op(hn::BitCast(d, hn::InterleaveLower(wide, a, b)),
                hn::BitCast(d, hn::InterleaveUpper(wide, a, b)));
    }
  };
  hn::Vec<D> block[kBlocks];
  for (std::size_t i = 0; i < kBlocks; ++i) block[i] = in_block(v + i * kInBlock);
  if constexpr (kBlocks == 1) return block[0];
  // What is left: block j of `block[i]` is a part of what becomes block i of the result.
  const auto neighbors = [&](auto a, auto b) HWY_ATTR {
    const auto apart = hn::SwapAdjacentBlocks(hn::OddEvenBlocks(a, b));
    return op(hn::OddEvenBlocks(b, a), apart);
  };
  if constexpr (kBlocks == 2) return neighbors(block[0], block[1]);
  const auto halves = [&](auto a, auto b) HWY_ATTR {
    return op(hn::ConcatLowerLower(d, b, a), hn::ConcatUpperUpper(d, b, a));
  };
  if constexpr (kBlocks == 4) {
    return neighbors(halves(block[0], block[2]), halves(block[1], block[3]));
  }
}

// Segment k of as many as there are lanes has the rows [ends[k - 1], ends[k]) of x, of which the
// first kFew are read: those behind them are up to others.
template <class R>
class Group {
  using I = Int<R>;
  using D = hn::ScalableTag<R>;
  using DI = hn::RebindToSigned<D>;
  static constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
  static constexpr std::int64_t kVectors = std::max<std::int64_t>(1, 16 / kLanes);

 public:
  static constexpr I kFew = kVectors * kLanes;

  // Goes to segments that end there and have so many rows.
  HWY_INLINE void GoTo(const std::int64_t* ends, hn::Vec<DI> counts) {
    const DI di;
    const auto one = hn::Set(di, I{1});
    const auto few = hn::Min(counts, hn::Set(di, kFew));
    ends_ = ends;
    hn::Store(hn::Sub(hn::Shl(one, few), one), di, bits_);
    // Or compilers take the bits out of the vector, one by one.
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }

  // What op folds the rows of each segment to.
  template <bool kIdentityIsZero, class Op>
  HWY_INLINE hn::Vec<D> Fold(const R* HWY_RESTRICT x, R identity, const Op& op) const {
    const D d;
    const auto read = [&](std::int64_t k, std::int64_t i) HWY_ATTR {
      const auto rows = Rows(x, k, i);
      return kIdentityIsZero ? rows : hn::IfThenElse(Inside(k, i), rows, hn::Set(d, identity));
    };
    hn::Vec<D> v[kLanes];
    for (std::int64_t k = 0; k < kLanes; ++k) {
      v[k] = read(k, 0);
      for (std::int64_t i = 1; i < kVectors; ++i) v[k] = op(v[k], read(k, i));
    }
    return FoldEach(d, v, op);
  }

  // The first or last row of each that is values[k], counted from its first row. Any number if
  // there is none.
  template <bool kLast>
  HWY_INLINE void Places(const R* HWY_RESTRICT x, const R* values, I* places) const {
    const D d;
    for (std::int64_t k = 0; k < kLanes; ++k) {
      const auto value = hn::Set(d, values[k]);
      unsigned found = 0;
      for (std::int64_t i = 0; i < kVectors; ++i) {
        const auto equal = hn::And(hn::Eq(Rows(x, k, i), value), Inside(k, i));
        found |= BitsOf(d, equal) << (i * kLanes);
      }
      places[k] = static_cast<I>(kLast ? std::bit_width(found) - 1 : std::countr_zero(found));
    }
  }

 private:
  // Lanes of the i-th vector of segment k, and its rows.
  HWY_INLINE hn::Mask<D> Inside(std::int64_t k, std::int64_t i) const {
    return hn::LoadMaskBits(D(), reinterpret_cast<const std::uint8_t*>(bits_ + k) + i * kLanes / 8);
  }
  HWY_INLINE hn::Vec<D> Rows(const R* HWY_RESTRICT x, std::int64_t k, std::int64_t i) const {
    return hn::MaskedLoad(Inside(k, i), D(), x + ends_[k - 1] + i * kLanes);
  }

  const std::int64_t* ends_ = nullptr;
  HWY_ALIGN I bits_[kLanes];  // of the rows that are read
};

// Folds whole segments that follow each other, a group at a time.
template <class R, class Rule>
class GroupFold {
  using I = Int<R>;
  using B = typename Rule::B;
  using D = hn::ScalableTag<R>;
  using DI = hn::RebindToSigned<D>;
  static constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));

 public:
  // Quicker than the walk of ColumnScan: vectors of a few elements are read by masks, and places
  // are found by masks that are registers.
  static constexpr bool kQuick =
      pullback::HWY_NAMESPACE::kMasksElements<R> && kLanes >= (Rule::kPlaces ? 16 : 8);

  static constexpr std::int64_t kMostRows = 64 * kLanes;  // of all segments at once

  // Chooses as many full groups of `most` segments as end up to row `stop`, or, if there is none, a
  // part of one. Returns how many segments those are.
  std::int64_t Choose(std::int64_t stop, const SegmentEnds& ends, std::int64_t most) {
    count_ = 0;
    ends_ = ends.in_place;
    if (ends_ != nullptr) {
      while (count_ + kLanes <= most && ends_[count_ + kLanes - 1] <= stop) count_ += kLanes;
      if (count_ > 0) return count_;
      most = std::min(most, kLanes);
    }
    ends_ = own_ends_ + 1;
    own_ends_[0] = ends[-1];
    for (; count_ < most && ends[count_] <= stop; ++count_) own_ends_[count_ + 1] = ends[count_];
    std::fill_n(own_ends_ + count_ + 1, kLanes, own_ends_[count_]);
    return count_;
  }
  std::int64_t count() const { return count_; }

  // Those segments to a and b, whole vectors of them; the first begins with `row`, which is at x.
  // `empty` are those without rows; of powers, which x is then, all have the same `shift`. The rows
  // in memory are at `source`, whence `ahead` fetches them.
  void Fold(const R* HWY_RESTRICT x, std::int64_t row, const Folded<R, B>& empty,
            [[maybe_unused]] R shift, R* HWY_RESTRICT a, B* HWY_RESTRICT b, const R* source,
            LinesAhead ahead) {
    const D d;
    const DI di;
    const R* const from = x - row;
    LinesAhead ends_ahead(ends_);
    std::int64_t longer = 0;
    auto number = hn::Iota(di, 0);
    for (std::int64_t k = 0; k < count_; k += kLanes) {
      const std::int64_t* const ends = ends_ + k;
      const auto counts = Counts(ends);
      ends_ahead.StepFarTo(ends);
      group_.GoTo(ends, counts);
      longer += static_cast<std::int64_t>(pullback::HWY_NAMESPACE::StoreActive(
          di, number, hn::Gt(counts, hn::Set(di, Group<R>::kFew)), longer_ + longer));
      number = hn::Add(number, hn::Set(di, I{kLanes}));
      ahead.StepFarTo(source + (ends[kLanes - 1] - row));
      const auto none = hn::RebindMask(d, hn::Eq(counts, hn::Zero(di)));
      if constexpr (Rule::kPlaces) {
        Rule::TakeGroup(group_, from, ends, a + k, b + k);
        if (HWY_UNLIKELY(!hn::AllFalse(d, none))) {
          for (std::int64_t i = 0; i < kLanes; ++i) {
            if (ends[i] > ends[i - 1]) continue;
            a[k + i] = empty.a;
            b[k + i] = empty.b;
          }
        }
      } else {
        const auto sums =
            group_.template Fold<true>(from, R{0}, [](auto v, auto w) { return hn::Add(v, w); });
        if constexpr (Rule::kPowers) {
          hn::StoreU(hn::IfThenElse(none, hn::Set(d, empty.a), hn::Set(d, shift)), d, a + k);
          hn::StoreU(hn::IfThenElse(none, hn::Set(d, empty.b), sums), d, b + k);
        } else {
          hn::StoreU(hn::IfThenElse(none, hn::Set(d, empty.a), sums), d, a + k);
        }
      }
    }
    // Afterwards, and all in one loop: which segments are longer is a guess.
    for (std::int64_t i = 0; i < longer; ++i) {
      const std::int64_t k = longer_[i], n = ends_[k] - ends_[k - 1];
      const R* run = from + ends_[k - 1];
      if constexpr (Rule::kPlaces) {
        const std::int64_t place = Rule::PlaceIn(run, n);
        a[k] = run[place];
        b[k] = static_cast<B>(place);
      } else if constexpr (Rule::kPowers) {
        b[k] = SumOfRun(run, n);
      } else {
        a[k] = SumOfRun(run, n);
      }
    }
  }

 private:
  // Rows of a group of segments.
  static HWY_INLINE hn::Vec<DI> Counts(const std::int64_t* ends) {
    const DI di;
    const hn::ScalableTag<std::int64_t> wide;
    const auto counts = [&](const std::int64_t* at) HWY_ATTR {
      return hn::BitCast(di, hn::Sub(hn::LoadU(wide, at), hn::LoadU(wide, at - 1)));
    };
    if constexpr (sizeof(I) == 8) {
      return counts(ends);
    } else {
      return hn::ConcatEven(di, counts(ends + kLanes / 2), counts(ends));
    }
  }

  std::int64_t count_ = 0;  // segments that are chosen
  const std::int64_t* ends_ = nullptr;
  // Of those, where they are not in place, or of a group that is not full.
  std::int64_t own_ends_[1 + kMostRows + kLanes];
  Group<R> group_;
  // Segments that have more rows than a group reads; written by vectors.
  I longer_[kMostRows / Group<R>::kFew + kLanes];
};

#else

template <class R, class Rule>
struct GroupFold {
  static constexpr bool kQuick = false;
};

#endif

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
