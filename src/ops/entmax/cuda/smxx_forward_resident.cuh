// The forward of contiguous rows of many thousand elements: a block, or a cluster of blocks
// (sm_90), holds a row in registers from the one read to the one write, while its next row comes to
// shared memory. The blocks stay until all rows are done.
//
// All steps of the threshold run over the elements above a first lower bound, which is the
// threshold of the threads' largest elements, or of some of them. Where powers cost much each
// thread lists its own in shared memory, and y takes their place; a thread whose list is too short
// goes through the vectors in its registers instead, as do all where powers cost little.
#pragma once

#include "device/async_copy.cuh"
#include "device/shared.cuh"
#include "ops/entmax/cuda/forward_params.cuh"
#include "ops/entmax/cuda/smxx_solve.cuh"
#include "ops/entmax/cuda/smxx_vector.cuh"

namespace pullback::entmax {

// The compiler would compute what depends on no more than this once, and spill it.
inline int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A thread's part of a row, in packed form. Hidden beyond the row's end.
template <class T>
struct HeldRow {
  static constexpr int kLength = device::kVectorLength<T>;

  Packed<T> vector[kResidentVectors];

  Packed<T> fresh(int j) const {
    Packed<T> packed;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      packed.word[w] = static_cast<uint32_t>(opaque(static_cast<int>(vector[j].word[w])));
    }
    return packed;
  }
  uint32_t top() const {
    uint32_t all = max_of(vector[0]);
#pragma unroll
    for (int j = 1; j < kResidentVectors; ++j) all = max_of_words<T>(all, max_of(vector[j]));
    return all;
  }
  template <class Use>
  static void for_each_in(const Packed<T>& packed, const Use& use) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float element[kPerWord<T>];
      unpack(packed.word[w], element, T{});
#pragma unroll
      for (int k = 0; k < kPerWord<T>; ++k) use(element[k], w * kPerWord<T> + k);
    }
  }
  template <class ValueOf>
  static Packed<T> map(const Packed<T>& packed, const ValueOf& value_of) {
    Packed<T> result;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float element[kPerWord<T>];
      unpack(packed.word[w], element, T{});
#pragma unroll
      for (int k = 0; k < kPerWord<T>; ++k) element[k] = value_of(element[k]);
      result.word[w] = pack(element, T{});
    }
    return result;
  }
  // Leaves out some that are not above `bound`.
  template <class Use>
  void for_each_above(float bound, const Use& use) const {
#pragma unroll
    for (int j = 0; j < kResidentVectors; ++j) {
      const Packed<T> packed = fresh(j);
      if (max_in_word<T>(max_of(packed)) > bound) {
        for_each_in(packed, [&](float x, int) { use(x); });
      }
    }
  }
};

