// device/cluster.cuh on the host, where each block is a cluster of its own.
#pragma once

#include "device/shared.cuh"

namespace pullback::device {

inline uint32_t cluster_rank() { return 0; }
inline uint32_t cluster_size() { return 1; }
inline uint32_t cluster_index() { return blockIdx.x; }
inline uint32_t cluster_count() { return gridDim.x; }
inline void cluster_barrier() { __syncthreads(); }
inline void cluster_arrive() {}
inline void cluster_wait() { __syncthreads(); }

inline uint32_t remote_address(uint32_t local, uint32_t) { return local; }
inline uint32_t remote_address(const void* local, uint32_t) { return shared_address(local); }
inline uint32_t load_remote(uint32_t address) { return load_shared_word(address); }
inline void load_remote(float (&value)[4], uint32_t address) {
  memcpy(value, shared_pointer(address), sizeof value);
}
template <class T>
void store_remote(uint32_t address, T value) {
  memcpy(shared_pointer(address), &value, sizeof value);
}

}  // namespace pullback::device
