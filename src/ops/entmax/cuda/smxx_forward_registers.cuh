// The forward of contiguous rows of at most a few thousand elements: the row stays in the registers
// of a warp or a block from the one read to the one write.
//
// All steps of the threshold run over all elements. The first lower bound, from the largest element
// of each lane alone, leaves one to four of them.
#pragma once

#include "ops/entmax/cuda/forward_params.cuh"
#include "ops/entmax/cuda/smxx_solve.cuh"
#include "ops/entmax/cuda/smxx_vector.cuh"

namespace pullback::entmax {

template <class T, int kVectors>
inline constexpr int kHeld = kVectors * device::kVectorLength<T>;  // elements of a lane

// Elements of vector j of a row's thread begin at vector_begin(j).
template <class T, int kThreads>
int vector_begin(int j, int thread) {
  return (j * kThreads + thread) * device::kVectorLength<T>;
}

template <class T, int kThreads, int kVectors, class ValueOf>
void store_held(T* to, int length, int thread, const ValueOf& value_of) {
  constexpr int kLength = device::kVectorLength<T>;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int begin = vector_begin<T, kThreads>(j, thread);
    if (begin >= length) break;
    Packed<T> packed;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float x[kPerWord<T>];
#pragma unroll
      for (int k = 0; k < kPerWord<T>; ++k) x[k] = value_of(j * kLength + w * kPerWord<T> + k);
      packed.word[w] = pack(x, T{});
    }
    store_packed(to + begin, packed);
  }
}

// Bit k of the result: element k of this thread's vector j is active.
template <class T, int kThreads, int kVectors, class Active>
void store_held_bits(uint8_t* to, int64_t step, int length, int thread, const Active& active) {
  constexpr int kLength = device::kVectorLength<T>;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int begin = vector_begin<T, kThreads>(j, thread);
    unsigned bits = 0;
#pragma unroll
    for (int k = 0; k < kLength; ++k) bits |= (active(j * kLength + k) ? 1u : 0u) << k;
    // Two lanes make a byte of f32.
    if constexpr (kLength == 4) bits |= __shfl_down_sync(device::kAllLanes, bits, 1) << 4;
    if (begin % 8 == 0 && begin < length) to[begin / 8 * step] = static_cast<uint8_t>(bits);
  }
}

template <class T, int kThreads, int kVectors>
void load_held(Packed<T> (&held)[kVectors], const T* x, int length, int thread) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int begin = vector_begin<T, kThreads>(j, thread);
    if (begin < length) {
      held[j] = load_packed<T>(x + begin);
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w) held[j].word[w] = kHiddenWord<T>;
    }
  }
}