inline uint32_t dynamic_shared_bytes() {
  uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

// A thread's elements above `bound`, in the order of its vectors, one under the other; hidden ones
// fill the last four.
template <class T, int kThreads>
class Candidates {
 public:
  // `lists`: of all threads, `capacity` elements each, a multiple of 4.
  Candidates(void* lists, int capacity)
      : first_(device::shared_address(lists) + threadIdx.x * static_cast<uint32_t>(sizeof(T))),
        room_(first_ + capacity * kStep) {}

  bool complete() const { return end_ <= room_; }

  void collect(const HeldRow<T>& held, float bound) {
    end_ = first_;
#pragma unroll
    for (int j = 0; j < kResidentVectors; ++j) {
      const Packed<T> packed = held.fresh(j);
      if (max_in_word<T>(max_of(packed)) > bound) {
        if (end_ + device::kVectorLength<T> * kStep > room_) {
          end_ = room_ + 1;
        } else {
          HeldRow<T>::for_each_in(packed, [&](float x, int i) {
            if (x > bound) {
              store(end_, packed.word[i / kPerWord<T>] >> i % kPerWord<T> * 16);
              end_ += kStep;
            }
          });
        }
      }
    }
    if (!complete()) return;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if ((end_ - first_) % (4 * kStep) != 0) {
        store(end_, kHiddenWord<T>);
        end_ += kStep;
      }
    }
  }

  template <class Use>
  void for_each(const Use& use) const {
#pragma unroll 1
    for (uint32_t at = first_; at != end_; at += 4 * kStep) {
      float x[4];
      load(x, at);
#pragma unroll
      for (int i = 0; i < 4; ++i) use(x[i]);
    }
  }
  template <class ValueOf>
  void replace(const ValueOf& value_of) const {
#pragma unroll 1
    for (uint32_t at = first_; at != end_; at += 4 * kStep) {
      float x[4];
      load(x, at);
#pragma unroll
      for (int i = 0; i < 4; i += kPerWord<T>) {
        float value[kPerWord<T>];
#pragma unroll
        for (int e = 0; e < kPerWord<T>; ++e) value[e] = value_of(x[i + e]);
        const uint32_t word = pack(value, T{});
#pragma unroll
        for (int e = 0; e < kPerWord<T>; ++e) store(at + (i + e) * kStep, word >> 16 * e);
      }
    }
  }
  // What stands for the candidates of a vector, the first of them at `next`; 0 for the others.
  Packed<T> spread(const Packed<T>& of_x, float bound, uint32_t& next) const {
    Packed<T> result{};
    HeldRow<T>::for_each_in(of_x, [&](float x, int i) {
      uint32_t bits = 0;
      if (x > bound) {
        bits = load(next);
        next += kStep;
      }
      result.word[i / kPerWord<T>] |= bits << i % kPerWord<T> * 16;
    });
    return result;
  }
  uint32_t first() const { return first_; }

 private:
  static constexpr uint32_t kStep = kThreads * sizeof(T);  // from one element to the next

  // An element's bits, the low ones of a word.
  static uint32_t load(uint32_t at) {
    uint32_t bits;
    if constexpr (sizeof(T) == 2) {
      uint16_t half;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(at) : "memory");
      bits = half;
    } else {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(at) : "memory");
    }
    return bits;
  }
  static void store(uint32_t at, uint32_t bits) {
    if constexpr (sizeof(T) == 2) {
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(static_cast<uint16_t>(bits))
                   : "memory");
    } else {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(bits) : "memory");
    }
  }
  static void load(float (&x)[4], uint32_t at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float pair[kPerWord<T>];
      unpack(load(at + i * kStep), pair, T{});
      x[i] = pair[0];
    }
  }

  uint32_t first_, room_, end_ = 0;  // in shared memory; beyond the room: more than fit
};

