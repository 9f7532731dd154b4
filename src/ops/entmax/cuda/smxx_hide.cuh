// x with -inf where the mask is 0: then rows are as good as without a mask, and the kernels for
// these serve. A thread takes some vectors, whatever rows they are in.
#pragma once

#include "ops/entmax/cuda/params.cuh"
#include "ops/entmax/cuda/smxx_vector.cuh"

namespace pullback::entmax {

// The mask's bytes for one vector of x, `step` apart.
template <class T>
struct MaskBytes {
  static constexpr int kLength = device::kVectorLength<T>;
  static constexpr int kWords = kLength / 4;
  uint32_t word[kWords];

  static bool whole(const uint8_t* from, int64_t step) {
    return step == 1 && reinterpret_cast<uint64_t>(from) % kLength == 0;
  }
  void load_whole(const uint8_t* from) {
    struct alignas(kLength) Bytes {
      uint32_t word[kWords];
    };
    const auto bytes = *reinterpret_cast<const Bytes*>(from);
#pragma unroll
    for (int w = 0; w < kWords; ++w) word[w] = bytes.word[w];
  }
  void load(const uint8_t* from, int64_t step) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      word[w] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        word[w] |= static_cast<uint32_t>(from[(w * 4 + i) * step]) << 8 * i;
      }
    }
  }
  bool shows(int i) const { return (word[i / 4] >> i % 4 * 8 & 0xff) != 0; }

  void hide(Words& x) const {
    constexpr uint32_t kHidden = kHiddenWord<T>;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(T) == 4) {
        x.element[w] = shows(w) ? x.element[w] : kHidden;
      } else {
        const uint32_t low = shows(2 * w) ? x.element[w] : kHidden;
        const uint32_t high = shows(2 * w + 1) ? x.element[w] : kHidden;
        x.element[w] = (low & 0xffff) | (high & 0xffff0000u);
      }
    }
  }
};

template <class T>
void hide(const HideParams& p) {
  constexpr int kLength = device::kVectorLength<T>;
  constexpr int kThreads = kHideWarps * device::kWarpSize;
  // Rows are cut into vectors; a thread's are a block's threads apart.
  const int64_t vectors = (p.rows.length + kLength - 1) / kLength, all = p.rows.count * vectors;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kHideVectors * kThreads + threadIdx.x;
  const auto on_vector = [](const void* tensor) {
    return reinterpret_cast<uint64_t>(tensor) % 16 == 0;
  };
  struct Place {
    const T* x;
    const uint8_t* mask;
    T* to;
    int count;  // of elements, 0 behind the last row
    bool whole;
  };
  Place place[kHideVectors];
  Words vector[kHideVectors];
  MaskBytes<T> bytes[kHideVectors];
#pragma unroll
  for (int k = 0; k < kHideVectors; ++k) {
    const int64_t number = first + k * kThreads;
    Place& at = place[k];
    at.count = 0;
    at.whole = false;
    if (number >= all) continue;
    // 32 bits are divided in a third of the time.
    const int64_t row = all <= 0xffffffff
                            ? static_cast<uint32_t>(number) / static_cast<uint32_t>(vectors)
                            : number / vectors;
    const int64_t begin = (number - row * vectors) * kLength;
    at.x = static_cast<const T*>(p.x.data) + row_offset(p.rows, p.x, row) + begin * p.x.axis;
    at.mask = static_cast<const uint8_t*>(p.mask.data) + row_offset(p.rows, p.mask, row) +
              begin * p.mask.axis;
    at.to = static_cast<T*>(p.to.data) + row_offset(p.rows, p.to, row) + begin * p.to.axis;
    at.count = static_cast<int>(min(p.rows.length - begin, int64_t{kLength}));
    at.whole = at.count == kLength && p.x.axis == 1 && p.to.axis == 1 && on_vector(at.x) &&
               on_vector(at.to);
    if (!at.whole) continue;
    vector[k] = load_words(at.x);
    if (MaskBytes<T>::whole(at.mask, p.mask.axis)) {
      bytes[k].load_whole(at.mask);
    } else {
      bytes[k].load(at.mask, p.mask.axis);
    }
  }
#pragma unroll
  for (int k = 0; k < kHideVectors; ++k) {
    const Place& at = place[k];
    if (at.whole) {
      bytes[k].hide(vector[k]);
      store_words(at.to, vector[k]);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kLength; ++i) {
      if (i >= at.count) break;
      const T value = at.x[i * p.x.axis];
      at.to[i * p.to.axis] = at.mask[i * p.mask.axis] != 0
                                 ? value
                                 : device::from_real<T>(-device::infinity<device::Real<T>>());
    }
  }
}

}  // namespace pullback::entmax
