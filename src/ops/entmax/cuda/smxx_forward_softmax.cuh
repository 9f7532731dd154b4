// The softmax of contiguous rows of any length, by a block: it reads x twice, once for the maximum
// and the sum of exp, which is rescaled whenever a lane's maximum grows, and once to write y.
#pragma once

#include "ops/entmax/cuda/smxx_edge.cuh"
#include "ops/entmax/cuda/smxx_forward_any.cuh"
#include "ops/entmax/cuda/smxx_vector.cuh"

namespace pullback::entmax {

// exp(x) for x <= 0: one rounding of x log2(e), and 2 ulp.
inline float exp_of_negative(float x) { return exp2f(x * 1.44269504f); }

// Rows as for forward_registers.
template <class T, bool kEdges = false>
void forward_softmax(const ForwardParams& p) {
  using device::infinity;
  constexpr int kLength = device::kVectorLength<T>;
  constexpr int kStep = kSoftmaxWarps * device::kWarpSize * kLength;
  __shared__ GroupScratch<kSoftmaxWarps> scratch;
  Group<kSoftmaxWarps> group(scratch);
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x.data) + row_offset(p.rows, p.x, row);
  T* y = p.y.data ? static_cast<T*>(p.y.data) + row_offset(p.rows, p.y, row) : nullptr;
  const auto whole_row = static_cast<int>(p.rows.length);
  const int thread = static_cast<int>(threadIdx.x);
  const float edge = load_edge<T, kEdges>(x, whole_row, thread);
  const RowSpan<T, kEdges> span(x, whole_row);
  const int64_t length = span.whole;  // of the vectors
  x += span.head;
  const int64_t start = static_cast<int64_t>(threadIdx.x) * kLength;

  // Calls use(vectors, how many of them lie in the row, position of the first).
  const auto for_each_tile = [&](auto use) {
    for (int64_t at = start; at < length; at += kSoftmaxVectors * kStep) {
      Words tile[kSoftmaxVectors];
#pragma unroll
      for (int j = 0; j < kSoftmaxVectors; ++j) {
        if (at + j * kStep < length) {
          tile[j] = load_words(x + at + j * kStep);
        } else {
#pragma unroll
          for (int w = 0; w < 4; ++w) tile[j].element[w] = kHiddenWord<T>;
        }
      }
      use(tile, at);
    }
  };
  const auto for_each_element = [](const Words& vector, auto use) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float element[kPerWord<T>];
      unpack<T>(vector.element[w], element);
#pragma unroll
      for (int k = 0; k < kPerWord<T>; ++k) use(element[k], w * kPerWord<T> + k);
    }
  };

  float own = edge;
  double sum = edge > -infinity<float>() ? 1 : 0, size = sum;
  for_each_tile([&](const Words(&tile)[kSoftmaxVectors], int64_t) {
    uint32_t top = max_of<T>(tile[0]);
#pragma unroll
    for (int j = 1; j < kSoftmaxVectors; ++j) top = max_of_words<T>(top, max_of<T>(tile[j]));
    const float largest = max_or_nan(own, max_in_word<T>(top));
    if (largest > own && own > -infinity<float>()) {
      sum *= static_cast<double>(exp_of_negative(own - largest));
    }
    own = largest;
    if (own == -infinity<float>()) return;
    float part = 0;
#pragma unroll
    for (int j = 0; j < kSoftmaxVectors; ++j) {
      for_each_element(tile[j], [&](float v, int) { part += exp_of_negative(v - own); });
    }
    sum += static_cast<double>(part);
    if (p.support_size.data == nullptr) return;
    int count = 0;
#pragma unroll
    for (int j = 0; j < kSoftmaxVectors; ++j) {
      for_each_element(tile[j], [&](float v, int) { count += v > -infinity<float>(); });
    }
    size += count;
  });
  const float largest = group.max(own);
  float tau, scale = 0;
  if (magnitude(largest) < infinity<float>()) {
    if (own > -infinity<float>()) sum *= static_cast<double>(exp_of_negative(own - largest));
    group.sum(sum, size);
    scale = static_cast<float>(1 / sum);
    tau = static_cast<float>(static_cast<double>(largest) + log(sum));
  } else {
    const bool empty = largest < 0;
    scale = empty ? 0 : device::quiet_nan<float>();
    tau = empty ? infinity<float>() : scale;
    size = empty ? 0 : -1;
  }
  if (threadIdx.x == 0) {
    if (p.tau.data) static_cast<float*>(p.tau.data)[row_offset(p.rows, p.tau, row)] = tau;
    if (p.support_size.data) {
      static_cast<int32_t*>(p.support_size.data)[row_offset(p.rows, p.support_size, row)] =
          static_cast<int>(min(size, 2147483647.0));
    }
  }
  if (!y) return;
  const bool degenerate = !(magnitude(largest) < infinity<float>());
  const auto value_of = [&](float v) {
    return degenerate ? scale : scale * exp_of_negative(v - largest);
  };
  store_edge<T, kEdges>(y, whole_row, thread, [&] { return value_of(edge); });
  y += span.head;
  for_each_tile([&](const Words(&tile)[kSoftmaxVectors], int64_t at) {
#pragma unroll
    for (int j = 0; j < kSoftmaxVectors; ++j) {
      if (at + j * kStep >= length) break;
      float value[kLength];
      for_each_element(tile[j], [&](float v, int i) { value[i] = value_of(v); });
      Words packed;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float word[kPerWord<T>];
#pragma unroll
        for (int k = 0; k < kPerWord<T>; ++k) word[k] = value[w * kPerWord<T> + k];
        packed.element[w] = pack<T>(word);
      }
      store_words(y + at + j * kStep, packed);
    }
  });
}

}  // namespace pullback::entmax
