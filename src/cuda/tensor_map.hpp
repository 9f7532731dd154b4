// Tensors as the copy engine of a device knows them (sm_90): boxes of them come to shared memory by
// device/boxes.cuh's load_box().
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "device/tensor_map.cuh"
#include "pullback/dtype.hpp"

namespace pullback::cuda {

// Of f16 or bf16; the first dimension is contiguous. A box has so many columns, 64 at most, and
// rows, 256 at most; what of it lies outside of the tensor becomes 0. In shared memory it is a
// panel of rows of 128 bytes, swizzled as device/wgmma.cuh wants it.
struct TensorMapShape {
  DType dtype;
  std::array<std::int64_t, 4> sizes;    // columns, rows, and two more
  std::array<std::int64_t, 3> strides;  // of all but the columns, in elements
  int box_columns, box_rows;
};

// Whether the copy engine can have it: strides that are multiples of 16 bytes, and not 0.
bool has_tensor_map(const TensorMapShape& shape);

// `data` is aligned to 16 bytes. Nothing where the driver refuses, as it may what is unusual.
std::optional<device::TensorMap> tensor_map(const TensorMapShape& shape, const void* data);

}  // namespace pullback::cuda