// Rows as for forward_registers, less than 2^30 and up to kResidentVectors vectors a thread.
template <class T, Family kFamily, int kWarps, bool kClustered>
void forward_resident(const ForwardParams& p) {
  using device::infinity;
  constexpr int kLength = device::kVectorLength<T>;
  constexpr int kThreads = kWarps * device::kWarpSize;
  extern __shared__ Packed<T> coming[];  // [kResidentVectors][kThreads], each thread's own
  constexpr int kComing = kResidentVectors * kThreads;
  Candidates<T, kThreads> candidates(
      coming + kComing, static_cast<int>(dynamic_shared_bytes() - kComing * sizeof(Packed<T>)) /
                            static_cast<int>(kThreads * sizeof(T)) / 4 * 4);
  __shared__ GroupScratch<kWarps, kClustered> scratch;
  Group<kWarps, kClustered> group(scratch);
  const auto blocks = static_cast<int>(kClustered ? device::cluster_size() : 1);
  const int rows_apart = static_cast<int>(gridDim.x) / blocks;
  // A block's elements lie side by side; those of vector j of this thread begin at begin + j kStep.
  constexpr int kStep = kThreads * kLength;
  int begin = static_cast<int>(threadIdx.x) * kLength, end = static_cast<int>(p.rows.length);
  if constexpr (kClustered) {
    constexpr int kOfWarp = device::kWarpSize * kLength;
    const int slice = (end + blocks * kOfWarp - 1) / (blocks * kOfWarp) * kOfWarp;
    const int first = static_cast<int>(device::cluster_rank()) * slice;
    begin += first;
    end = min(end, first + slice);
  }

  // How many elements the row has from this thread's first on.
  const auto left = [&] { return opaque(end - begin); };
  const auto prefetch = [&](int row) {
    if (row < p.rows.count) {
      const T* x = static_cast<const T*>(p.x.data) + row_offset(p.rows, p.x, row) + begin;
      const int count = left();
#pragma unroll
      for (int j = 0; j < kResidentVectors; ++j) {
        if (j * kStep < count) {
          device::async_copy(&coming[j * kThreads + threadIdx.x], x + j * kStep);
        }
      }
    }
    device::async_commit();
  };
  int row = static_cast<int>(blockIdx.x) / blocks;
  prefetch(row);
  // All blocks have started before one writes into another's memory.
  if constexpr (kClustered) device::cluster_barrier();

#pragma unroll 1
  for (; row < p.rows.count; row += rows_apart) {
    device::async_wait<0>();
    HeldRow<T> held;
    const int present = left();
#pragma unroll
    for (int j = 0; j < kResidentVectors; ++j) {
      if (j * kStep < present) {
        held.vector[j] = coming[j * kThreads + threadIdx.x];
      } else {
#pragma unroll
        for (int w = 0; w < 4; ++w) held.vector[j].word[w] = kHiddenWord<T>;
      }
    }
    prefetch(row + rows_apart);

    // Every warp looks at the largest of all threads of the block.
    float tops[kWarps];
    group.gather(max_in_word<T>(held.top()), tops);
    float largest = tops[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) largest = max_or_nan(largest, tops[w]);
    largest = warp_max_or_nan(largest);
    const Power<kFamily, float> power(p.alpha);
    float bound = -infinity<float>();
    if constexpr (kFamily != Family::softmax) {
      constexpr int kTops = kWarps < kBoundTops ? kWarps : kBoundTops;
#pragma unroll
      for (int w = kTops; w < kWarps; ++w) tops[w % kTops] = max(tops[w % kTops], tops[w]);
      if (magnitude(largest) < infinity<float>()) {
        float z[kTops];
#pragma unroll
        for (int w = 0; w < kTops; ++w) z[w] = tops[w] - largest;
        bound = bound_of_theta(power, largest, warp_bound(power, z));
      }
    }
    if constexpr (kClustered) group.max_pair(largest, bound);

    const auto finish = [&](float tau, int size) {
      if (group.thread() != 0) return;
      if (p.tau.data) static_cast<float*>(p.tau.data)[row_offset(p.rows, p.tau, row)] = tau;
      if (p.support_size.data) {
        static_cast<int32_t*>(p.support_size.data)[row_offset(p.rows, p.support_size, row)] = size;
      }
    };
    const auto store_y = [&](auto vector_of) {
      if (!p.y.data) return;
      T* y = static_cast<T*>(p.y.data) + row_offset(p.rows, p.y, row) + begin;
      const int wanted = left();
#pragma unroll
      for (int j = 0; j < kResidentVectors; ++j) {
        const Packed<T> of_x = held.fresh(j);
        Packed<T> packed{};
        if (max_in_word<T>(max_of(of_x)) > bound || kFamily == Family::softmax) {
          packed = vector_of(of_x);
        }
        if (j * kStep < wanted) store_packed(y + j * kStep, packed);
      }
    };
    const auto store_bits = [&](auto active) {
      if (!p.support.data) return;
      uint8_t* bytes = static_cast<uint8_t*>(p.support.data) + row_offset(p.rows, p.support, row);
      const int first = opaque(begin);
#pragma unroll
      for (int j = 0; j < kResidentVectors; ++j) {
        const int at = first + j * kStep;
        unsigned bits = 0;
        held.for_each_in(held.fresh(j),
                         [&](float x, int i) { bits |= (active(x) ? 1u : 0u) << i; });
        // Two lanes make a byte of f32.
        if constexpr (kLength == 4) bits |= __shfl_down_sync(device::kAllLanes, bits, 1) << 4;
        if (at % 8 == 0 && at < end) {
          bytes[at / 8 * p.support.axis] = static_cast<uint8_t>(bits);
        }
      }
    };
    const auto for_each_candidate = [&](auto use) {
      if (collects(kFamily) && candidates.complete()) {
        candidates.for_each(use);
      } else {
        held.for_each_above(bound, use);
      }
    };
    const auto count = [&](auto active) {
      int mine = 0;
      for_each_candidate([&](float x) { mine += active(x); });
      return group.count(mine);
    };

    if (!(magnitude(largest) < infinity<float>())) {
      const bool empty = largest < 0;
      const float fill = empty ? 0 : device::quiet_nan<float>();
      // Nothing is above an infinite bound, and all is not below it.
      bound = empty ? infinity<float>() : -infinity<float>();
#pragma unroll
      for (int j = 0; j < kResidentVectors; ++j) {
#pragma unroll
        for (int w = 0; w < 4; ++w) held.vector[j].word[w] = 0;
      }
      store_y([&](const Packed<T>& of_x) { return held.map(of_x, [&](float) { return fill; }); });
      store_bits([](float) { return false; });
      finish(empty ? infinity<float>() : fill, empty ? 0 : -1);
      continue;
    }
    if constexpr (kFamily == Family::softmax) {
      const int size =
          p.support_size.data ? count([](float x) { return x > -infinity<float>(); }) : 0;
      const auto power_of_e = [&](float x) { return exp2_of((x - largest) * 1.44269504f); };
      float sum = 0, unused = 0;
#pragma unroll
      for (int j = 0; j < kResidentVectors; ++j) {
        float part = 0;
        held.for_each_in(held.fresh(j), [&](float x, int) { part += power_of_e(x); });
        sum += part;
      }
      group.sum(sum, unused);
      const float scale = 1 / sum;
      store_y([&](const Packed<T>& of_x) {
        return held.map(of_x, [&](float x) { return power_of_e(x) * scale; });
      });
      finish(largest + log_of(sum), size);
    } else {
      if constexpr (collects(kFamily)) candidates.collect(held, bound);
      const auto all = [&](auto use) { for_each_candidate([&](float x) { use(x - largest); }); };
      const float lowest = theta_of_bound(power, largest, bound);
      Threshold<float> threshold;
      if constexpr (kFamily == Family::sparsemax) {
        threshold = {rise_of_sparsemax(lowest, group, all), 0, 1};
      } else {
        const auto start_of = [&](const auto& rough) {
          if constexpr (kFamily != Family::general) {
            return lowest;
          } else {
            const float own[] = {max_in_word<T>(held.top()) - largest};
            return theta_by_sample(rough, lowest, own, kLength, group, [&](auto use) {
#pragma unroll
              for (int j = 0; j < kResidentVectors; ++j) {
                float first[kPerWord<T>];
                unpack(held.fresh(j).word[0], first, T{});
                use(first[0] - largest);
              }
            });
          }
        };
        threshold = solve<float>(power, start_of, group, all, digits_wanted<T>(p));
      }
      const auto active = [&](float x) {
        return power.excess(x - largest, threshold) > power.edge;
      };
      const auto output = power_of_output<T>(power);
      const auto value_of = [&](float x) { return probability<T>(output, x - largest, threshold); };
      const int size = p.support_size.data ? count(active) : 0;
      if (collects(kFamily) && candidates.complete()) {
        if (p.y.data) candidates.replace(value_of);
        uint32_t next = candidates.first();
        store_y([&](const Packed<T>& of_x) { return candidates.spread(of_x, bound, next); });
      } else {
        store_y([&](const Packed<T>& of_x) { return held.map(of_x, value_of); });
      }
      if constexpr (kFamily == Family::sparsemax) store_bits(active);
      finish(tau_of<decltype(power)>(p.alpha, largest, threshold), size);
    }
  }
}

}  // namespace pullback::entmax
