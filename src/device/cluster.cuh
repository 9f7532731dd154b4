// Thread block clusters (sm_90): barriers, and access to another block's shared memory. Before
// sm_90 a block is a cluster of its own.
#pragma once

#include "device/types.cuh"

namespace pullback::device {

#if __CUDA_ARCH__ >= 900

inline uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

inline uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// The cluster's number in a grid along x, and how many there are.
inline uint32_t cluster_index() {
  uint32_t index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
inline uint32_t cluster_count() {
  uint32_t count;
  asm("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  return count;
}

// All threads of all blocks of the cluster; shared memory written before is seen by all after.
inline void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// Before the first store into another block's memory, that block must have started: every block
// arrives when it starts, and waits before it stores. Of memory it orders nothing but barriers
// behind barrier_init_fence(): what a release waits for, all earlier loads and stores, takes long.
inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address in block `rank` of what `local` is in this one, for load_remote and store_remote.
inline uint32_t remote_address(uint32_t local, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  return remote;
}
inline uint32_t remote_address(const void* local, uint32_t rank) {
  return remote_address(static_cast<uint32_t>(__cvta_generic_to_shared(local)), rank);
}

inline void load_remote(float (&value)[4], uint32_t address) {
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
               : "r"(address)
               : "memory");
}

inline uint32_t load_remote(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
inline void store_remote(uint32_t address, uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
inline void store_remote(uint32_t address, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
inline void store_remote(uint32_t address, double value) {
  asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(address), "d"(value) : "memory");
}

#else

inline uint32_t cluster_rank() { return 0; }
inline uint32_t cluster_size() { return 1; }
inline uint32_t cluster_index() { return blockIdx.x; }
inline uint32_t cluster_count() { return gridDim.x; }
inline void cluster_barrier() { __syncthreads(); }
inline uint32_t remote_address(uint32_t local, uint32_t) { return local; }
inline uint32_t remote_address(const void* local, uint32_t) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(local));
}
inline uint32_t load_remote(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
inline void load_remote(float (&value)[4], uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
               : "r"(address)
               : "memory");
}
inline void store_remote(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
inline void store_remote(uint32_t address, double value) {
  asm volatile("st.shared.f64 [%0], %1;" ::"r"(address), "d"(value) : "memory");
}

#endif

}  // namespace pullback::device
