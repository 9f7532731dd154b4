// Tensors [B,S,H,width] as the copy engine knows them, for the kernels on Hopper.
#pragma once

#include <array>
#include <optional>

#include "cuda/tensor_map.hpp"
#include "ops/attention/cuda/sequences.hpp"
#include "ops/attention/cuda/sm90_forward_params.cuh"

namespace pullback::attention {

// Of a tensor of 16 bits. None if rows of a head do not all begin alike, or a tile of this width
// has no columns to spare.
inline HalfSectors half_sectors(const HeadRows& tensor, int columns, int tile_width) {
  constexpr std::int64_t kColumns = HalfSectors::kColumns;
  if (tensor.row % (2 * kColumns) != 0 || columns + kColumns > tile_width) return {};
  const auto is_odd = [](std::int64_t elements) {
    return static_cast<std::int32_t>(elements / kColumns % 2 != 0);
  };
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor.data));
  return {is_odd(address / 2), is_odd(tensor.head), is_odd(tensor.batch)};
}

// All of them or none: a tensor may have strides that the engine cannot take, and it cannot know
// where packed sequences end.
template <std::size_t kTensors>
class HeadMaps {
 public:
  struct Tensor {
    const TensorSpec& spec;
    int box_rows;  // a box is so many of a head, and 64 columns
  };

  HeadMaps() = default;
  explicit HeadMaps(const std::array<Tensor, kTensors>& tensors) : exist_(true) {
    for (std::size_t i = 0; i < kTensors; ++i) {
      const TensorSpec& spec = tensors[i].spec;
      if (spec.rank != 4) {
        exist_ = false;
        return;
      }
      const HeadRows rows = head_rows(spec);
      shapes_[i] = {spec.dtype,
                    {spec.shape[3], spec.shape[1], spec.shape[2], spec.shape[0]},
                    {rows.row, rows.head, rows.batch},
                    64,
                    tensors[i].box_rows};
      exist_ = exist_ && cuda::has_tensor_map(shapes_[i]);
    }
  }

  bool exist() const { return exist_; }
  // For the tensors of a run, in the same order.
  std::optional<std::array<device::TensorMap, kTensors>> of_run(
      const std::array<const void*, kTensors>& data) const {
    if (!exist_) return std::nullopt;
    std::array<device::TensorMap, kTensors> maps;
    for (std::size_t i = 0; i < kTensors; ++i) {
      const auto map = cuda::tensor_map(shapes_[i], data[i]);
      if (!map) return std::nullopt;
      maps[i] = *map;
    }
    return maps;
  }

 private:
  bool exist_ = false;
  std::array<cuda::TensorMapShape, kTensors> shapes_{};
};

}  // namespace pullback::attention
