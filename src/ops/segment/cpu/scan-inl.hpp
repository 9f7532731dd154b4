// Short segments of a tensor with one column. The lanes of a vector hold consecutive rows, and a
// scan that starts anew at each segment's first row leaves the segment's result at its last one. A
// row and a segment cost the same whatever the lengths.

#if defined(PULLBACK_SEGMENT_SCAN_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_SCAN_INL_HPP
#undef PULLBACK_SEGMENT_SCAN_INL_HPP
#else
#define PULLBACK_SEGMENT_SCAN_INL_HPP
#endif

#include <cstring>

#include "ops/segment/cpu/column-inl.hpp"
#include "ops/segment/cpu/extreme-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

// As many whole segments as fit, and what a scan makes of them.
template <class R>
struct ScanGroup {
  static constexpr std::int64_t kMost = 1024;    // rows, and segments: all arrays stay in L1
  static constexpr std::int64_t kPad = 64;       // no vector has more lanes
  static constexpr std::int64_t kMeanRows = 32;  // longer segments are quicker one by one

  std::int64_t count = 0, rows = 0;  // segments, and their rows
  std::uint8_t heads[kMost + kPad];  // whether a segment begins at the row
  Int<R> bounds[kMost + kPad];       // segment k has the rows [bounds[k], bounds[k+1])
  R sums[kMost + kPad];              // of a segment's rows so far
  Int<R> extremes[kMost + kPad];     // the row of a segment's extreme so far
  R values[kMost + kPad];            // of the segments
  Int<R> places[kMost + kPad];       // rows of the segments' extremes, or -1

  // Takes segments from `begin` on, but none at or after `end`. False when they are too long.
  bool Fill(const Segments& segments, std::int64_t begin, std::int64_t end) {
    const std::int64_t first = segments.begin(begin);
    count = 0;
    if (segments.end(begin) - first > kMost) return false;
    std::memset(heads, 0, sizeof(heads));
    const IndexView& offsets = segments.offsets;
    const std::int64_t most = std::min(end - begin, kMost);
    if (offsets.wide && offsets.stride == 1) {
      const auto* next = static_cast<const std::int64_t*>(offsets.data) + begin + 1;
      Take(most, [=](std::int64_t k) { return next[k] - first; });
    } else {
      Take(most, [&](std::int64_t k) { return segments.end(begin + k) - first; });
    }
    rows = static_cast<std::int64_t>(bounds[count]);
    std::memset(bounds + count + 1, 0, kPad / 2 * sizeof(bounds[0]));
    return rows > 0 && rows <= count * kMeanRows;
  }

 private:
  template <class End>
  void Take(std::int64_t most, const End& end_of) {
    bounds[0] = 0;
    heads[0] = 1;
    std::int64_t k = 0;
    for (; k < most; ++k) {
      const std::int64_t end = end_of(k);
      if (end > kMost) break;
      heads[end] = 1;
      bounds[k + 1] = static_cast<Int<R>>(end);
    }
    count = k;
  }
};

template <class D>
HWY_INLINE hn::Mask<D> MaskOf(D d, unsigned bits) {
  std::uint8_t bytes[8] = {};
  std::memcpy(bytes, &bits, sizeof(bits));
  return hn::LoadMaskBits(d, bytes);
}

// Lane i of Slide(v, k) is that of lane i - 2^k of v, where there is one, else lane i itself.
template <class D>
class Slides {
  using I = hn::TFromD<hn::RebindToSigned<D>>;
  static constexpr std::size_t kMaxLanes = hn::MaxLanes(D());

 public:
  Slides() {
    const std::size_t lanes = hn::Lanes(D());
    for (std::size_t i = 0; i < lanes; ++i) {
      for (std::size_t k = 0; k < 4; ++k) {
        from_[k][i] = static_cast<I>(i < std::size_t{1} << k ? i : i - (std::size_t{1} << k));
      }
      last_[i] = static_cast<I>(lanes - 1);
    }
  }
  template <class V>
  HWY_INLINE V Slide(V v, int k) const {
    return hn::TableLookupLanes(v, hn::SetTableIndices(hn::DFromV<V>(), from_[k]));
  }
  template <class V>
  HWY_INLINE V Last(V v) const {
    return hn::TableLookupLanes(v, hn::SetTableIndices(hn::DFromV<V>(), last_));
  }

 private:
  HWY_ALIGN I from_[4][kMaxLanes];
  HWY_ALIGN I last_[kMaxLanes];
};

// Calls f(first row, heads) for each vector of rows; bit i of `heads`: a segment begins at lane i.
template <class R, class F>
HWY_INLINE void ForHeads(const ScanGroup<R>& group, const R* x, const F& f) {
  const hn::ScalableTag<R> d;
  const hn::Rebind<std::uint8_t, decltype(d)> d8;
  RowsAhead<R> ahead(Block<R>{x, 1, group.rows}, 1);
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < group.rows; i += step) {
    ahead.Step();
    f(i, BitsOf(d8, hn::Ne(hn::LoadU(d8, group.heads + i), hn::Zero(d8))));
  }
}

// The lanes that add lane i - 2^k in step k of a scan: those whose segment began before it.
struct ScanSteps {
  unsigned blocked;
  explicit ScanSteps(unsigned heads) : blocked(heads | 1u) {}
  HWY_INLINE unsigned Next(int k) {
    const unsigned open = ~blocked;
    blocked |= blocked << (1 << k);
    return open;
  }
};
// The lanes before the first head, which continue the vector before.
HWY_INLINE unsigned BeforeHead(unsigned heads) { return (heads & (0u - heads)) - 1u; }

