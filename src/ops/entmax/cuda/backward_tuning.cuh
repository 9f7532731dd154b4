// Constants that the host's choice of backward kernels and the kernels themselves share.
#pragma once

namespace pullback::entmax {

// smxx_backward_registers.cuh: rows of a block where a row takes a warp.
inline constexpr int kWarpRows = 8;

// Pieces of a thread, where a row is in the registers of a block or of several.
inline constexpr int kBlockVectors = 4;

// smxx_any_row.cuh: threads of a block, and rows of a block where neighbouring threads take
// neighbouring rows.
inline constexpr int kAnyThreads = 256;
inline constexpr int kAcrossRows = 32;
// Who works on a row there: the block, a warp of it, four lanes of a warp, a thread, or every
// kAcrossRows-th thread of the block, so that neighbouring threads take neighbouring rows, which
// are neighbours in memory where the axis is not the last one.
enum class Mapping { block, warp, lanes, thread, across };
constexpr int threads_of_row(Mapping mapping) {
  switch (mapping) {
    case Mapping::block:
      return kAnyThreads;
    case Mapping::warp:
      return 32;
    case Mapping::lanes:
      return 4;
    case Mapping::thread:
      return 1;
    case Mapping::across:
      return kAnyThreads / kAcrossRows;
  }
  return 0;
}
constexpr int rows_of_block(Mapping mapping) { return kAnyThreads / threads_of_row(mapping); }

// sm90_backward_cluster.cuh: blocks of a cluster at most.
inline constexpr int kMaxCluster = 8;

// smxx_backward_stream.cuh: chunks of a row at most.
inline constexpr int kMaxChunks = 1024;

}  // namespace pullback::entmax
