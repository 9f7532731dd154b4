// Prefetching memory that is read in order.

#if defined(PULLBACK_CPU_AHEAD_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_CPU_AHEAD_INL_HPP
#undef PULLBACK_CPU_AHEAD_INL_HPP
#else
#define PULLBACK_CPU_AHEAD_INL_HPP
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <cstdint>

#include "cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// One line for each line that is used, 16 KiB later. The lines come from several pages in turn: the
// hardware has a prefetcher for each, which else would start anew where a page ends.
class LinesAhead {
 public:
  static constexpr std::uintptr_t kLine = 64;
  static constexpr std::uintptr_t kLead = 16384;  // bytes between what is used and what is fetched

  explicit LinesAhead(const void* at, std::uintptr_t step = kLine)
      : at_(reinterpret_cast<std::uintptr_t>(at)), step_(step) {}

  // `step` bytes more are used.
  HWY_INLINE void Step() {
    constexpr std::uintptr_t kPage = 4096, kRegion = kLead, kPages = kRegion / kPage;
    const std::uintptr_t line = at_ % kRegion / kLine;
    const std::uintptr_t next = at_ / kRegion * kRegion + kRegion;
    hwy::Prefetch(
        reinterpret_cast<const char*>(next + line % kPages * kPage + line / kPages * kLine));
    at_ += step_;
  }
  // All before `to` is used.
  HWY_INLINE void StepTo(const void* to) {
    while (at_ < reinterpret_cast<std::uintptr_t>(to)) Step();
  }
  // The same where `to` is some lines further, four of them at a time.
  HWY_INLINE void StepFarTo(const void* to) {
    while (at_ + 4 * kLine <= reinterpret_cast<std::uintptr_t>(to)) {
      FetchFour();
      at_ += 4 * kLine;
    }
  }
  // The same where it is a guess how far: without a branch, kTimes four lines at most. Of more the
  // first are left out.
  template <int kTimes>
  HWY_INLINE void StepSomeTo(const void* to) {
    constexpr std::uintptr_t kFour = 4 * kLine;
    const auto stop = reinterpret_cast<std::uintptr_t>(to);
    at_ = std::max(at_, stop / kLine * kLine - (kTimes + 1) * kFour);
    for (int i = 0; i < kTimes; ++i) {
      FetchFour();
      at_ += std::uintptr_t{at_ + kFour <= stop} * kFour;
    }
  }
  // Somebody else cares for what lies before `to`.
  HWY_INLINE void Skip(const void* to) { at_ = reinterpret_cast<std::uintptr_t>(to); }

 private:
  // One of each page.
  HWY_INLINE void FetchFour() const {
    constexpr std::uintptr_t kPage = 4096, kRegion = kLead;
    const std::uintptr_t next =
        at_ / kRegion * kRegion + kRegion + at_ % kRegion / (4 * kLine) * kLine;
    for (int page = 0; page < 4; ++page) {
      hwy::Prefetch(reinterpret_cast<const char*>(next + page * kPage));
    }
  }

  std::uintptr_t at_, step_;
};

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
