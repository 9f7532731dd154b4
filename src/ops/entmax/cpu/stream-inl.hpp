// Writing rows, through the caches or past them, and bits.

#if defined(PULLBACK_ENTMAX_STREAM_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_STREAM_INL_HPP
#undef PULLBACK_ENTMAX_STREAM_INL_HPP
#else
#define PULLBACK_ENTMAX_STREAM_INL_HPP
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/stream-inl.hpp"
#include "ops/entmax/cpu/solve-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// How whole vectors of a row are stored.
struct PlainStore {
  template <class D, class T>
  HWY_INLINE void operator()(D d, hn::Vec<D> value, T* to) const {
    StoreAs(d, value, to);
  }
};
struct StreamStore {
  template <class D, class T>
  HWY_INLINE void operator()(D d, hn::Vec<D> value, T* to) const {
    if constexpr (std::is_same_v<T, hn::TFromD<D>>) {
      hn::Stream(value, d, to);
    } else {
      const hn::Rebind<T, D> narrow;
      hn::Stream(hn::DemoteTo(narrow, value), narrow, to);
    }
  }
};

// Streams a row that fill(to, begin, count) writes in pieces to scratch.
template <class T, class Fill>
HWY_INLINE void WriteStaged(T* row, std::size_t length, const Fill& fill) {
  constexpr std::size_t kChunk = 4096 / sizeof(T);
  HWY_ALIGN T chunk[kChunk];
  for (std::size_t begin = 0; begin < length; begin += kChunk) {
    const std::size_t count = std::min(kChunk, length - begin);
    fill(chunk, begin, count);
    StreamBytes(row + begin, chunk, count * sizeof(T));
  }
}

// fill(to, begin, count, store) writes elements [begin, begin + count) of a row to `to`, whole
// vectors by `store`.
template <class T, class Fill>
HWY_INLINE void WriteRow(T* row, std::size_t length, bool stream, const Fill& fill) {
  if (!stream) return fill(row, 0, length, PlainStore());
  if constexpr (std::is_same_v<T, Real<T>>) {
    if (reinterpret_cast<std::uintptr_t>(row) % HWY_MAX_BYTES == 0) {
      return fill(row, 0, length, StreamStore());
    }
  }
  WriteStaged(row, length, [&](T* to, std::size_t begin, std::size_t count) HWY_ATTR {
    fill(to, begin, count, PlainStore());
  });
}

// Writes `lanes` bits of the support from element i on; rows of bits begin at whole bytes.
template <class D, class M>
HWY_INLINE void StoreBits(D d, M active, std::size_t i, std::size_t length, std::uint8_t* support) {
  std::uint8_t bytes[HWY_MAX_BYTES] = {};
  if (hn::MaxLanes(d) >= 8 && i + hn::Lanes(d) <= length) {
    hn::StoreMaskBits(d, active, support + i / 8);
    return;
  }
  hn::StoreMaskBits(d, active, bytes);
  if (hn::Lanes(d) >= 8) {
    std::memcpy(support + i / 8, bytes, (std::min(hn::Lanes(d), length - i) + 7) / 8);
  } else {
    support[i / 8] = static_cast<std::uint8_t>((i % 8 ? support[i / 8] : 0) | bytes[0] << i % 8);
  }
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
