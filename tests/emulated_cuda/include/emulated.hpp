// What every kernel is compiled with on the host, before anything else: the names that CUDA C++ has
// without a header, and blocks of threads. Each thread of a block is a context of its own; they run
// one at a time, until each waits for the others of its warp or of its block. Blocks run one after
// the other, in order.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulated {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

// What the driver knows of a launch.
struct Launch {
  Dim grid, block;
  unsigned shared_bytes;
  void** parameters;
};

// What a kernel's shared object has for the driver.
struct Kernel {
  void (*run)(const Launch&);
  unsigned parameter_bytes;
};

struct Copy {
  void* to;
  const void* from;
  int bytes, of;  // zeros behind the first `bytes`
};

struct Thread {
  enum State { runs, waits_for_warp, waits_for_block, ended };
  ucontext_t context;
  std::vector<char> stack;
  void* fake_stack = nullptr;
  Dim index;
  State state;
  unsigned exchanges;                     // of the warp, so far
  uint64_t value;                         // that the block looks at
  std::vector<std::vector<Copy>> copies;  // groups that are not waited for; the last is open
};

inline constexpr int kWarp = 32;
inline constexpr unsigned kMostThreads = 1024;
// Of dynamic shared memory; behind it the pages of another thread would come.
inline constexpr unsigned kMostShared = 227 * 1024;

inline std::vector<Thread> threads;
inline Thread* current;
inline Dim block_index, block_size, grid_size;
inline ucontext_t scheduler;
inline void* scheduler_fake_stack;
inline uint64_t exchanged[kMostThreads / kWarp][2][kWarp];
inline uint64_t block_value;
inline void (*kernel)(void** parameters);  // with its parameters
inline void** kernel_parameters;

// nvrtc.cpp makes pointers to it of arrays of dynamic shared memory.
alignas(1024) inline thread_local unsigned char dynamic_memory[kMostShared];
inline unsigned char* dynamic_shared() { return dynamic_memory; }
inline unsigned dynamic_bytes;
// Where what has a 32-bit address begins (device/shared.cuh); 0: not yet used by the launch.
inline uintptr_t shared_regions[4];

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "emulated CUDA: %s, in block %u %u, thread %u\n", what, block_index.x,
          block_index.y, current != nullptr ? current->index.x : 0);
  abort();
}

inline void start_switch([[maybe_unused]] void** save, [[maybe_unused]] const void* stack,
                         [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(save, stack, bytes);
#endif
}
inline void finish_switch([[maybe_unused]] void* saved) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(saved, nullptr, nullptr);
#endif
}

inline void wait(Thread::State state) {
  Thread* const self = current;
  self->state = state;
  start_switch(&self->fake_stack, scheduler.uc_stack.ss_sp, scheduler.uc_stack.ss_size);
  swapcontext(&self->context, &scheduler);
  finish_switch(self->fake_stack);
}

inline void run_thread() {
  finish_switch(nullptr);
  kernel(kernel_parameters);
  current->state = Thread::ended;
  start_switch(nullptr, scheduler.uc_stack.ss_sp, scheduler.uc_stack.ss_size);
  setcontext(&scheduler);
}

inline void resume(Thread& thread) {
  current = &thread;
  start_switch(&scheduler_fake_stack, thread.stack.data(), thread.stack.size());
  swapcontext(&scheduler, &thread.context);
  finish_switch(scheduler_fake_stack);
}

inline void run_block() {
  for (Thread& thread : threads) {
    thread.state = Thread::runs;
    thread.exchanges = 0;
    thread.copies.assign(1, {});
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, run_thread, 0);
  }
  const auto release = [](size_t first, size_t stop, Thread::State waiting) {
    size_t here = 0, ended = 0;
    for (size_t i = first; i < stop; ++i) {
      here += threads[i].state == waiting;
      ended += threads[i].state == Thread::ended;
    }
    if (here == 0 || here + ended < stop - first) return false;
    for (size_t i = first; i < stop; ++i) {
      if (threads[i].state == waiting) threads[i].state = Thread::runs;
    }
    return true;
  };
  for (;;) {
    bool moved = false;
    for (Thread& thread : threads) {
      if (thread.state != Thread::runs) continue;
      resume(thread);
      moved = true;
    }
    for (size_t i = 0; i < threads.size(); i += kWarp) {
      const size_t stop = i + kWarp < threads.size() ? i + kWarp : threads.size();
      moved |= release(i, stop, Thread::waits_for_warp);
    }
    uint64_t value = 0;
    bool all_ended = true;
    for (const Thread& thread : threads) {
      if (thread.state == Thread::waits_for_block) value |= thread.value;
      all_ended &= thread.state == Thread::ended;
    }
    if (all_ended) return;
    if (release(0, threads.size(), Thread::waits_for_block)) {
      block_value = value;
      moved = true;
    }
    if (!moved) fail("threads wait for each other");
  }
}

