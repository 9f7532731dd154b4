// Rows of any layout for the backward kernels: which threads share one (Mapping), where it lies,
// and s of its elements.
#pragma once

#include "ops/entmax/cuda/backward_slice.cuh"
#include "ops/entmax/cuda/backward_tuning.cuh"

namespace pullback::entmax {

template <Mapping kMapping>
struct RowThreads {
  // Of one warp, who need no others.
  static constexpr bool kLanes = kMapping != Mapping::block && kMapping != Mapping::across;
  static constexpr int kRows = rows_of_block(kMapping);
  static constexpr int kThreads = threads_of_row(kMapping);
  static constexpr int kScratch = kLanes ? 1 : kAnyThreads;

  static int row() { return static_cast<int>(threadIdx.x) / (kLanes ? kThreads : 1) % kRows; }
  static int thread() {
    return kLanes ? static_cast<int>(threadIdx.x) % kThreads
                  : static_cast<int>(threadIdx.x) / kRows;
  }

  // The sum over a row's threads, on all of them. All threads of the block take part, or of the
  // warp. `scratch`: kScratch numbers.
  template <class R>
  static R sum(R value, R* scratch) {
    if constexpr (kLanes) {
#pragma unroll
      for (int step = kThreads / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(kAllLanes, value, step);
      }
      return value;
    }
    __syncthreads();
    R result = 0;
    if constexpr (kMapping == Mapping::block) {
      const R of_warp = warp_sum(value);
      if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = of_warp;
      __syncthreads();
      for (int i = 0; i < kAnyThreads / kWarpSize; ++i) result += scratch[i];
    } else {
      scratch[threadIdx.x] = value;
      __syncthreads();
      for (int i = 0; i < kThreads; ++i) result += scratch[i * kRows + row()];
    }
    return result;
  }
  // The largest, which is not negative, likewise; not of lanes and threads.
  template <class R>
  static R largest(R value, R* scratch) {
    if constexpr (kLanes) return warp_max(value);
    __syncthreads();
    scratch[threadIdx.x] = value;
    __syncthreads();
    R result = 0;
    for (int i = 0; i < kThreads; ++i) result = max(result, scratch[i * kRows + row()]);
    return result;
  }
};

// One row in global memory; positions count from its first element.
template <class T>
struct AnyRow {
  const T* y = nullptr;
  const uint8_t* bits = nullptr;  // instead of y
  const T* d_y;
  T* d_x;
  int64_t y_step, bits_step, d_y_step, d_x_step;

  AnyRow(const BackwardParams& p, const RowPlace& place) {
    const auto at = [&](const RowTensor& tensor) {
      return row_offset(p.rows, tensor, place.row) + place.begin * tensor.axis;
    };
    if (p.y.data) {
      y = static_cast<const T*>(p.y.data) + at(p.y);
    } else {
      bits = static_cast<const uint8_t*>(p.support.data) + row_offset(p.rows, p.support, place.row);
    }
    d_y = static_cast<const T*>(p.d_y.data) + at(p.d_y);
    d_x = static_cast<T*>(p.d_x.data) + at(p.d_x);
    y_step = p.y.axis;
    bits_step = p.support.axis;
    d_y_step = p.d_y.axis;
    d_x_step = p.d_x.axis;
  }

  template <class R>
  R s(int64_t i, double alpha) const {
    if (bits) return static_cast<R>(bits[(i >> 3) * bits_step] >> (i & 7) & 1);
    const R value = static_cast<R>(to_real(y[i * y_step]));
    return slope<T, Weights::power>(value, alpha);
  }
};

template <class T>
RowPlace any_place(const BackwardParams& p, int64_t task) {
  RowPlace place = place_of<T, Weights::power>(p, task);
  place.nan = !(place.alpha >= 1 && place.alpha < infinity<double>());
  if (p.support_size.data) {
    const auto* sizes = static_cast<const int32_t*>(p.support_size.data);
    place.nan = sizes[row_offset(p.rows, p.support_size, place.row)] < 0;
  }
  return place;
}

}  // namespace pullback::entmax
