// The backward kernels: what there is, by the way a row is worked on, and how each is called.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/op_kernel.hpp"
#include "ops/entmax/cuda/backward_params.cuh"
#include "ops/entmax/cuda/backward_tuning.cuh"

namespace pullback::entmax {

using cuda::OpKernel;

inline constexpr std::string_view kWeightsNames[] = {"softmax", "sparsemax", "entmax15", "power",
                                                     "mask"};
inline constexpr Weights kAllWeights[] = {Weights::softmax, Weights::sparsemax, Weights::entmax15,
                                          Weights::power, Weights::mask};

// How a row is worked on.
enum class Path {
  warp2,  // in a warp's registers, 2 pieces a thread
  warp4,
  block,              // in a block's registers
  cluster_registers,  // in those of several; sm_90
  whole,              // a block, twice
  cluster,            // several blocks, twice; sm_90
  chunks,             // two kernels
  mask_rows,          // from the mask: several rows a warp
  mask_block,         // from the mask: a block a row
};
inline constexpr std::string_view kPathNames[] = {
    "a warp a row, in registers",
    "a warp a row, in registers",
    "a block a row, in registers",
    "a cluster of blocks a row, in registers",
    "a block a row, read twice, the second time from L2",
    "a cluster of blocks a row, read twice, the second time from L2",
    "chunks of rows over all blocks, two kernels",
    "several rows a warp",
    "a block a row"};
inline constexpr Path kAllPaths[] = {Path::warp2,  Path::warp4,     Path::block,
                                     Path::whole,  Path::cluster,   Path::cluster_registers,
                                     Path::chunks, Path::mask_rows, Path::mask_block};
inline constexpr int kBlockThreads = 512, kBlockPieces = kBlockVectors * kBlockThreads;

inline bool takes_clusters(Path path) {
  return path == Path::cluster || path == Path::cluster_registers;
}
inline bool serves_mask(Path path) { return path != Path::block && !takes_clusters(path); }

// Powers take long to compute: rows of clusters keep them, where 32 bits are enough.
inline bool serves_clusters_of_registers(DType dtype, Weights weights) {
  return weights == Weights::power && dtype != DType::f64;
}
// Of a block of cluster_registers at most. A piece of a 16-bit type takes twice the registers.
inline int cluster_registers_threads(DType dtype) { return dtype == DType::f32 ? 1024 : 512; }

// f64 has no use for kernels that save arithmetic, nor chunks for all formulas.
inline Weights served(Weights weights, Path path, DType dtype) {
  if (weights == Weights::mask || path == Path::mask_rows || path == Path::mask_block) {
    return Weights::mask;
  }
  if (dtype == DType::f64 || path == Path::chunks) return Weights::power;
  return weights;
}

inline std::string with_weights(std::string_view function, DType dtype, Weights weights,
                                std::string_view more = {}) {
  return fmt::format("entmax::{}<{}, entmax::Weights::{}{}>", function, cuda::device_type(dtype),
                     kWeightsNames[static_cast<int>(weights)], more);
}

inline OpKernel kernel_of(std::string_view what, std::string_view file, std::string function,
                          std::string_view variant, DType dtype, int threads, int blocks = 1,
                          std::vector<int> fewer_blocks_on = {}) {
  return {
      .name = fmt::format("entmax_backward_{}_{}_{}", what, variant, name_of(dtype)),
      .file = file,
      .function = std::move(function),
      .parameters = "entmax::BackwardParams",
      .threads = threads,
      .blocks = blocks,
      .fewer_blocks_on = std::move(fewer_blocks_on),
      .constants = {{"sizeof(entmax::RowTensor)", static_cast<std::int64_t>(sizeof(RowTensor))}}};
}

inline constexpr std::string_view kRegistersFile = "ops/entmax/cuda/smxx_backward_registers.cuh";
inline constexpr std::string_view kStreamFile = "ops/entmax/cuda/smxx_backward_stream.cuh";
inline constexpr std::string_view kClusterFile = "ops/entmax/cuda/sm90_backward_cluster.cuh";
inline constexpr std::string_view kMaskFile = "ops/entmax/cuda/smxx_backward_mask.cuh";
inline constexpr std::string_view kAnyFile = "ops/entmax/cuda/smxx_backward_any.cuh";
inline constexpr std::string_view kAlphaFile = "ops/entmax/cuda/smxx_backward_alpha.cuh";

// The kernels of a path; `weights` is served by it. Kernels in double need more registers, and so
// do those with powers that read rows twice and, less so, warps that hold powers; that of long rows
// for any mask makes way for mask_block.
inline std::vector<OpKernel> kernels_of(Path path, DType dtype, Weights weights) {
  const std::string_view name = kWeightsNames[static_cast<int>(weights)];
  const bool of_warp = path == Path::warp2 || path == Path::warp4;
  const bool twice = path == Path::whole || path == Path::cluster || path == Path::chunks;
  const bool wide = dtype == DType::f64 || (weights == Weights::mask && !of_warp) ||
                    (weights == Weights::power && twice);
  const int of_multiprocessor = wide ? 512 : of_warp && weights == Weights::power ? 768 : 1024;
  const auto make = [&](std::string_view what, std::string_view file, std::string_view function,
                        int threads, std::string_view more = {}) {
    return kernel_of(what, file, with_weights(function, dtype, weights, more), name, dtype, threads,
                     std::max(1, of_multiprocessor / threads),
                     twice && !wide ? std::vector{100, 120} : std::vector<int>{});
  };
  constexpr int kWarpThreads = kWarpRows * 32;
  const auto mask = [&](std::string_view what, int threads, int blocks) {
    return kernel_of(what, kMaskFile,
                     fmt::format("entmax::backward_{}<{}>", what, cuda::device_type(dtype)), "all",
                     dtype, threads, blocks);
  };
  switch (path) {
    case Path::warp2:
      return {make("warp2", kRegistersFile, "backward_registers", kWarpThreads,
                   ", 2, entmax::Group::warp")};
    case Path::warp4:
      return {make("warp4", kRegistersFile, "backward_registers", kWarpThreads,
                   ", 4, entmax::Group::warp")};
    case Path::block:
      return {make("block", kRegistersFile, "backward_registers", kBlockThreads,
                   ", entmax::kBlockVectors, entmax::Group::block")};
    case Path::cluster_registers:
      return {make("cluster_registers", kClusterFile, "backward_cluster_registers",
                   cluster_registers_threads(dtype))};
    case Path::whole:
      return {make("whole", kStreamFile, "backward_whole", kBlockThreads)};
    case Path::cluster:
      return {make("cluster", kClusterFile, "backward_cluster", kBlockThreads)};
    case Path::chunks:
      return {make("chunk_sums", kStreamFile, "backward_chunk_sums", kBlockThreads),
              make("chunk_gradients", kStreamFile, "backward_chunk_gradients", kBlockThreads)};
    case Path::mask_rows:
      return {mask("mask_rows", kWarpThreads, 4)};
    case Path::mask_block:
      return {mask("mask_block", kBlockThreads, 2)};
  }
  return {};
}

inline constexpr std::string_view kMappingNames[] = {"block", "warp", "lanes", "thread", "across"};
inline std::string_view name_of(Mapping mapping) {
  return kMappingNames[static_cast<int>(mapping)];
}

inline OpKernel any_kernel(DType dtype, bool wide, Mapping mapping) {
  const std::string_view real = wide || dtype == DType::f64 ? "double" : "float";
  return kernel_of("any", kAnyFile,
                   fmt::format("entmax::backward_any<{}, {}, entmax::Mapping::{}>",
                               cuda::device_type(dtype), real, name_of(mapping)),
                   fmt::format("{}_{}", real, name_of(mapping)), dtype, kAnyThreads);
}

inline OpKernel d_alpha_kernel(DType dtype, Mapping mapping) {
  return kernel_of("d_alpha", kAlphaFile,
                   fmt::format("entmax::backward_d_alpha<{}, entmax::Mapping::{}>",
                               cuda::device_type(dtype), name_of(mapping)),
                   name_of(mapping), dtype, kAnyThreads, 3);
}

inline OpKernel rest_kernel(DType dtype) {
  return kernel_of("rest", kAnyFile,
                   fmt::format("entmax::backward_rest<{}>", cuda::device_type(dtype)), "zeros",
                   dtype, kAnyThreads);
}

}  // namespace pullback::entmax
