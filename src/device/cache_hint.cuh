// Global memory in 16-byte pieces that ask to stay in the second-level cache, or to go first. What
// is loaded may be stored to in between, so that it is no read-only data.
#pragma once

#include "device/memory.cuh"

namespace pullback::device {

template <bool kStay>
class CacheHint {
 public:
  CacheHint() {
    if constexpr (kStay) {
      asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy_));
    } else {
      asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_));
    }
  }

  Words load(const void* from) const {
    Words words;
    asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(words.element[0]), "=r"(words.element[1]), "=r"(words.element[2]),
                   "=r"(words.element[3])
                 : "l"(from), "l"(policy_));
    return words;
  }
  void store(void* to, const Words& words) const {
    asm volatile(
        "st.global.L1::no_allocate.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to),
        "r"(words.element[0]), "r"(words.element[1]), "r"(words.element[2]), "r"(words.element[3]),
        "l"(policy_)
        : "memory");
  }

 private:
  uint64_t policy_;
};

}  // namespace pullback::device
