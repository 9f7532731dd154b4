// Short segments of a tensor with one column. A vector holds the rows of one segment; as many
// vectors as they have lanes are folded into one, which has the result of a segment in each lane.
// A segment costs the same whatever its length, as long as its rows fit a vector.

#if defined(PULLBACK_SEGMENT_SHORT_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_SHORT_INL_HPP
#undef PULLBACK_SEGMENT_SHORT_INL_HPP
#else
#define PULLBACK_SEGMENT_SHORT_INL_HPP
#endif

#include "ops/segment/cpu/column-inl.hpp"
#include "ops/segment/cpu/extreme-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

// Segments next to each other, and what becomes of them.
template <class R>
struct ShortGroup {
  static constexpr std::int64_t kMost = 256;  // all arrays stay in L1
  static constexpr std::int64_t kPad = 64;    // no vector has more lanes

  std::int64_t count = 0;
  Int<R> counts[kMost + kPad];  // rows of a segment; 0 behind the last one
  R values[kMost + kPad];
  Int<R> places[kMost + kPad];  // of the extremes in their segments, or -1

  // Takes the segments [begin, end), kMost of them at most.
  void Fill(const Segments& segments, std::int64_t begin, std::int64_t end) {
    count = end - begin;
    const IndexView& offsets = segments.offsets;
    if (offsets.wide && offsets.stride == 1) {
      const auto* HWY_RESTRICT from = static_cast<const std::int64_t*>(offsets.data) + begin;
      LinesAhead(from).StepTo(from + count);
      for (std::int64_t k = 0; k < count; ++k)
        counts[k] = static_cast<Int<R>>(from[k + 1] - from[k]);
    } else {
      for (std::int64_t k = 0; k < count; ++k) {
        counts[k] = static_cast<Int<R>>(segments.end(begin + k) - segments.begin(begin + k));
      }
    }
    std::fill_n(counts + count, kPad, Int<R>{0});
  }
};

#if HWY_TARGET != HWY_SCALAR
// op over the lanes of each 16-byte block, of vector k in the block's lane k.
template <class D, class Op>
HWY_INLINE hn::Vec<D> FoldInBlocks(D d, const hn::Vec<D>* v, const Op& op) {
  const auto pair = op(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1]));
  if constexpr (sizeof(hn::TFromD<D>) == 8) {
    return pair;
  } else {
    const hn::RepartitionToWide<D> wide;
    const auto a = hn::BitCast(wide, pair);
    const auto b = hn::BitCast(
        wide, op(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3])));
    return op(hn::BitCast(d, hn::InterleaveLower(wide, a, b)),
              hn::BitCast(d, hn::InterleaveUpper(wide, a, b)));
  }
}

// op over the lanes of vector k, in lane k.
template <class D, class Op>
HWY_INLINE hn::Vec<D> FoldEach(D d, const hn::Vec<D>* v, const Op& op) {
  constexpr std::size_t kLanes = hn::MaxLanes(d), kPerBlock = 16 / sizeof(hn::TFromD<D>);
  static_assert(kLanes == kPerBlock || kLanes == 2 * kPerBlock || kLanes == 4 * kPerBlock);
  if constexpr (kLanes == kPerBlock) {
    return FoldInBlocks(d, v, op);
  } else {
    const auto halves = [&](auto a, auto b) HWY_ATTR {
      return op(hn::ConcatLowerLower(d, b, a), hn::ConcatUpperUpper(d, b, a));
    };
    const auto a = FoldInBlocks(d, v, op), b = FoldInBlocks(d, v + kPerBlock, op);
    if constexpr (kLanes == 2 * kPerBlock) {
      return halves(a, b);
    } else {
      const auto x = halves(a, FoldInBlocks(d, v + 2 * kPerBlock, op));
      const auto y = halves(b, FoldInBlocks(d, v + 3 * kPerBlock, op));
      return op(hn::OddEvenBlocks(hn::SwapAdjacentBlocks(y), x),
                hn::OddEvenBlocks(y, hn::SwapAdjacentBlocks(x)));
    }
  }
}

#else
template <class D, class Op>
HWY_INLINE hn::Vec<D> FoldEach(D, const hn::Vec<D>* v, const Op&) {
  return v[0];
}
#endif

