// device/cache_hint.cuh on the host.
#pragma once

#include "device/memory.cuh"

namespace pullback::device {

template <bool kStay>
struct CacheHint {
  Words load(const void* from) const { return load_words(static_cast<const uint32_t*>(from)); }
  void store(void* to, const Words& words) const { store_words(static_cast<uint32_t*>(to), words); }
};

}  // namespace pullback::device
