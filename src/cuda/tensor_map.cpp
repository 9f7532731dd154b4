#include "cuda/tensor_map.hpp"

#include "cuda/driver.hpp"

namespace pullback::cuda {
namespace {

// CU_TENSOR_MAP_…
constexpr int kFloat16 = 6, kBfloat16 = 9;
constexpr int kNoInterleave = 0, kSwizzle128 = 3, kPromotion256 = 3, kFillZeros = 0;

constexpr std::int64_t kElementBytes = 2, kStrideUnit = 16;

// Of a dimension of one, nothing is ever reached by its stride.
std::int64_t stride_bytes(const TensorMapShape& shape, std::size_t dimension) {
  return shape.sizes[dimension] > 1 ? shape.strides[dimension - 1] * kElementBytes : kStrideUnit;
}

}  // namespace

bool has_tensor_map(const TensorMapShape& shape) {
  constexpr std::int64_t kMostSize = std::int64_t{1} << 31, kMostStride = std::int64_t{1} << 40;
  for (const std::int64_t size : shape.sizes) {
    if (size < 1 || size > kMostSize) return false;
  }
  for (std::size_t dimension = 1; dimension < shape.sizes.size(); ++dimension) {
    const std::int64_t stride = stride_bytes(shape, dimension);
    if (stride <= 0 || stride >= kMostStride || stride % kStrideUnit != 0) return false;
  }
  return shape.dtype == DType::f16 || shape.dtype == DType::bf16;
}

std::optional<device::TensorMap> tensor_map(const TensorMapShape& shape, const void* data) {
  std::uint64_t sizes[4], strides[3];
  for (std::size_t i = 0; i < 4; ++i) {
    sizes[i] = static_cast<std::uint64_t>(shape.sizes[i]);
    if (i > 0) strides[i - 1] = static_cast<std::uint64_t>(stride_bytes(shape, i));
  }
  const std::uint32_t box[4] = {static_cast<std::uint32_t>(shape.box_columns),
                                static_cast<std::uint32_t>(shape.box_rows), 1, 1};
  const std::uint32_t steps[4] = {1, 1, 1, 1};
  device::TensorMap map;
  const int dtype = shape.dtype == DType::f16 ? kFloat16 : kBfloat16;
  const CUresult result =
      driver().cuTensorMapEncodeTiled(&map, dtype, 4, const_cast<void*>(data), sizes, strides, box,
                                      steps, kNoInterleave, kSwizzle128, kPromotion256, kFillZeros);
  if (result != kSuccess) return std::nullopt;
  return map;
}

}  // namespace pullback::cuda
