// Where the segments of a tensor end.

#if defined(PULLBACK_SEGMENT_ENDS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_ENDS_INL_HPP
#undef PULLBACK_SEGMENT_ENDS_INL_HPP
#else
#define PULLBACK_SEGMENT_ENDS_INL_HPP
#endif

#include "ops/segment/cpu/rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

// Those from segment `first` on.
struct SegmentEnds {
  SegmentEnds(const Segments& segments_, std::int64_t first_) : segments(segments_), first(first_) {
    const IndexView& offsets = segments.offsets;
    if (offsets.wide && offsets.stride == 1) {
      in_place = static_cast<const std::int64_t*>(offsets.data) + first + 1;
    }
  }
  HWY_INLINE std::int64_t operator[](std::int64_t k) const {
    return in_place != nullptr ? in_place[k] : segments.end(first + k);
  }
  // Calls f(end_of), where end_of(k) is the same without a look at where they are.
  template <class F>
  HWY_INLINE void Visit(const F& f) const {
    if (in_place != nullptr) {
      f([from = in_place](std::int64_t k) { return from[k]; });
    } else {
      f([this](std::int64_t k) { return segments.end(first + k); });
    }
  }

  // The first vector of the ends of segments k, …, from `row` on, of which `count` may be read.
  template <class DI>
  HWY_INLINE hn::Vec<DI> From(DI di, std::int64_t k, std::int64_t count, std::int64_t row) const {
    using I = hn::TFromD<DI>;
    constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(di));
#if HWY_TARGET != HWY_SCALAR
    if (HWY_LIKELY(in_place != nullptr && count >= kLanes)) {
      const hn::ScalableTag<std::int64_t> wide;
      const auto from = hn::Set(di, static_cast<I>(row));
      const auto low = hn::BitCast(di, hn::LoadU(wide, in_place + k));
      if constexpr (sizeof(I) == 8) {
        return hn::Sub(low, from);
      } else {
        const auto high = hn::LoadU(wide, in_place + k + kLanes / 2);
        return hn::Sub(hn::ConcatEven(di, hn::BitCast(di, high), low), from);
      }
    }
#endif
    I buffer[kLanes] = {};
    for (std::int64_t i = 0; i < std::min(count, kLanes); ++i) {
      buffer[i] = static_cast<I>((*this)[k + i] - row);
    }
    return hn::LoadU(di, buffer);
  }

  const Segments& segments;
  std::int64_t first;
  const std::int64_t* in_place = nullptr;
};

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
