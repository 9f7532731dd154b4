// device/memory.cuh on the host.
#pragma once

#include "device/types.cuh"

namespace pullback::device {

template <class T>
inline constexpr int kVectorLength = 16 / static_cast<int>(sizeof(T));

template <class T>
struct alignas(16) Vector {
  T element[kVectorLength<T>];
};

template <class T>
Vector<T> load_vector(const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) emulated::fail("a misaligned load");
  return *reinterpret_cast<const Vector<T>*>(from);
}
template <class T>
void store_vector(T* to, const Vector<T>& vector) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) emulated::fail("a misaligned store");
  *reinterpret_cast<Vector<T>*>(to) = vector;
}

inline uint16_t load_below(const void* from, int i, int count) {
  return i < count ? *static_cast<const uint16_t*>(from) : 0;
}

using Words = Vector<uint32_t>;

template <class T>
Words load_words(const T* from) {
  return load_vector(reinterpret_cast<const uint32_t*>(from));
}
template <class T>
void store_words(T* to, const Words& words) {
  store_vector(reinterpret_cast<uint32_t*>(to), words);
}

}  // namespace pullback::device
