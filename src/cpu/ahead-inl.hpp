// Prefetching memory that is read in order.

#if defined(PULLBACK_CPU_AHEAD_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_CPU_AHEAD_INL_HPP
#undef PULLBACK_CPU_AHEAD_INL_HPP
#else
#define PULLBACK_CPU_AHEAD_INL_HPP
#endif

#include <hwy/cache_control.h>

#include <cstdint>

#include "cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// As many lines as are used, 16 KiB later, four at a time. These come from four pages: the hardware
// has a prefetcher for each page, which else would start anew where a page ends.
class LinesAhead {
 public:
  static constexpr std::uintptr_t kLine = 64;
  static constexpr std::uintptr_t kLead = 16384;  // bytes between what is used and what is fetched

  explicit LinesAhead(const void* at, std::uintptr_t step = kLine)
      : at_(reinterpret_cast<std::uintptr_t>(at)), step_(step) {}

  // `step` bytes more are used.
  HWY_INLINE void Step() {
    const std::uintptr_t before = at_;
    at_ += step_;
    if (before / kGroup != at_ / kGroup) Fetch(before);
  }
  // All before `to` is used.
  HWY_INLINE void StepTo(const void* to) {
    const auto end = reinterpret_cast<std::uintptr_t>(to);
    while (at_ / kGroup < end / kGroup) {
      Fetch(at_);
      at_ += kGroup;
    }
    if (at_ < end) at_ = end;
  }
  // Somebody else cares for what lies before `to`.
  HWY_INLINE void Skip(const void* to) { at_ = reinterpret_cast<std::uintptr_t>(to); }

 private:
  static constexpr std::uintptr_t kPages = 4, kGroup = kPages * kLine;

  // What is fetched for the lines around `at`: one line of each page.
  static HWY_INLINE void Fetch(std::uintptr_t at) {
    constexpr std::uintptr_t kPage = kLead / kPages;
    const std::uintptr_t next = at / kLead * kLead + kLead + at % kLead / kGroup * kLine;
    for (std::uintptr_t page = 0; page < kPages; ++page) {
      hwy::Prefetch(reinterpret_cast<const char*>(next + page * kPage));
    }
  }

  std::uintptr_t at_, step_;
};

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
