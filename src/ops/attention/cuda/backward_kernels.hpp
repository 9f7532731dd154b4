// The kernels of the backward pass on tensor cores.
#pragma once

#include <fmt/format.h>

#include <vector>

#include "ops/attention/cuda/backward_body.hpp"
#include "ops/attention/cuda/sm90_backward_tuning.cuh"

namespace pullback::attention {

inline constexpr std::string_view kBackwardFeatureNames[] = {
    "plain", "dropout", "blocks", "general", "general_blocks", "bias", "bias_sum"};
inline constexpr std::string_view kFeatureSuffix[] = {
    "", "_dropout", "_blocks", "_general", "_general_blocks", "_biased", "_bias_sum"};

inline cuda::OpKernel prepare_kernel(DType dtype, const BackwardTiles& tiles) {
  const std::string_view type = cuda::device_type(dtype);
  return {
      .name = fmt::format("attention_backward_prepare_{}_{}_{}", type, tiles.queries, tiles.keys),
      .file = "ops/attention/cuda/smxx_backward_rows.cuh",
      .function =
          fmt::format("attention::backward_prepare<{}, {}, {}>", type, tiles.queries, tiles.keys),
      .parameters = kBackwardParams,
      .threads = kRowThreads,
      .blocks = 4};
}

inline BackwardTiles tiles_of(DType dtype, int width, int arch, bool small_blocks = false) {
  return dtype == DType::f32 ? split_tiles(width, arch) : backward_tiles(width, arch, small_blocks);
}

inline int tensor_core_width(const AttentionProblem& problem) {
  const int width = head_width(static_cast<int>(sizes_of(problem).head_dim),
                               static_cast<int>(sizes_of(problem).value_dim));
  return problem.q.dtype == DType::f32 ? split_width(width) : width;
}

struct TileKernel {
  cuda::OpKernel kernel;
  int shared_bytes;
};

inline TileKernel tile_kernel(DType dtype, int width, Features features, int arch,
                              bool small_blocks = false) {
  const std::string_view type = cuda::device_type(dtype);
  const bool split = dtype == DType::f32, bias = !split && has_bias(features);
  BackwardTiles tiles = tiles_of(dtype, width, arch, small_blocks);
  const bool own = small_blocks && tiles.keys != tiles_of(dtype, width, arch).keys;
  const bool written = features == Features::bias, sums = features == Features::bias_sum;
  if (bias) tiles = with_bias(tiles, width, arch, written, sums);
  const int feature = static_cast<int>(features);
  return {{.name = fmt::format("attention_backward_{}_{}{}{}", type, width, kFeatureSuffix[feature],
                               own ? "_small" : ""),
           .file = split ? "ops/attention/cuda/smxx_backward_split.cuh"
                         : "ops/attention/cuda/smxx_backward.cuh",
           .function = fmt::format("attention::{}{}, attention::BackwardTiles{{{}, {}, {}, {}, {}, "
                                   "{}}}, attention::Features::{}>",
                                   split ? "split_backward<" : fmt::format("backward<{}, ", type),
                                   width, tiles.keys, tiles.queries, tiles.split, tiles.stages,
                                   tiles.blocks, tiles.query_rows, kBackwardFeatureNames[feature]),
           .parameters = kBackwardParams,
           .threads = tiles.threads(),
           .blocks = tiles.blocks},
          tiles.shared_bytes(width, static_cast<int>(size_of(dtype)), bias)};
}

inline constexpr std::string_view kHopperBackwardKindNames[] = {
    "plain",    "softcap",      "dropout",          "bias",
    "bias_sum", "bias_dropout", "bias_sum_dropout", "blocks"};

inline TileKernel hopper_backward_kernel(DType dtype, HopperBackwardKind kind, int width) {
  const std::string_view type = cuda::device_type(dtype);
  const std::string_view kind_name = kHopperBackwardKindNames[static_cast<int>(kind)];
  const HopperBackwardTile tile = hopper_backward_tile(kind, width);
  return {{.name = fmt::format("attention_backward_sm90_{}_{}_{}", type, width, kind_name),
           .file = tile.wide() ? "ops/attention/cuda/sm90_backward_wide.cuh"
                               : "ops/attention/cuda/sm90_backward.cuh",
           .function = fmt::format(
               "attention::hopper_{}backward<{}, "
               "attention::hopper_backward_tile(attention::HopperBackwardKind::{}, {})>",
               tile.wide() ? "wide_" : "", type, kind_name, width),
           .parameters = kHopperBackwardParams,
           .threads = tile.threads(),
           .arch_specific = true},
          tile.shared_bytes()};
}

// f32: a block for each element of the bias.
inline cuda::OpKernel bias_kernel(DType dtype, int width, int arch) {
  const std::string_view type = cuda::device_type(dtype);
  const int stats_rows = tiles_of(dtype, width, arch).queries;
  if (dtype == DType::f32) {
    return {.name = fmt::format("attention_backward_bias_{}_{}", type, stats_rows),
            .file = "ops/attention/cuda/smxx_backward_plain.cuh",
            .function = fmt::format("attention::plain_bias<{}, {}>", type, stats_rows),
            .parameters = kBackwardParams,
            .threads = kPlainThreads};
  }
  const BiasTiles tiles = bias_tiles(width, arch);
  return {.name = fmt::format("attention_backward_bias_{}_{}", type, width),
          .file = "ops/attention/cuda/smxx_backward_bias.cuh",
          .function = fmt::format("attention::bias_gradient<{}, {}, {}, {}, {}, {}>", type, width,
                                  tiles.keys, tiles.queries, tiles.side, stats_rows),
          .parameters = kBackwardParams,
          .threads = tiles.threads()};
}

inline cuda::OpKernel hopper_bias_kernel(DType dtype, const HopperBiasTile& tile, int width,
                                         int arch) {
  const std::string_view type = cuda::device_type(dtype);
  const int stats_rows = tiles_of(dtype, width, arch).queries;
  return {.name = fmt::format("attention_backward_bias_sm90_{}_{}_{}{}", type, tile.width,
                              stats_rows, tile.dropout ? "_dropout" : ""),
          .file = "ops/attention/cuda/sm90_bias_gradient.cuh",
          .function = fmt::format("attention::hopper_bias_gradient<{}, "
                                  "attention::hopper_bias_tile({}, {}), {}>",
                                  type, tile.width, tile.dropout, stats_rows),
          .parameters = kBackwardParams,
          .threads = tile.threads,
          .arch_specific = true};
}

// `what` is clear_bias or combine_bias.
inline cuda::OpKernel bias_helper(DType dtype, std::string_view what) {
  const std::string_view type = cuda::device_type(dtype);
  return {.name = fmt::format("attention_backward_{}_{}", what, type),
          .file = "ops/attention/cuda/smxx_backward_bias.cuh",
          .function = fmt::format("attention::{}<{}>", what, type),
          .parameters = kBackwardParams,
          .threads = kRowThreads};
}

// All of them.
inline std::vector<cuda::KernelSource> backward_kernels(int arch) {
  std::vector<cuda::KernelSource> kernels;
  const auto add = [&](const cuda::OpKernel& kernel) {
    for (const cuda::KernelSource& other : kernels) {
      if (other.name == kernel.name) return;  // widths that share their tiles
    }
    kernels.push_back(cuda::op_kernel<BackwardParams>(kernel, arch));
  };
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const int width : kHeadWidths) {
      if (dtype == DType::f32 &&
          (split_width(width) != width || split_tiles(width, arch).keys == 0)) {
        continue;
      }
      for (const bool small_blocks : {false, true}) {
        add(prepare_kernel(dtype, tiles_of(dtype, width, arch, small_blocks)));
        for (const Features features : kBackwardFeatures) {
          if (dtype == DType::f32 && has_own_bias(features)) continue;
          if (small_blocks && !has_blocks(features)) continue;
          add(tile_kernel(dtype, width, features, arch, small_blocks).kernel);
        }
      }
      add(bias_kernel(dtype, width, arch));
      if (arch == 90 && has_hopper_bias_tile(width, static_cast<int>(size_of(dtype)))) {
        for (const bool dropout : {false, true}) {
          add(hopper_bias_kernel(dtype, hopper_bias_tile(width, dropout), width, arch));
        }
      }
      for (const HopperBackwardKind kind : kHopperBackwardKinds) {
        if (arch != 90) continue;
        if (!has_hopper_backward_tile(kind, width, static_cast<int>(size_of(dtype)))) continue;
        kernels.push_back(cuda::op_kernel<HopperBackwardParams>(
            hopper_backward_kernel(dtype, kind, width).kernel, arch));
      }
    }
    add(bias_helper(dtype, "clear_bias"));
    if (dtype != DType::f32) add(bias_helper(dtype, "combine_bias"));
  }
  return kernels;
}

}  // namespace pullback::attention
