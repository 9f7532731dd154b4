// Constants that the host's choice of backward kernels and the kernels themselves share.
#pragma once

namespace pullback::entmax {

// smxx_backward_registers.cuh: rows of a block where a row takes a warp.
inline constexpr int kWarpRows = 8;

// smxx_backward_any.cuh: threads of a block, and rows of a block where neighbouring threads take
// neighbouring rows.
inline constexpr int kAnyThreads = 256;
inline constexpr int kAcrossRows = 32;

// sm90_backward_cluster.cuh: blocks of a cluster at most.
inline constexpr int kMaxCluster = 8;

// smxx_backward_stream.cuh: chunks of a row at most.
inline constexpr int kMaxChunks = 1024;

}  // namespace pullback::entmax
