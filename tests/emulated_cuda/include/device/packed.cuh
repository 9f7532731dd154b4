// device/packed.cuh on the host.
#pragma once

#include "device/float.cuh"

namespace pullback::device {

inline constexpr bool kComparesPacked = __CUDA_ARCH__ >= 900;

inline uint32_t reordered(uint32_t pair) {
  return pair ^ ((pair & 0x8000u ? 0x7fffu : 0) | (pair & 0x80000000u ? 0x7fff0000u : 0));
}

template <class T>
struct Packed {
  static uint32_t canonical(uint32_t pair) {
    return each(pair, pair, [](float x, float) { return x == 0 ? 0 : x; });
  }
  static uint32_t max_or_nan(uint32_t a, uint32_t b) {
    return each(a, b, [](float x, float y) { return device::max_or_nan(x, y); });
  }
  static uint32_t max(uint32_t a, uint32_t b) {
    return each(a, b, [](float x, float y) { return fmaxf(x, y); });
  }
  static void unpack(uint32_t pair, float& low, float& high) { device::unpack<T>(pair, low, high); }
  template <bool kEqual>
  static uint32_t above(uint32_t a, uint32_t b) {
    float x[2], y[2];
    unpack(a, x[0], x[1]);
    unpack(b, y[0], y[1]);
    const auto above = [&](int i) { return kEqual ? x[i] >= y[i] : x[i] > y[i]; };
    return (above(0) ? 0xffffu : 0) | (above(1) ? 0xffff0000u : 0);
  }
  static uint32_t nan(uint32_t a) {
    float x[2];
    unpack(a, x[0], x[1]);
    return (x[0] != x[0] ? 0xffffu : 0) | (x[1] != x[1] ? 0xffff0000u : 0);
  }

 private:
  template <class Of>
  static uint32_t each(uint32_t a, uint32_t b, const Of& of) {
    float x[2], y[2];
    unpack(a, x[0], x[1]);
    unpack(b, y[0], y[1]);
    return pack<T>(of(x[0], y[0]), of(x[1], y[1]));
  }
};
template <>
struct Packed<float> {
  static uint32_t max_or_nan(uint32_t a, uint32_t b) {
    return __float_as_uint(device::max_or_nan(__uint_as_float(a), __uint_as_float(b)));
  }
};

}  // namespace pullback::device