template <class R>
HWY_INLINE hn::Vec<hn::ScalableTag<R>> LoadRows(const R* x, std::int64_t i, std::int64_t rows) {
  const hn::ScalableTag<R> d;
  if (i + static_cast<std::int64_t>(hn::Lanes(d)) <= rows) return hn::LoadU(d, x + i);
  return LoadFirst(d, x + i, static_cast<std::size_t>(rows - i));
}

// Calls f(k, is empty, last row, count) for vectors of segments from k on.
template <class R, class F>
HWY_INLINE void ForSegments(const ScanGroup<R>& group, const F& f) {
  const hn::RebindToSigned<hn::ScalableTag<R>> di;
  const auto step = static_cast<std::int64_t>(hn::Lanes(di));
  for (std::int64_t k = 0; k < group.count; k += step) {
    const auto begin = hn::LoadU(di, group.bounds + k), end = hn::LoadU(di, group.bounds + k + 1);
    const auto count = hn::Sub(end, begin);
    f(k, hn::Eq(count, hn::Zero(di)), hn::Max(hn::Sub(end, hn::Set(di, 1)), hn::Zero(di)), count);
  }
}

// group.values = the sum of each segment, or its mean.
template <class R>
void ScanSums(const R* HWY_RESTRICT x, bool mean, R empty, ScanGroup<R>& group) {
  const hn::ScalableTag<R> d;
  const int steps = std::countr_zero(hn::Lanes(d));
  const Slides<decltype(d)> slides;
  auto carry = hn::Zero(d);
  ForHeads(group, x, [&](std::int64_t i, unsigned heads) {
    auto sum = LoadRows(x, i, group.rows);
    ScanSteps open(heads);
    for (int k = 0; k < steps; ++k) {
      const auto lanes = MaskOf(d, open.Next(k));
      sum = hn::Add(sum, hn::IfThenElseZero(lanes, slides.Slide(sum, k)));
    }
    sum = hn::Add(sum, hn::IfThenElseZero(MaskOf(d, BeforeHead(heads)), carry));
    carry = slides.Last(sum);
    Store(d, sum, group.sums + i);
  });
  ForSegments(group, [&](std::int64_t k, auto is_empty, auto last, auto count) {
    auto value = hn::GatherIndex(d, group.sums, last);
    if (mean) value = hn::Div(value, hn::ConvertTo(d, count));
    Store(d, hn::IfThenElse(hn::RebindMask(d, is_empty), hn::Set(d, empty), value),
          group.values + k);
  });
}

// group.values and .places = the extreme of each segment and its row in the group. False when there
// is a NaN.
template <bool kMax, bool kLast, class R>
bool ScanExtremes(const R* HWY_RESTRICT x, R empty, ScanGroup<R>& group) {
  const hn::ScalableTag<R> d;
  const hn::RebindToSigned<decltype(d)> di;
  const int steps = std::countr_zero(hn::Lanes(d));
  const Slides<decltype(d)> slides;
  auto carry = hn::Zero(d);
  auto carry_row = hn::Zero(di);
  const auto iota = hn::Iota(di, 0);
  auto nan = hn::IsNaN(carry);
  const auto better = [](auto a, auto b) { return kMax ? hn::Max(a, b) : hn::Min(a, b); };
  ForHeads(group, x, [&](std::int64_t i, unsigned heads) {
    const auto value = LoadRows(x, i, group.rows);
    nan = hn::Or(nan, hn::IsNaN(value));
    auto best = value;
    ScanSteps open(heads);
    for (int k = 0; k < steps; ++k) {
      const auto lanes = MaskOf(d, open.Next(k));
      best = better(best, hn::IfThenElse(lanes, slides.Slide(best, k), best));
    }
    best = better(best, hn::IfThenElse(MaskOf(d, BeforeHead(heads)), carry, best));
    // A row that beats all before it in its segment; the extreme is the last of those.
    const auto before = hn::IfThenElse(MaskOf(d, 1u), carry, slides.Slide(best, 0));
    const auto record = hn::Or(Beats<kMax, kLast>(value, before), MaskOf(d, heads));
    auto row = hn::IfThenElseZero(hn::RebindMask(di, record),
                                  hn::Add(iota, hn::Set(di, static_cast<Int<R>>(i))));
    for (int k = 0; k < steps; ++k) row = hn::Max(row, slides.Slide(row, k));
    row = hn::Max(row, carry_row);
    carry = slides.Last(best);
    carry_row = slides.Last(row);
    hn::StoreU(row, di, group.extremes + i);
  });
  if (!hn::AllFalse(d, nan)) return false;
  ForSegments(group, [&](std::int64_t k, auto is_empty, auto last, auto) {
    const auto row = hn::GatherIndex(di, group.extremes, last);
    Store(
        d,
        hn::IfThenElse(hn::RebindMask(d, is_empty), hn::Set(d, empty), hn::GatherIndex(d, x, row)),
        group.values + k);
    hn::StoreU(hn::IfThenElse(is_empty, hn::Set(di, Int<R>{-1}), row), di, group.places + k);
  });
  return true;
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
