// Constants that the host plans with and the kernels are compiled with. Plain C++20.
#pragma once

namespace pullback::block_softmax {

inline constexpr int kThreads = 256;  // of a thread block
inline constexpr int kWarps = kThreads / 32;

// 16-byte vectors of each tensor that a thread of the kernels in smxx_rows.cuh holds in registers.
inline constexpr int kForwardVectors = 8;
inline constexpr int kBackwardVectors = 8;

// The kernels of smxx_ring.cuh: threads of a block, rows that it takes at a time, and the 16-byte
// places that each thread has in shared memory. The first number leaves room for two blocks on a
// multiprocessor of sm_90, the second takes what a single block can have there.
inline constexpr int kRingThreads = 512;
inline constexpr int kRingWarps = kRingThreads / 32;
inline constexpr int kRingRows = 4;
inline constexpr int kRingPlaces[] = {12, 28};

// Vectors (or elements) of a row that decide which team of smxx_stream.cuh takes it.
inline constexpr int kStreamVectors = 16;

// Rows of a block that a thread block of the gradients of rpe and attn_mask sums at a time.
inline constexpr int kStripRows = 16;
inline constexpr int kMaxBlock = 128;
// Blocks of a block column whose rows one thread block sums up for d_key_padding_mask.
inline constexpr int kColumnChunk = 16;

}  // namespace pullback::block_softmax
