// Folding as many short segments of a tensor with one column as a vector has lanes. Each has 16
// bytes of a vector, so that transposed vectors hold row i of all segments; or if it has more rows
// a vector of its own, or a few, and the lanes of all of them are folded by transposing them.

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
#include "ops/segment/cpu/transpose-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

// As many segments as there are lanes, the k-th of which has its first row at x + begins[k]. Of
// each the first kFew rows are read: those behind them are up to others.
template <class R, class Begin>
class Group {
  using I = Int<R>;
  using D = hn::ScalableTag<R>;
  using DI = hn::RebindToSigned<D>;
  static constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
  static constexpr std::int64_t kVectors = std::max<std::int64_t>(1, 16 / kLanes);

 public:
  static constexpr I kFew = kVectors * kLanes;

  HWY_INLINE Group(const R* x, const Begin* begins, hn::Vec<DI> counts) : x_(x), begins_(begins) {
    const DI di;
    const auto one = hn::Set(di, I{1});
    const auto few = hn::Min(counts, hn::Set(di, kFew));
    hn::Store(hn::Sub(hn::Shl(one, few), one), di, bits_);
    // Or compilers take the bits out of the vector, one by one.
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }

  // What op folds the rows of each segment to.
  template <bool kIdentityIsZero, class Op>
  HWY_INLINE hn::Vec<D> Fold(R identity, const Op& op) const {
    const D d;
    const auto read = [&](std::int64_t k, std::int64_t i) HWY_ATTR {
      const auto rows = Rows(k, i);
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
  HWY_INLINE void Places(const R* values, I* places) const {
    const D d;
    for (std::int64_t k = 0; k < kLanes; ++k) {
      const auto value = hn::Set(d, values[k]);
      unsigned found = 0;
      for (std::int64_t i = 0; i < kVectors; ++i) {
        const auto equal = hn::And(hn::Eq(Rows(k, i), value), Inside(k, i));
        found |= BitsOf(d, equal) << (i * kLanes);
      }
      places[k] = static_cast<I>(kLast ? std::bit_width(found) - 1 : std::countr_zero(found));
    }
  }

  R row(std::int64_t k, I place) const { return x_[begins_[k] + place]; }

 private:
  // Lanes of the i-th vector of segment k, and its rows.
  HWY_INLINE hn::Mask<D> Inside(std::int64_t k, std::int64_t i) const {
    return hn::LoadMaskBits(D(), reinterpret_cast<const std::uint8_t*>(bits_ + k) + i * kLanes / 8);
  }
  HWY_INLINE hn::Vec<D> Rows(std::int64_t k, std::int64_t i) const {
    return hn::MaskedLoad(Inside(k, i), D(), x_ + begins_[k] + i * kLanes);
  }

  const R* x_;
  const Begin* begins_;
  HWY_ALIGN I bits_[kLanes];  // of the rows that are read
};

// The same with a smaller kFew. So many rows have to be readable, whether they are the segment's or
// not.
template <class R, class Begin>
class ShortGroup {
  using I = Int<R>;
  using D = hn::ScalableTag<R>;
  using DI = hn::RebindToSigned<D>;

 public:
  static constexpr I kFew = kRowsOfBlock<R>;

  HWY_INLINE ShortGroup(const R* x, const Begin* begins, hn::Vec<DI> counts)
      : x_(x), begins_(begins) {
    LoadRows(
        D(), [&](std::int64_t k) HWY_ATTR { return x + begins[k]; }, rows_);
    for (I i = 0; i < kFew; ++i) {
      inside_[i] = hn::RebindMask(D(), hn::Gt(counts, hn::Set(DI(), i)));
    }
  }

  template <bool kIdentityIsZero, class Op>
  HWY_INLINE hn::Vec<D> Fold(R identity, const Op& op) const {
    const auto row = [&](I i) HWY_ATTR {
      return kIdentityIsZero ? hn::IfThenElseZero(inside_[i], rows_[i])
                             : hn::IfThenElse(inside_[i], rows_[i], hn::Set(D(), identity));
    };
    // In the order of FoldEach.
    if constexpr (kFew == 2) {
      return op(row(0), row(1));
    } else {
      return op(op(row(0), row(2)), op(row(1), row(3)));
    }
  }

  template <bool kLast>
  HWY_INLINE void Places(const R* values, I* places) const {
    const DI di;
    const auto value = hn::LoadU(D(), values);
    auto place = hn::Zero(di);
    for (I k = 0; k < kFew; ++k) {
      const I i = kLast ? k : kFew - 1 - k;
      const auto equal = hn::And(hn::Eq(rows_[i], value), inside_[i]);
      place = hn::IfThenElse(hn::RebindMask(di, equal), hn::Set(di, i), place);
    }
    hn::StoreU(place, di, places);
  }

  R row(std::int64_t k, I place) const { return x_[begins_[k] + place]; }

 private:
  const R* x_;
  const Begin* begins_;
  hn::Vec<D> rows_[kFew];
  hn::Mask<D> inside_[kFew];
};

// Folds whole segments that follow each other, a group at a time.
template <class R, class Rule>
class GroupFold {
  using I = Int<R>;
  using B = typename Rule::B;
  using D = hn::ScalableTag<R>;
  using DI = hn::RebindToSigned<D>;
  static constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
  static constexpr I kFew = Group<R, I>::kFew, kFewest = ShortGroup<R, I>::kFew;

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

  // Those segments to a and b, whole vectors of them; the first begins with `row`, which is at x,
  // and rows up to `stop` may be read. `empty` are those without rows; of powers, which x is then,
  // all have the same `shift`. The rows in memory are at `source`, whence `ahead` fetches them.
  void Fold(const R* HWY_RESTRICT x, std::int64_t row, std::int64_t stop, const Folded<R, B>& empty,
            R shift, R* HWY_RESTRICT a, B* HWY_RESTRICT b, const R* source, LinesAhead ahead) {
    const D d;
    const hn::ScalableTag<B> db;
    const DI di;
    const auto empty_a = hn::Set(d, empty.a);
    const auto empty_b = hn::Set(db, empty.b);
    LinesAhead ends_ahead(ends_);
    std::int64_t medium = 0, longer = 0;
    auto number = hn::Iota(di, 0);
    for (std::int64_t k = 0; k < count_; k += kLanes) {
      const std::int64_t *const ends = ends_ + k, *const begins = ends - 1;
      const auto begin = Places(begins, row), count = hn::Sub(Places(ends, row), begin);
      ends_ahead.StepFarTo(ends);
      if (!Rule::kPowers) ahead.StepSomeTo<kFetches>(source + (ends[kLanes - 1] - row));
      const auto more = hn::Gt(count, hn::Set(di, kFewest));
      if (hn::CountTrue(di, more) <= kMostMedium && begins[kLanes - 1] + kFewest <= stop) {
        Take(ShortGroup<R, std::int64_t>(x - row, begins, count), shift, a + k, b + k);
        Keep(begin, more, medium_begins_ + medium);
        Keep(count, more, medium_counts_ + medium);
        medium += Keep(number, more, medium_ + medium);
      } else {
        Take(Group<R, std::int64_t>(x - row, begins, count), shift, a + k, b + k);
        longer += Keep(number, hn::Gt(count, hn::Set(di, kFew)), long_ + longer);
      }
      number = hn::Add(number, hn::Set(di, I{kLanes}));
      const auto none = hn::Eq(count, hn::Zero(di));
      hn::BlendedStore(empty_a, hn::RebindMask(d, none), d, a + k);
      if (Rule::kTwo) hn::BlendedStore(empty_b, hn::RebindMask(db, none), db, b + k);
    }
    // Afterwards, and all in one loop: which segments have more rows is a guess. The last group is
    // filled with none, whose results go behind those that there are.
    hn::StoreU(number, di, medium_ + medium);
    hn::StoreU(hn::Zero(di), di, medium_begins_ + medium);
    hn::StoreU(hn::Zero(di), di, medium_counts_ + medium);
    for (std::int64_t i = 0; i < medium; i += kLanes) {
      const auto count = hn::LoadU(di, medium_counts_ + i);
      HWY_ALIGN R group_a[kLanes];
      HWY_ALIGN B group_b[kLanes];
      Take(Group<R, I>(x, medium_begins_ + i, count), shift, group_a, group_b);
      const auto numbers = hn::LoadU(di, medium_ + i);
      longer += Keep(numbers, hn::Gt(count, hn::Set(di, kFew)), long_ + longer);
      hn::ScatterIndex(hn::Load(d, group_a), d, a, numbers);
      if (Rule::kTwo) hn::ScatterIndex(hn::Load(db, group_b), db, b, numbers);
    }
    for (std::int64_t i = 0; i < longer; ++i) {
      const I k = long_[i];
      const std::int64_t rows = ends_[k] - ends_[k - 1];
      const R* run = x + (ends_[k - 1] - row);
      if constexpr (Rule::kPlaces) {
        const std::int64_t place = Rule::PlaceIn(run, rows);
        a[k] = run[place];
        b[k] = static_cast<B>(place);
      } else if constexpr (Rule::kPowers) {
        b[k] = SumOfRun(run, rows);
      } else {
        a[k] = SumOfRun(run, rows);
      }
    }
  }

 private:
  // Of four lines, for a group: enough for segments of 12 rows.
  static constexpr int kFetches = (kLanes * 12 * sizeof(R) + 255) / 256;
  // So many segments of a group may have more rows than a ShortGroup reads.
  static constexpr std::size_t kMostMedium = kLanes * 3 / 8;

  template <class Mask>
  static HWY_INLINE std::int64_t Keep(hn::Vec<DI> v, Mask mask, I* to) {
    return static_cast<std::int64_t>(pullback::HWY_NAMESPACE::StoreActive(DI(), v, mask, to));
  }

  static HWY_INLINE hn::Vec<DI> Places(const std::int64_t* rows, std::int64_t first) {
    const DI di;
    const hn::ScalableTag<std::int64_t> wide;
    const auto from = hn::Set(di, static_cast<I>(first));
    const auto low = hn::BitCast(di, hn::LoadU(wide, rows));
    if constexpr (sizeof(I) == 8) {
      return hn::Sub(low, from);
    } else {
      const auto high = hn::BitCast(di, hn::LoadU(wide, rows + kLanes / 2));
      return hn::Sub(hn::ConcatEven(di, high, low), from);
    }
  }

  template <class AnyGroup>
  static HWY_INLINE void Take(const AnyGroup& group, R shift, R* HWY_RESTRICT a,
                              B* HWY_RESTRICT b) {
    const D d;
    if constexpr (Rule::kPlaces) {
      Rule::TakeGroup(group, a, b);
    } else {
      const auto sums =
          group.template Fold<true>(R{0}, [](auto v, auto w) { return hn::Add(v, w); });
      if constexpr (Rule::kPowers) {
        hn::StoreU(hn::Set(d, shift), d, a);
        hn::StoreU(sums, d, b);
      } else {
        hn::StoreU(sums, d, a);
      }
    }
  }

  std::int64_t count_ = 0;  // segments that are chosen
  const std::int64_t* ends_ = nullptr;
  // Of those, where they are not in place, or of a group that is not full.
  std::int64_t own_ends_[1 + kMostRows + kLanes];
  // Segments with more rows than a ShortGroup reads, and those with more than a Group. Written by
  // vectors.
  static constexpr std::int64_t kMostMediums = kMostRows / kFewest + kLanes;
  I medium_[kMostMediums], medium_begins_[kMostMediums], medium_counts_[kMostMediums];
  I long_[kMostRows / kFew + kLanes];
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
