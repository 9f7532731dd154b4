// Constants that the host's choice of backward kernels and the kernels themselves share.
#pragma once

namespace pullback::entmax {

// smxx_backward_registers.cuh: rows of a block where a row takes a warp.
inline constexpr int kWarpRows = 8;

// smxx_backward_any.cuh: threads of a block, and rows of a block where neighbouring threads take
// neighbouring rows.
inline constexpr int kAnyThreads = 256;
inline constexpr int kAcrossRows = 32;
// Who works on a row there: the block, a warp of it, or every kAcrossRows-th thread of it, so that
// neighbouring threads take neighbouring rows, which are neighbours in memory where the axis is not
// the last one.
enum class Mapping { block, warp, across };
constexpr int rows_of_block(Mapping mapping) {
  return mapping == Mapping::block ? 1 : mapping == Mapping::warp ? kAnyThreads / 32 : kAcrossRows;
}

// sm90_backward_cluster.cuh: blocks of a cluster at most.
inline constexpr int kMaxCluster = 8;

// smxx_backward_stream.cuh: chunks of a row at most.
inline constexpr int kMaxChunks = 1024;

}  // namespace pullback::entmax
