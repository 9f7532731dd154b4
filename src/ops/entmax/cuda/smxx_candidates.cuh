// The elements of a row that are above a first bound, without the others. Of f32, each thread lists
// its own. Of a 16-bit type there are few different ones, and the block or the cluster counts how
// many elements have which value: powers are computed once for each value, however long the row is,
// and y is looked up.
#pragma once

#include "device/registers.cuh"
#include "device/shared.cuh"
#include "ops/entmax/cuda/smxx_bounds.cuh"
#include "ops/entmax/cuda/smxx_vector.cuh"

namespace pullback::entmax {

// A thread's part of a row, in packed form. Hidden beyond the row's end.
template <class T>
struct HeldRow {
  static constexpr int kLength = device::kVectorLength<T>;

  Words vector[kResidentVectors];

  Words fresh(int j) const {
    Words packed;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      packed.element[w] = device::kept(vector[j].element[w]);
    }
    return packed;
  }
  uint32_t top() const {
    uint32_t all = max_of<T>(vector[0]);
#pragma unroll
    for (int j = 1; j < kResidentVectors; ++j) all = max_of_words<T>(all, max_of<T>(vector[j]));
    return all;
  }
  template <class Use>
  static void for_each_in(const Words& packed, const Use& use) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float element[kPerWord<T>];
      unpack<T>(packed.element[w], element);
#pragma unroll
      for (int k = 0; k < kPerWord<T>; ++k) use(element[k], w * kPerWord<T> + k);
    }
  }
  template <class ValueOf>
  static Words map(const Words& packed, const ValueOf& value_of) {
    Words result;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float element[kPerWord<T>];
      unpack<T>(packed.element[w], element);
#pragma unroll
      for (int k = 0; k < kPerWord<T>; ++k) element[k] = value_of(element[k]);
      result.element[w] = pack<T>(element);
    }
    return result;
  }
  // Leaves out some that are not above `bound`.
  template <class Use>
  void for_each_above(float bound, const Use& use) const {
#pragma unroll
    for (int j = 0; j < kResidentVectors; ++j) {
      const Words packed = fresh(j);
      if (max_in_word<T>(max_of<T>(packed)) > bound) {
        for_each_in(packed, [&](float x, int) { use(x); });
      }
    }
  }
};

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
      if (max_in_word<float>(max_of<float>(packed)) > bound) {
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

// How many elements of a row of T, of 16 bits, have which value above a bound. Values of one sign
// are numbered in their order by their bits; where the row has others that count, or too many,
// there are no counts.
template <class T, int kWarps, bool kClustered>
class ValueCounts {
 public:
  // In `bytes` of shared memory.
  ValueCounts(void* memory, int bytes)
      : words_(static_cast<uint32_t*>(memory)), capacity_(bytes / (kBuffers * 4)) {
    for (int k = static_cast<int>(threadIdx.x); k < 2 * capacity_; k += kThreads) words_[k] = 0;
  }

  bool complete() const { return range_ > 0; }

  // By all threads, with the same bound and largest element. Since they came to the end of the row
  // before, all blocks have met.
  void collect(const HeldRow<T>& held, float bound, float largest) {
    // The counts before are not looked at any more, and those of this row are 0 since then.
    uint32_t* before = words_ + parity_ * capacity_;
    for (int k = static_cast<int>(threadIdx.x); k < range_; k += kThreads) before[k] = 0;
    parity_ ^= 1;
    flip_ = largest < 0 ? -1 : 0;
    const T rounded = device::from_real<T>(bound);
    first_ = number_of(rounded.bits) + (device::to_real(rounded) > bound ? 0 : 1);
    range_ = number_of(device::from_real<T>(largest).bits) - first_ + 1;
    if ((bound <= 0 && largest >= 0) || range_ > capacity_) range_ = 0;
    if (!complete()) return;
    const uint32_t* counts = words_ + parity_ * capacity_;
    const uint32_t origin = device::shared_address(counts) - 4 * first_;
#pragma unroll
    for (int j = 0; j < kResidentVectors; ++j) {
      const Words packed = held.fresh(j);
      if (max_in_word<T>(max_of<T>(packed)) > bound) {
#pragma unroll
        for (int i = 0; i < device::kVectorLength<T>; ++i) {
          const int number = number_in(packed.element[i / 2], i % 2);
          if (number >= first_) {
            device::count_shared(origin + 4 * number);
          }
        }
      }
    }
    if constexpr (kClustered) {
      device::cluster_barrier();
      uint32_t* of_row = words();
      for (int k = static_cast<int>(threadIdx.x); k < range_; k += kThreads) {
        uint32_t sum = 0;
        for (uint32_t block = 0; block < device::cluster_size(); ++block) {
          sum += device::load_remote(device::remote_address(counts + k, block));
        }
        of_row[k] = sum;
      }
    } else {
      __syncthreads();
    }
  }

  // For some values each thread of the block.
  template <class Use>
  void for_each(float largest, const Use& use) const {
    const uint32_t* counts = words();
#pragma unroll 1
    for (int k = static_cast<int>(threadIdx.x); k < range_; k += kThreads) {
      use(Several{value(k) - largest, static_cast<float>(counts[k])});
    }
  }
  // Calls use(threads) for those who share the counts: a block.
  template <class Use>
  void share(Group<kWarps, kClustered>& group, const Use& use) const {
    if constexpr (kClustered) {
      __shared__ GroupScratch<kWarps> scratch;
      Group<kWarps> block(scratch);
      use(block);
    } else {
      use(group);
    }
  }
  // In place of the counts.
  template <class ValueOf>
  void replace(const ValueOf& value_of) const {
    uint32_t* values = words();
#pragma unroll 1
    for (int k = static_cast<int>(threadIdx.x); k < range_; k += kThreads) {
      values[k] = device::from_real<T>(value_of(value(k))).bits;
    }
    __syncthreads();
  }
  // What replaced the elements of a vector; 0 below the bound.
  Words look_up(const Words& of_x) const {
    const uint32_t origin = device::shared_address(words()) - 4 * first_;
    Words result;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t bits[2] = {0, 0};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int number = number_in(of_x.element[w], half);
        if (number >= first_) bits[half] = device::load_shared_word(origin + 4 * number);
      }
      result.element[w] = bits[0] | bits[1] << 16;
    }
    return result;
  }

 private:
  static constexpr int kThreads = kWarps * device::kWarpSize;
  // Of this row, of the one before, which the blocks of a cluster may still read, and of a cluster.
  static constexpr int kBuffers = kClustered ? 3 : 2;

  // Negative for values of the other sign.
  int number_of(uint16_t bits) const { return static_cast<int16_t>(bits) ^ flip_; }
  int number_in(uint32_t word, int half) const {
    const int both = static_cast<int>(word) ^ flip_;
    return half == 0 ? static_cast<int16_t>(both) : both >> 16;
  }
  float value(int k) const {
    return device::to_real(T{static_cast<uint16_t>((first_ + k) ^ flip_)});
  }
  uint32_t* words() const { return words_ + (kClustered ? 2 : parity_) * capacity_; }

  uint32_t* words_;
  int capacity_, parity_ = 0;
  int flip_ = 0, first_ = 0, range_ = 0;  // range: values from the first on; 0: no counts
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
