// Rows across memory that are too long for the registers of smxx_tile.cuh. Neighbouring threads
// take neighbouring rows, of 32 bytes in all, and read them more than once, from the second time on
// mostly from the second-level cache.
#pragma once

#include "device/float.cuh"
#include "ops/entmax/cuda/smxx_tile.cuh"

namespace pullback::entmax {

// A thread's elements of a row, every parts-th, of which some are asked for at a time.
template <class T>
class ColumnPart {
 public:
  static constexpr int kAtOnce = 4;

  ColumnPart(const RowTensor& tensor, int64_t offset, int part, int parts)
      : at_(static_cast<T*>(tensor.data) + offset + part * tensor.axis),
        step_(parts * static_cast<int>(tensor.axis)) {}

  // From number `first` of the thread's elements on; `hidden` where there is none.
  void load(float (&to)[kAtOnce], int first, int count, float hidden) const {
    T held[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k < count) held[k] = *at(first + k);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      to[k] = first + k < count ? device::to_real(held[k]) : hidden;
    }
  }
  void store(const float (&from)[kAtOnce], int first, int count) const {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k < count) *at(first + k) = device::from_real<T>(from[k]);
    }
  }

 private:
  T* at(int number) const { return at_ + int64_t{number} * step_; }

  T* at_;
  int step_;
};

// The row of a thread, and which of its elements are the thread's.
struct ColumnPlace {
  int64_t row;
  bool exists;
  int count;  // of the thread's elements
};
template <class Group>
ColumnPlace column_place(const Rows& rows, const TileShape& shape, const Group& group) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * shape.columns + group.row();
  const bool exists = row < rows.count;
  const int left = static_cast<int>(rows.length) - group.part();
  return {exists ? row : 0, exists, exists && left > 0 ? (left - 1) / group.parts() + 1 : 0};
}

}  // namespace pullback::entmax