// Calls f(k, rows, starts, counts) for segments [k, k + lanes): rows[i] has the rows of segment
// k + i, which begin at starts[i], or of those that fit no vector fold(first row, their number).
template <class R, class Fold, class F>
HWY_INLINE void ForSegments(const R* HWY_RESTRICT x, const ShortGroup<R>& group, R identity,
                            const Fold& fold, const F& f) {
  const hn::ScalableTag<R> d;
  const hn::RebindToSigned<decltype(d)> di;
  constexpr std::size_t kLanes = hn::MaxLanes(d);
  LinesAhead ahead(x);
  for (std::int64_t k = 0; k < group.count; k += static_cast<std::int64_t>(kLanes)) {
    hn::Vec<decltype(d)> rows[kLanes];
    const R* starts[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) {
      const std::int64_t n = group.counts[k + static_cast<std::int64_t>(i)];
      starts[i] = x;
      if (HWY_LIKELY(n <= static_cast<std::int64_t>(kLanes))) {
        rows[i] = LoadFirst(d, x, static_cast<std::size_t>(n), identity);
      } else {
        rows[i] = fold(x, n);
        if (n > kFewVectors * static_cast<std::int64_t>(kLanes)) ahead.Skip(x + n);
      }
      x += n;
    }
    ahead.StepTo(x);
    f(k, rows, starts, hn::LoadU(di, group.counts + k));
  }
}

// group.values = the sum of each segment, or its mean.
template <class R>
void SumsOfGroup(const R* HWY_RESTRICT x, bool mean, R empty, ShortGroup<R>& group) {
  const hn::ScalableTag<R> d;
  const hn::RebindToSigned<decltype(d)> di;
  const auto add = [](auto a, auto b) { return hn::Add(a, b); };
  const auto fold = [&](const R* from, std::int64_t n) {
    return FoldToLanes(d, from, n, R{0}, add);
  };
  ForSegments(x, group, R{0}, fold,
              [&](std::int64_t k, const auto* rows, const R* const*, auto counts) HWY_ATTR {
                auto value = FoldEach(d, rows, add);
                if (mean) value = hn::Div(value, hn::ConvertTo(d, counts));
                const auto none = hn::RebindMask(d, hn::Eq(counts, hn::Zero(di)));
                hn::StoreU(hn::IfThenElse(none, hn::Set(d, empty), value), d, group.values + k);
              });
}

// group.values and .places = the extreme of each segment and its place.
template <bool kMax, bool kLast, class R>
void ExtremesOfGroup(const R* HWY_RESTRICT x, R empty, ShortGroup<R>& group) {
  const hn::ScalableTag<R> d;
  const hn::RebindToSigned<decltype(d)> di;
  constexpr std::size_t kLanes = hn::MaxLanes(d);
  constexpr R kIdentity = kMax ? -kInf<R> : kInf<R>;
  const auto better = [](auto a, auto b) { return kMax ? hn::Max(a, b) : hn::Min(a, b); };
  const auto body = [&](std::int64_t k, const auto* rows, const R* const* starts,
                        auto counts) HWY_ATTR {
    hn::StoreU(FoldEach(d, rows, better), d, group.values + k);
    auto sum = rows[0];  // NaN if a row is (and for opposite infinities, which costs time only)
    for (std::size_t i = 0; i < kLanes; ++i) {
      if (i > 0) sum = hn::Add(sum, rows[i]);
      // A vector of one row each: the extreme is there, unless a NaN or the segment's length takes
      // it from here.
      const auto equal =
          hn::Eq(rows[i], hn::Set(d, group.values[k + static_cast<std::int64_t>(i)]));
      std::int64_t place;
      if constexpr (kLast) {
        // Equal to the identity may be what is behind the rows.
        const auto n = static_cast<unsigned>(group.counts[k + static_cast<std::int64_t>(i)]);
        const unsigned inside = n < kLanes ? (1u << n) - 1 : ~0u;
        place = std::bit_width(BitsOf(d, equal) & inside) - 1;
      } else {
        place = hn::FindFirstTrue(d, equal);
      }
      group.places[k + static_cast<std::int64_t>(i)] = static_cast<Int<R>>(place);
    }
    const auto none = hn::Eq(counts, hn::Zero(di));
    const auto longer = hn::Gt(counts, hn::Set(di, static_cast<Int<R>>(kLanes)));
    unsigned others = BitsOf(di, hn::Or(none, longer));
    if (HWY_UNLIKELY(!hn::AllFalse(d, hn::IsNaN(sum)))) others = (2u << (kLanes - 1)) - 1;
    for (; others != 0; others &= others - 1) {
      const int i = std::countr_zero(others);
      const std::int64_t n = group.counts[k + i];
      const std::int64_t place = n > 0 ? PlaceOfExtreme<kMax, kLast>(starts[i], n) : -1;
      group.places[k + i] = static_cast<Int<R>>(place);
      group.values[k + i] = n > 0 ? starts[i][place] : empty;
    }
  };
  ForSegments(
      x, group, kIdentity, [&](const R*, std::int64_t) { return hn::Set(d, kIdentity); }, body);
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