inline void run(const Launch& launch, void (*function)(void** parameters)) {
  kernel = function;
  kernel_parameters = launch.parameters;
  grid_size = launch.grid;
  block_size = launch.block;
  dynamic_bytes = launch.shared_bytes;
  memset(shared_regions, 0, sizeof shared_regions);
  constexpr size_t kStackBytes = 128 * 1024;
  threads.resize(launch.block.x);
  for (unsigned i = 0; i < launch.block.x; ++i) {
    threads[i].stack.resize(kStackBytes);
    threads[i].index = {i, 0, 0};
  }
#ifdef __SANITIZE_ADDRESS__
  unsigned char* const shared = dynamic_shared();
  ASAN_UNPOISON_MEMORY_REGION(shared, kMostShared);
  const unsigned used = (launch.shared_bytes + 7) / 8 * 8;
  ASAN_POISON_MEMORY_REGION(shared + used, kMostShared - used);
#endif
  for (unsigned y = 0; y < launch.grid.y; ++y) {
    for (unsigned x = 0; x < launch.grid.x; ++x) {
      block_index = {x, y, 0};
      // A block finds in shared memory what another one has left there.
      memset(dynamic_shared(), 0xee, launch.shared_bytes);
      run_block();
    }
  }
  current = nullptr;
}

template <class T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T>
T from_bits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

// The values that the lanes of this warp have come with.
inline const uint64_t* exchange(unsigned mask, uint64_t value) {
  if (mask != 0xffffffffu) fail("an exchange between some lanes of a warp");
  const unsigned thread = current->index.x, turn = current->exchanges++ % 2;
  exchanged[thread / kWarp][turn][thread % kWarp] = value;
  wait(Thread::waits_for_warp);
  return exchanged[thread / kWarp][turn];
}
inline uint64_t block_or(uint64_t value) {
  current->value = value;
  wait(Thread::waits_for_block);
  return block_value;
}
inline int lane() { return static_cast<int>(current->index.x % kWarp); }

}  // namespace emulated

#define threadIdx (emulated::current->index)
#define blockIdx emulated::block_index
#define blockDim emulated::block_size
#define gridDim emulated::grid_size
// A block is run by one thread of the host.
#define __shared__ thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __noinline__ __attribute__((noinline))
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads, blocks)

inline void __syncthreads() { emulated::block_or(0); }
inline int __syncthreads_or(int value) { return emulated::block_or(value != 0) != 0; }
inline void __syncwarp() { emulated::exchange(0xffffffffu, 0); }
inline void __threadfence() {}

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulated::from_bits<T>(emulated::exchange(mask, emulated::bits_of(value))[lane & 31]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int step) {
  const uint64_t* all = emulated::exchange(mask, emulated::bits_of(value));
  const int lane = emulated::lane();
  return emulated::from_bits<T>(all[lane >= step ? lane - step : lane]);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int step) {
  const uint64_t* all = emulated::exchange(mask, emulated::bits_of(value));
  const int lane = emulated::lane();
  return emulated::from_bits<T>(all[lane + step < 32 ? lane + step : lane]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  const uint64_t* all = emulated::exchange(mask, emulated::bits_of(value));
  return emulated::from_bits<T>(all[emulated::lane() ^ step]);
}
inline unsigned __ballot_sync(unsigned mask, bool value) {
  const uint64_t* all = emulated::exchange(mask, value);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= static_cast<unsigned>(all[i] != 0) << i;
  return result;
}
inline int __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline int __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == ~0u; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t own = emulated::bits_of(value);
  const uint64_t* all = emulated::exchange(mask, own);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= static_cast<unsigned>(all[i] == own) << i;
  return result;
}
template <class T, class Pick>
T emulated_reduce(unsigned mask, T value, const Pick& pick) {
  const uint64_t* all = emulated::exchange(mask, emulated::bits_of(value));
  T result = emulated::from_bits<T>(all[0]);
  for (int i = 1; i < 32; ++i) result = pick(result, emulated::from_bits<T>(all[i]));
  return result;
}
template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  return emulated_reduce(mask, value, [](T a, T b) { return a + b; });
}
template <class T>
T __reduce_max_sync(unsigned mask, T value) {
  return emulated_reduce(mask, value, [](T a, T b) { return a < b ? b : a; });
}
template <class T>
T __reduce_min_sync(unsigned mask, T value) {
  return emulated_reduce(mask, value, [](T a, T b) { return b < a ? b : a; });
}

template <class T, class V>
T atomicAdd(T* at, V value) {
  const T before = *at;
  *at += static_cast<T>(value);
  return before;
}
template <class T, class V>
T atomicOr(T* at, V value) {
  const T before = *at;
  *at |= static_cast<T>(value);
  return before;
}
template <class T, class V>
T atomicMin(T* at, V value) {
  const T before = *at;
  if (static_cast<T>(value) < before) *at = static_cast<T>(value);
  return before;
}
template <class T, class V>
T atomicExch(T* at, V value) {
  const T before = *at;
  *at = static_cast<T>(value);
  return before;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
// Selectors from 0 to 7.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selectors) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned byte = static_cast<unsigned>(bytes >> (selectors >> 4 * i & 7) * 8) & 0xff;
    result |= byte << 8 * i;
  }
  return result;
}
inline unsigned __brev(unsigned value) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= (value >> i & 1) << (31 - i);
  return result;
}
inline float __saturatef(float value) { return value > 0 ? value < 1 ? value : 1 : 0; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline double __hiloint2double(int high, int low) {
  return emulated::from_bits<double>(static_cast<uint64_t>(static_cast<unsigned>(high)) << 32 |
                                     static_cast<unsigned>(low));
}
inline int __double2hiint(double value) { return static_cast<int>(emulated::bits_of(value) >> 32); }
inline int __double2loint(double value) { return static_cast<int>(emulated::bits_of(value)); }
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
inline float __uint_as_float(unsigned bits) { return emulated::from_bits<float>(bits); }
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
// Without a fused operation behind them, as the host compiler has no such instruction by default.
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline unsigned __float_as_uint(float value) {
  return static_cast<unsigned>(emulated::bits_of(value));
}
inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }
