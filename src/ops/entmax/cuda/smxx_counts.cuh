// A row of 16-bit elements as counts: how many elements above a first bound have which value. There
// are few different ones, so that powers are computed once for each, however long the row is, and y
// is looked up.
//
// Values are numbered by their bits, in their order: -1, -2, ... from -0 down. A place is how far a
// number is above that of the bound; place 0, of which y is 0, is for all that is not above it.
// Where the bound is below 0 and the largest element is not, there are too many values, most of
// them next to 0: the smallest, up to kNothing, take the number of 0.
#pragma once

#include "device/registers.cuh"
#include "device/shared.cuh"
#include "ops/entmax/cuda/smxx_group.cuh"
#include "ops/entmax/cuda/smxx_held.cuh"
#include "ops/entmax/cuda/smxx_solve.cuh"

namespace pullback::entmax {

template <class T, int kWarps, bool kClustered>
class ValueCounts {
 public:
  // In `bytes` of shared memory. Places times 4 have 16 bits.
  ValueCounts(void* memory, int bytes)
      : words_(static_cast<uint32_t*>(memory)), capacity_(min(bytes / (kTables * 4), 1 << 14)) {}

  bool complete() const { return range_ > 0; }

  // By all threads, with the same bound and largest element; they have met (those of all blocks)
  // since they looked at the row before. If there is room, the held elements become four times
  // their places.
  void collect(HeldRow<T>& held, float bound, float largest) {
    const int floor = floor_of(bound);
    choose_numbers(floor, static_cast<int16_t>(device::from_real<T>(largest).bits));
    if (!complete()) return;
    for (int k = static_cast<int>(threadIdx.x); k <= range_; k += kThreads) words_[k] = 0;
    place_all(held, floor);
    __syncthreads();
    // Elements of place 0, too: lanes that count the same cost nothing, a branch each does.
    const uint32_t table = device::kept(device::shared_address(words_));
#pragma unroll
    for (int j = 0; j < kResidentVectors; ++j) {
      const Words places = held.fresh(j);
      if (any(places)) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          device::count_shared(table + (places.element[w] & 0xffff));
          device::count_shared(table + (places.element[w] >> 16));
        }
      }
    }
    if constexpr (kClustered) {
      device::cluster_barrier();
      uint32_t* of_row = table_of_row();
      for (int k = 1 + static_cast<int>(threadIdx.x); k <= range_; k += kThreads) {
        uint32_t sum = 0;
        for (uint32_t block = 0; block < device::cluster_size(); ++block) {
          sum += device::load_remote(device::remote_address(words_ + k, block));
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
    const uint32_t* counts = table_of_row();
#pragma unroll 1
    for (int k = 1 + static_cast<int>(threadIdx.x); k <= range_; k += kThreads) {
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
    uint32_t* values = table_of_row();
    if (threadIdx.x == 0) values[0] = 0;
#pragma unroll 1
    for (int k = 1 + static_cast<int>(threadIdx.x); k <= range_; k += kThreads) {
      values[k] = device::from_real<T>(value_of(value(k))).bits;
    }
    __syncthreads();
  }
  // What replaced the elements of a vector.
  Words look_up(const Words& places) const {
    Words result{};
    if (!any(places)) return result;
    const uint32_t table = device::shared_address(table_of_row());
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t low = device::load_shared_word(table + (places.element[w] & 0xffff));
      const uint32_t high = device::load_shared_word(table + (places.element[w] >> 16));
      result.element[w] = low | high << 16;
    }
    return result;
  }

 private:
  static constexpr int kThreads = kWarps * device::kWarpSize;
  static constexpr int kTables = kClustered ? 2 : 1;  // the block's, and of a cluster the row's
  static constexpr float kNothing = 0x1p-23f;         // no value moves by more
  static constexpr int kSign = 0x8000, kMagnitude = 0x7fff;

  static bool any(const Words& places) {
    return (places.element[0] | places.element[1] | places.element[2] | places.element[3]) != 0;
  }

  // The bits of the largest value that is not above the bound, with the sign extended.
  static int floor_of(float bound) {
    const T rounded = device::from_real<T>(bound);
    int bits = static_cast<int16_t>(rounded.bits);
    if (device::to_real(rounded) > bound) bits += bits < 0 ? 1 : -1;
    return bits;
  }

  int number_of(int bits) const { return max((bits & kMagnitude) - nothing_, 0) ^ bits >> 31; }
  float value(int place) const {
    const int number = first_ + place, sign = number >> 31;
    const int magnitude = number ^ sign;
    return device::to_real(
        T{static_cast<uint16_t>((magnitude == 0 ? 0 : magnitude + nothing_) | (sign & kSign))});
  }

  void choose_numbers(int floor, int highest) {
    const int below = floor & kMagnitude, above = highest & kMagnitude;
    const int room = capacity_ - 1;
    two_signs_ = (floor ^ highest) < 0;
    // Where the largest element is 0, only one side has values to merge.
    const bool both = below > 0 && above > 0;
    const int excess = two_signs_ ? max(below + above + 1 - room, 0) : 0;
    nothing_ = both ? (excess + 1) / 2 : excess;
    first_ = number_of(floor);
    range_ = number_of(highest) - first_;
    const int most = min((both ? min(below, above) : max(below, above)) - 1,
                         int{device::from_real<T>(kNothing).bits});
    if (range_ > room || (nothing_ > 0 && nothing_ > most)) range_ = 0;
  }

  // Two at a time. Halves do not carry: each is no less than what is subtracted from it.
  void place_all(HeldRow<T>& held, int floor) const {
    const auto both = [](int half) { return static_cast<uint32_t>(half & 0xffff) * 0x10001u; };
    const uint32_t lowest = both(floor), nothing = both(nothing_);
    const auto replace = [&](auto place) {
#pragma unroll
      for (int j = 0; j < kResidentVectors; ++j) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const uint32_t word = device::Packed<T>::max(held.vector[j].element[w], lowest);
          held.vector[j].element[w] = place(word);
        }
      }
    };
    if (two_signs_) {
      const uint32_t base = both(first_ ^ kSign) * 4;
      replace([&](uint32_t word) {
        const uint32_t signs = (word >> 15 & 0x10001u) * 0xffffu;
        const uint32_t magnitude =
            device::Packed<T>::max(word & both(kMagnitude), nothing) - nothing;
        return (magnitude ^ signs ^ both(kSign)) * 4 - base;
      });
    } else {
      const uint32_t step = floor < 0 ? -4u : 4u, base = lowest * step;
      replace([&](uint32_t word) { return word * step - base; });
    }
  }

  uint32_t* table_of_row() const { return words_ + (kClustered ? capacity_ : 0); }

  uint32_t* words_;
  int capacity_;
  // 0 stands for magnitudes up to nothing_; first_: the bound's number; range_: the number of
  // places above it, 0 where there are no counts.
  int nothing_ = 0, first_ = 0, range_ = 0;
  bool two_signs_ = false;
};

}  // namespace pullback::entmax
