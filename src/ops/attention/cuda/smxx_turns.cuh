// Sums in global memory that blocks add to in turns, and the counters they tell each other by.
#pragma once

#include "device/types.cuh"

namespace pullback::attention {

inline int32_t load_relaxed(const int32_t* from) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
inline void store_relaxed(int32_t* to, int32_t value) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
inline void raise_relaxed(int32_t* to, int32_t value) {
  asm volatile("red.relaxed.gpu.global.max.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
// What this thread saw or, before a barrier, its block wrote comes before what follows.
inline void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// 16 bytes, past the first-level cache, which does not see what other blocks write.
inline void store_past_l1(float* to, const float (&value)[4]) {
  asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value[0]),
               "f"(value[1]), "f"(value[2]), "f"(value[3])
               : "memory");
}
inline void load_past_l1(float (&value)[4], const float* from) {
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
               : "l"(from)
               : "memory");
}
// Nobody else adds meanwhile: the order of the sum is that of the turns.
#if __CUDA_ARCH__ >= 900
inline constexpr bool kAddsInMemory = true;
inline void add_in_memory(float* to, const float (&value)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value[0]),
               "f"(value[1]), "f"(value[2]), "f"(value[3])
               : "memory");
}
#else
inline constexpr bool kAddsInMemory = false;
inline void add_in_memory(float* to, const float (&value)[4]) {
  float sum[4];
  load_past_l1(sum, to);
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] += value[i];
  store_past_l1(to, sum);
}
#endif

// Threads of a block that work together: all of them.
struct AllThreads {
  int number() const { return static_cast<int>(threadIdx.x); }
  void meet() const { __syncthreads(); }
};

// Parts of a work that blocks add up one after the other: waits until `part` of them have, and
// tells that one more has. By all of `threads`.
template <class Threads = AllThreads>
void await_parts(const int32_t* done, int32_t part, const Threads& threads = {}) {
  if (threads.number() == 0) {
    while (load_relaxed(done) < part) {
    }
    fence_device();
  }
  threads.meet();
}
template <class Threads = AllThreads>
void end_part(int32_t* done, int32_t part, const Threads& threads = {}) {
  threads.meet();
  if (threads.number() == 0) {
    fence_device();
    store_relaxed(done, part + 1);
  }
}

// Into the second-level cache.
inline void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
// By all threads.
template <int kThreads>
void prefetch_bytes(const void* from, int bytes) {
  for (int at = static_cast<int>(threadIdx.x) * 128; at < bytes; at += kThreads * 128) {
    prefetch(static_cast<const char*>(from) + at);
  }
}

}  // namespace pullback::attention
