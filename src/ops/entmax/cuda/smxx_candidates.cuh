// The elements of a row that are above a first bound, without the others. Of f32, each thread lists
// its own; of a 16-bit type, smxx_counts.cuh counts how many have which value.
#pragma once

#include "device/shared.cuh"
#include "ops/entmax/cuda/smxx_bounds.cuh"
#include "ops/entmax/cuda/smxx_counts.cuh"
#include "ops/entmax/cuda/smxx_held.cuh"

namespace pullback::entmax {

// A thread's elements above `bound`, in the order of its vectors, one under the other; hidden ones
// fill the last four.
template <int kThreads>
class CandidateLists {
 public:
  // Of all threads, in `bytes` of shared memory.
  CandidateLists(void* lists, int bytes)
      : first_(device::shared_address(lists) + threadIdx.x * 4),
        room_(first_ + bytes / static_cast<int>(4 * kStep) * 4 * kStep) {}

  bool complete() const { return end_ <= room_; }

  void collect(const HeldRow<float>& held, float bound, float) {
    bound_ = bound;
    end_ = next_ = first_;
#pragma unroll
    for (int j = 0; j < kResidentVectors; ++j) {
      const Words packed = held.fresh(j);
      if (HeldRow<float>::above(packed, bound)) {
        if (end_ + device::kVectorLength<float> * kStep > room_) {
          end_ = room_ + 1;
        } else {
          HeldRow<float>::for_each_in(packed, [&](float x, int) {
            if (x > bound) {
              store(end_, x);
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
        store(end_, -device::infinity<float>());
        end_ += kStep;
      }
    }
  }

  template <class Use>
  void for_each(float largest, const Use& use) const {
#pragma unroll 1
    for (uint32_t at = first_; at != end_; at += 4 * kStep) {
      float x[4];
      load(x, at);
#pragma unroll
      for (int i = 0; i < 4; ++i) use(x[i] - largest);
    }
  }
  template <class ValueOf>
  void replace(const ValueOf& value_of) const {
#pragma unroll 1
    for (uint32_t at = first_; at != end_; at += 4 * kStep) {
      float x[4];
      load(x, at);
#pragma unroll
      for (int i = 0; i < 4; ++i) store(at + i * kStep, value_of(x[i]));
    }
  }
  // What replaced the elements of a vector, one vector after the other; 0 below the bound.
  Words look_up(const Words& of_x) {
    Words result{};
    if (!HeldRow<float>::above(of_x, bound_)) return result;
    HeldRow<float>::for_each_in(of_x, [&](float x, int i) {
      if (x > bound_) {
        result.element[i] = device::load_shared_word(next_);
        next_ += kStep;
      }
    });
    return result;
  }

 private:
  static constexpr uint32_t kStep = kThreads * 4;  // from one element to the next

  static void store(uint32_t at, float x) { device::store_shared(at, __float_as_uint(x)); }
  static void load(float (&x)[4], uint32_t at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(device::load_shared_word(at + i * kStep));
  }

  uint32_t first_, room_, end_ = 0;  // in shared memory; beyond the room: more than fit
  uint32_t next_ = 0;                // to be looked up
  float bound_ = 0;
};

template <class T>
struct NoCandidates {
  NoCandidates(void*, int) {}
  bool complete() const { return false; }
  void collect(const HeldRow<T>&, float, float) {}
  template <class Use>
  void for_each(float, const Use&) const {}
  template <class ValueOf>
  void replace(const ValueOf&) const {}
  Words look_up(const Words& of_x) const { return of_x; }
};

template <class T, int kWarps, bool kClustered, bool kCollects>
struct CandidatesOf {
  using Type = NoCandidates<T>;
};
template <class T, int kWarps, bool kClustered>
struct CandidatesOf<T, kWarps, kClustered, true> {
  using Type = ValueCounts<T, kWarps, kClustered>;
};
template <int kWarps, bool kClustered>
struct CandidatesOf<float, kWarps, kClustered, true> {
  using Type = CandidateLists<kWarps * device::kWarpSize>;
};
template <class T, int kWarps, bool kClustered, bool kCollects>
using Candidates = typename CandidatesOf<T, kWarps, kClustered, kCollects>::Type;

}  // namespace pullback::entmax
