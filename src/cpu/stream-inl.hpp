// Stores that go past the caches, for what is not read again soon. hwy::FlushStream() has to follow
// before another thread reads it.

#if defined(PULLBACK_CPU_STREAM_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_CPU_STREAM_INL_HPP
#undef PULLBACK_CPU_STREAM_INL_HPP
#else
#define PULLBACK_CPU_STREAM_INL_HPP
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// memcpy with such stores.
HWY_INLINE void StreamBytes(void* to, const void* from, std::size_t bytes) {
  const hn::ScalableTag<std::uint8_t> d;
  const std::size_t lanes = hn::Lanes(d);
  auto* target = static_cast<std::uint8_t*>(to);
  const auto* source = static_cast<const std::uint8_t*>(from);
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(to) % lanes;
  std::size_t i = misaligned == 0 ? 0 : std::min(lanes - misaligned, bytes);
  std::memcpy(target, source, i);
  for (; i + lanes <= bytes; i += lanes) hn::Stream(hn::LoadU(d, source + i), d, target + i);
  std::memcpy(target + i, source + i, bytes - i);
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