template <class T, Family kFamily, int kWarps, int kVectors>
void forward_held(const ForwardParams& p, int64_t row, const Packed<T> (&held)[kVectors],
                  Group<kWarps>& group) {
  constexpr int kThreads = kWarps * device::kWarpSize;
  constexpr int kCount = kHeld<T, kVectors>;
  constexpr int kLength = device::kVectorLength<T>;
  const int thread = group.thread();
  const int length = static_cast<int>(p.rows.length);
  uint32_t largest_word = max_of(held[0]);
#pragma unroll
  for (int j = 1; j < kVectors; ++j) largest_word = max_of_words<T>(largest_word, max_of(held[j]));
  // Every warp looks at the largest of all threads.
  constexpr int kTops = kWarps == 1 ? kPerWord<T> : kWarps;
  float tops[kTops];
  if constexpr (kWarps == 1) {
    unpack(largest_word, tops, T{});
  } else {
    group.gather(max_in_word<T>(largest_word), tops);
  }
  float largest = tops[0];
#pragma unroll
  for (int w = 1; w < kTops; ++w) largest = max_or_nan(largest, tops[w]);
  largest = warp_max_or_nan(largest);

  // Computed where they are used: they need no registers before.
  const auto y_of_row = [&] {
    return p.y.data ? static_cast<T*>(p.y.data) + row_offset(p.rows, p.y, row) : nullptr;
  };
  const auto support_of_row = [&] {
    return p.support.data
               ? static_cast<uint8_t*>(p.support.data) + row_offset(p.rows, p.support, row)
               : nullptr;
  };
  const auto finish = [&](float tau, int size) {
    if (thread != 0) return;
    if (p.tau.data) static_cast<float*>(p.tau.data)[row_offset(p.rows, p.tau, row)] = tau;
    if (p.support_size.data) {
      static_cast<int32_t*>(p.support_size.data)[row_offset(p.rows, p.support_size, row)] = size;
    }
  };

  if (!(magnitude(largest) < device::infinity<float>())) {
    const bool empty = largest < 0;
    const float fill = empty ? 0 : device::quiet_nan<float>();
    if (T* y = y_of_row())
      store_held<T, kThreads, kVectors>(y, length, thread, [&](int) { return fill; });
    if (uint8_t* support = support_of_row()) {
      store_held_bits<T, kThreads, kVectors>(support, p.support.axis, length, thread,
                                             [](int) { return false; });
    }
    finish(empty ? device::infinity<float>() : fill, empty ? 0 : -1);
    return;
  }

  float z[kCount];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float pair[kPerWord<T>];
      unpack(held[j].word[w], pair, T{});
#pragma unroll
      for (int k = 0; k < kPerWord<T>; ++k) {
        z[j * kLength + w * kPerWord<T> + k] = pair[k] - largest;
      }
    }
  }
  // How many elements `active` holds for, in the row.
  const auto count = [&](auto active) {
    int mine = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) mine += active(z[i]);
    return group.count(mine);
  };

  if constexpr (kFamily == Family::softmax) {
    float sum = 0, unused = 0;
    const int size =
        p.support_size.data ? count([](float v) { return v > -device::infinity<float>(); }) : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      z[i] = exp_of(z[i]);
      sum += z[i];
    }
    group.sum(sum, unused);
    const float scale = 1 / sum;
    if (T* y = y_of_row())
      store_held<T, kThreads, kVectors>(y, length, thread, [&](int i) { return z[i] * scale; });
    finish(largest + log_of(sum), size);
  } else {
    const Power<kFamily, float> power(p.alpha);
#pragma unroll
    for (int w = 0; w < kTops; ++w) tops[w] -= largest;
    const auto all = [&](auto use) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) use(z[i]);
    };
    Threshold<float> threshold;
    if constexpr (kFamily == Family::sparsemax) {
      threshold = {rise_of_sparsemax(warp_bound(power, tops), group, all), 0, 1};
    } else {
      const auto start_of = [&](const auto& rough) {
        if constexpr (kFamily != Family::general) {
          return warp_bound(power, tops);
        } else {
          WarpOfFractions<kTops> warp;
          const float theta = estimate(rough, tops, warp);
          const auto sample = [&](auto use) {
#pragma unroll
            for (int j = 0; j < kVectors; ++j) use(z[j * kLength]);
          };
          if constexpr (kWarps == 1) {
            return theta_by_sample(rough, theta, tops, kLength, group, sample);
          } else {
            const float own[] = {max_in_word<T>(largest_word) - largest};
            return theta_by_sample(rough, theta, own, kLength, group, sample);
          }
        }
      };
      threshold = solve<float>(power, start_of, group, all, digits_wanted<T>(p));
    }
    const auto active = [&](float v) { return power.excess(v, threshold) > power.edge; };
    if (T* y = y_of_row()) {
      const auto output = power_of_output<T>(power);
      store_held<T, kThreads, kVectors>(
          y, length, thread, [&](int i) { return probability<T>(output, z[i], threshold); });
    }
    if constexpr (kFamily == Family::sparsemax) {
      if (uint8_t* support = support_of_row()) {
        store_held_bits<T, kThreads, kVectors>(support, p.support.axis, length, thread,
                                               [&](int i) { return active(z[i]); });
      }
    }
    finish(tau_of<decltype(power)>(p.alpha, largest, threshold),
           p.support_size.data ? count(active) : 0);
  }
}

// Rows are `length` elements, a multiple of the vector length, and begin at multiples of 16 bytes
// in x and y, where the axis has unit stride. No mask, no offsets, one alpha.
template <class T, Family kFamily, int kWarps, int kVectors>
void forward_registers(const ForwardParams& p) {
  __shared__ GroupScratch<kWarps> scratch;
  Group<kWarps> group(scratch);
  constexpr int kRows = kWarps == 1 ? kSingleWarps : 1;  // of a block
  const int length = static_cast<int>(p.rows.length);
  const T* x = static_cast<const T*>(p.x.data);
  int64_t row = static_cast<int64_t>(blockIdx.x) * kRows;
  if constexpr (kRows > 1) row += threadIdx.x / device::kWarpSize;
  if (row >= p.rows.count) return;
  Packed<T> held[kVectors];
  load_held<T, kWarps * device::kWarpSize>(held, x + row_offset(p.rows, p.x, row), length,
                                           group.thread());
  if constexpr (!walks_over_rows(kFamily, sizeof(T), kWarps)) {
    forward_held<T, kFamily>(p, row, held, group);
  } else {
    while (true) {
      const int64_t next_row = row + static_cast<int64_t>(gridDim.x) * kRows;
      Packed<T> next[kVectors];
      if (next_row < p.rows.count) {
        load_held<T, kWarps * device::kWarpSize>(next, x + row_offset(p.rows, p.x, next_row),
                                                 length, group.thread());
      }
      forward_held<T, kFamily>(p, row, held, group);
      if (next_row >= p.rows.count) return;
      row = next_row;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) held[j] = next[j];
    }
  }
}

}  // namespace pullback::entmax
