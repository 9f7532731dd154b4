// The kernels of the forward pass.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <vector>

#include "cuda/op_kernel.hpp"
#include "ops/attention/cuda/sm90_forward_params.cuh"
#include "ops/attention/cuda/tuning.hpp"

namespace pullback::attention {

inline int element_bytes(DType dtype) { return static_cast<int>(size_of(dtype)); }

inline constexpr std::string_view kForwardKindNames[] = {"plain",        "blocks",  "large_blocks",
                                                         "softcap",      "dropout", "bias",
                                                         "bias_dropout", "terms",   "elements"};

inline bool has_hopper_kernel(DType dtype, int width, ForwardKind kind) {
  return has_hopper_tile(kind, width, element_bytes(dtype));
}

inline cuda::OpKernel forward_kernel(DType dtype, int width, ForwardKind kind, int arch) {
  const std::string_view type = cuda::device_type(dtype);
  const std::string_view kind_name = kForwardKindNames[static_cast<int>(kind)];
  const ForwardTile tile = forward_tile(width, element_bytes(dtype), kind, arch);
  const std::string kind_value = fmt::format("attention::ForwardKind::{}", kind_name);
  return {
      .name = fmt::format("attention_forward_{}_{}_{}", type, width, kind_name),
      .file = "ops/attention/cuda/smxx_forward.cuh",
      .function = fmt::format("attention::forward<{}, attention::forward_tile({}, {}, {}, {}), {}>",
                              type, width, element_bytes(dtype), kind_value, arch, kind_value),
      .parameters = "attention::ForwardParams",
      .threads = tile.warps * 32,
      .blocks = tile.blocks};
}

inline cuda::OpKernel hopper_forward_kernel(DType dtype, int width, ForwardKind kind) {
  const std::string_view type = cuda::device_type(dtype);
  const std::string_view kind_name = kForwardKindNames[static_cast<int>(kind)];
  const HopperTile tile = hopper_tile(kind, width);
  return {
      .name = fmt::format("attention_forward_sm90_{}_{}_{}", type, width, kind_name),
      .file = "ops/attention/cuda/sm90_forward.cuh",
      .function = fmt::format(
          "attention::hopper_forward<{}, attention::hopper_tile(attention::ForwardKind::{}, {})>",
          type, kind_name, width),
      .parameters = "attention::HopperForwardParams",
      .threads = tile.threads(),
      .blocks = tile.resident,
      .arch_specific = true};
}

inline cuda::OpKernel plain_forward_kernel() {
  return {.name = "attention_forward_double",
          .file = "ops/attention/cuda/smxx_plain_forward.cuh",
          .function = "attention::forward_plain<double>",
          .parameters = "attention::ForwardParams",
          .threads = kPlainWarps * 32,
          .constants = {{"attention::kPlainRows", kPlainRows}}};
}

// All of them.
inline std::vector<cuda::KernelSource> forward_kernels(int arch) {
  std::vector<cuda::KernelSource> kernels = {
      cuda::op_kernel<ForwardParams>(plain_forward_kernel(), arch)};
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const int width : kHeadWidths) {
      for (const ForwardKind kind : kForwardKinds) {
        if (!has_kind(kind, width, element_bytes(dtype))) continue;
        kernels.push_back(
            cuda::op_kernel<ForwardParams>(forward_kernel(dtype, width, kind, arch), arch));
      }
    }
  }
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const int width : kHeadWidths) {
      for (const ForwardKind kind : kForwardKinds) {
        if (arch != 90 || !has_hopper_kernel(dtype, width, kind)) continue;
        kernels.push_back(
            cuda::op_kernel<HopperForwardParams>(hopper_forward_kernel(dtype, width, kind), arch));
      }
    }
  }
  return kernels;
}

}  // namespace pullback::attention
