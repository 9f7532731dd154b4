// Constants that the host plans with and the kernels are compiled with. Plain C++20.
#pragma once

namespace pullback::block_softmax {

inline constexpr int kThreads = 256;  // of a thread block
inline constexpr int kWarps = kThreads / 32;

// 16-byte vectors of each tensor that a thread of the kernels in smxx_rows.cuh holds in registers,
// and the blocks a multiprocessor is to hold: they bound the registers of a thread.
struct Registers {
  int vectors, blocks;
};
inline constexpr Registers forward_registers(int element_bytes, bool terms) {
  if (terms) return element_bytes == 4 ? Registers{3, 4} : Registers{3, 3};
  return element_bytes == 4   ? Registers{8, 4}
         : element_bytes == 2 ? Registers{6, 5}
                              : Registers{4, 3};
}
inline constexpr Registers backward_registers(int element_bytes) {
  return element_bytes == 8 ? Registers{4, 3} : Registers{6, 3};
}

// The kernels of smxx_ring.cuh: threads of a block, rows that it takes at a time, vectors of a
// batch, and batches in the ring of a thread. The first number leaves room for two blocks on a
// multiprocessor of sm_90, the second takes what a single block can have there.
inline constexpr int kRingThreads = 384;
inline constexpr int kRingWarps = kRingThreads / 32;
inline constexpr int kRingRows = 4;
inline constexpr int kRingBatch = 4;
inline constexpr int kRings[] = {4, 9};
// Blocks of a cluster that share rows which no single block holds.
inline constexpr int kRingCluster = 8;

// Vectors (or elements) of a row that decide which team of smxx_stream.cuh takes it.
inline constexpr int kStreamVectors = 16;

// Blocks of a block column whose rows one thread block sums up for d_key_padding_mask.
inline constexpr int kColumnChunk = 16;

}  // namespace pullback::block_softmax
