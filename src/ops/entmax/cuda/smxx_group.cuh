// The threads that share a row: a warp, a block of several, or a cluster of such blocks. All
// threads get the same bits, in a fixed order of additions.
#pragma once

#include "device/bulk.cuh"
#include "device/cluster.cuh"
#include "device/float.cuh"
#include "device/warp.cuh"
#include "device/warp_integer.cuh"
#include "ops/entmax/cuda/tuning.hpp"

namespace pullback::entmax {

using device::max_or_nan;

inline int lane_index() { return static_cast<int>(threadIdx.x) % device::kWarpSize; }

// Floats as integers of the same order; the one NaN that max.NaN makes is above all numbers.
inline int ordered(float value) {
  const int bits = __float_as_int(value);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
inline float from_ordered(int bits) { return __int_as_float(bits ^ (bits >> 31 & 0x7fffffff)); }

inline float warp_max_or_nan(float value) {
  return from_ordered(device::warp_max_integer(ordered(max_or_nan(value, value))));
}
inline double warp_max_or_nan(double value) {
#pragma unroll
  for (int step = device::kWarpSize / 2; step > 0; step /= 2) {
    value = max_or_nan(value, __shfl_xor_sync(device::kAllLanes, value, step));
  }
  return value;
}

// Sums a over one half of the lanes and b over the other, both over all: 6 exchanges, not 10.
template <class R>
void warp_sum_pair(R& a, R& b) {
  using device::kAllLanes;
  const bool upper = lane_index() >= device::kWarpSize / 2;
  R mine = upper ? b : a;
  mine += __shfl_xor_sync(kAllLanes, upper ? a : b, device::kWarpSize / 2);
#pragma unroll
  for (int step = device::kWarpSize / 4; step > 0; step /= 2) {
    mine += __shfl_xor_sync(kAllLanes, mine, step);
  }
  const R other = __shfl_xor_sync(kAllLanes, mine, device::kWarpSize / 2);
  a = upper ? other : mine;
  b = upper ? mine : other;
}

// Three values of each warp, twice: a warp may write the next while another reads these.
template <int kWarps, bool kClustered = false>
struct GroupScratch {
  double values[2][kWarps][3];
  float of_threads[2][1][kWarps * device::kWarpSize];
};
// Of all blocks, which send them.
template <int kWarps>
struct GroupScratch<kWarps, true> {
  alignas(16) float values[2][kMaxBlocks * kWarps][4];
  float of_threads[2][kMaxBlocks][kWarps * device::kWarpSize];
  uint64_t values_here[2], threads_here[2];  // barriers that count the bytes
};
template <>
struct GroupScratch<1> {};

template <int kWarps, bool kClustered = false>
class Group {
 public:
  // Of a block.
  static constexpr int kThreads = kWarps * device::kWarpSize;
  static constexpr int kMostSlots = kClustered ? kMaxBlocks * kWarps : kWarps;

  // Blocks of a cluster meet before they use it.
  explicit Group(GroupScratch<kWarps, kClustered>& scratch) : scratch_(scratch) {
    if constexpr (kClustered) {
      if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
          device::barrier_init(&scratch_.values_here[i], 1);
          device::barrier_init(&scratch_.threads_here[i], 1);
        }
        device::barrier_init_fence();
      }
    }
  }

  int thread() const {
    const int of_block = kWarps == 1 ? lane_index() : static_cast<int>(threadIdx.x);
    return kClustered ? static_cast<int>(device::cluster_rank()) * kThreads + of_block : of_block;
  }

  template <class R>
  R max(R value) {
    value = warp_max_or_nan(value);
    exchange<1>(&value, [](R* a, const R* b) { a[0] = max_or_nan(a[0], b[0]); });
    return value;
  }

  // All threads of a group come to the same end at the same time.
  bool all(bool done) const { return done; }

  // To all warps, in lane i % 32, the largest of the values of threads i of all blocks.
  void gather_max(float value, float (&all)[kWarps]) {
    if constexpr (kWarps == 1) {
      all[0] = value;
    } else {
      auto& slots = scratch_.of_threads[gathers_ & 1];
      if constexpr (kClustered) {
        uint64_t* here = &scratch_.threads_here[gathers_ & 1];
        const float* own = &slots[device::cluster_rank()][threadIdx.x];
        const uint32_t blocks = device::cluster_size();
        if (threadIdx.x == 0) device::barrier_expect_bytes(here, blocks * kThreads * 4);
        for (uint32_t block = 0; block < blocks; ++block) {
          device::send(device::remote_address(own, block), value,
                       device::remote_address(here, block));
        }
        device::barrier_wait(here, gathers_ >> 1 & 1);
      } else {
        slots[0][threadIdx.x] = value;
        __syncthreads();
      }
#pragma unroll
      for (int w = 0; w < kWarps; ++w) all[w] = slots[0][w * device::kWarpSize + lane_index()];
      if constexpr (kClustered) {
        for (uint32_t block = 1; block < device::cluster_size(); ++block) {
#pragma unroll
          for (int w = 0; w < kWarps; ++w) {
            all[w] = max_or_nan(all[w], slots[block][w * device::kWarpSize + lane_index()]);
          }
        }
      }
      ++gathers_;
    }
  }

  template <class R>
  void sum(R& a, R& b) {
    warp_sum_pair(a, b);
    R both[] = {a, b};
    exchange<2>(both, [](R* x, const R* y) {
      x[0] += y[0];
      x[1] += y[1];
    });
    a = both[0];
    b = both[1];
  }

  template <class R>
  void sum(R& a, R& b, R& c) {
    warp_sum_pair(a, b);
    R all[] = {a, b, device::warp_sum(c)};
    exchange<3>(all, [](R* x, const R* y) {
      x[0] += y[0];
      x[1] += y[1];
      x[2] += y[2];
    });
    a = all[0];
    b = all[1];
    c = all[2];
  }

  // f32 holds counts up to 2^24 exactly; rows whose elements are counted by it are shorter.
  void sum_count_min(float& sum, int& count, float& least) {
    sum = device::warp_sum(sum);
    count = device::warp_sum_integer(count);
    least = -warp_max_or_nan(-least);
    float all[] = {sum, static_cast<float>(count), least};
    exchange<3>(all, [](float* x, const float* y) {
      x[0] += y[0];
      x[1] += y[1];
      x[2] = min(x[2], y[2]);
    });
    sum = all[0];
    count = static_cast<int>(all[1]);
    least = all[2];
  }
  int count(int mine) {
    float all = static_cast<float>(device::warp_sum_integer(mine));
    exchange<1>(&all, [](float* x, const float* y) { x[0] += y[0]; });
    return static_cast<int>(all);
  }

 private:
  template <int kCount, class R, class Combine>
  void exchange(R* values, Combine combine) {
    if constexpr (kWarps > 1) {
      auto& slots = scratch_.values[exchanges_ & 1];
      const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;
      int count = kWarps;  // of slots, a power of two
      if constexpr (kClustered) {
        uint64_t* here = &scratch_.values_here[exchanges_ & 1];
        const uint32_t blocks = device::cluster_size();
        count *= static_cast<int>(blocks);
        if (threadIdx.x == 0) device::barrier_expect_bytes(here, count * sizeof(slots[0]));
        if (const auto to = static_cast<uint32_t>(lane_index()); to < blocks) {
          float sent[4] = {};
#pragma unroll
          for (int i = 0; i < kCount; ++i) sent[i] = values[i];
          const auto* slot = slots[device::cluster_rank() * kWarps + static_cast<uint32_t>(warp)];
          device::send(device::remote_address(slot, to), sent, device::remote_address(here, to));
        }
        // A slot is written again two exchanges later, when all warps have sent what they made of
        // this one.
        device::barrier_wait(here, exchanges_ >> 1 & 1);
      } else {
        auto* own = reinterpret_cast<R*>(slots[warp]);
        if (lane_index() == 0) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) own[i] = values[i];
        }
        __syncthreads();
      }
      // A lane reads one warp's, or some; butterflies among the lanes.
      const auto* mine = reinterpret_cast<const R*>(slots[lane_index() % count]);
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = mine[i];
#pragma unroll
      for (int more = device::kWarpSize; more < kMostSlots; more += device::kWarpSize) {
        if (more >= count) break;
        combine(values, reinterpret_cast<const R*>(slots[more + lane_index()]));
      }
#pragma unroll
      for (int step = kClustered ? device::kWarpSize / 2 : kWarps / 2; step > 0; step /= 2) {
        if (step >= count) continue;
        R others[kCount];
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          others[i] = __shfl_xor_sync(device::kAllLanes, values[i], step);
        }
        combine(values, others);
      }
      ++exchanges_;
    }
  }

  GroupScratch<kWarps, kClustered>& scratch_;
  uint32_t exchanges_ = 0, gathers_ = 0;
};

// Sums of several values by a group's sum of one.
template <class G>
struct SumsOneByOne {
  void sum(float& a, float& b) const {
    group().sum(a);
    group().sum(b);
  }
  void sum(float& a, float& b, float& c) const {
    sum(a, b);
    group().sum(c);
  }

 private:
  const G& group() const { return static_cast<const G&>(*this); }
};

// kLanes neighbouring lanes, a power of two: several rows share a warp, and wait for each other.
template <int kLanes>
class LaneGroup : public SumsOneByOne<LaneGroup<kLanes>> {
 public:
  using SumsOneByOne<LaneGroup>::sum;
  static constexpr int kThreads = kLanes;

  int thread() const { return lane_index() % kLanes; }
  // A row without an answer does not keep the others of its warp waiting.
  void excuse() { excused_ = true; }
  bool all(bool done) const { return __all_sync(device::kAllLanes, done || excused_) != 0; }

  float max(float value) const {
    return combine(value, [](float a, float b) { return max_or_nan(a, b); });
  }
  int count(int mine) const {
    return combine(mine, [](int a, int b) { return a + b; });
  }
  void sum(float& a) const {
    a = combine(a, [](float x, float y) { return x + y; });
  }
  void sum_count_min(float& sum, int& count_of_all, float& least) const {
    this->sum(sum);
    count_of_all = count(count_of_all);
    least = combine(least, [](float a, float b) { return min(a, b); });
  }

 private:
  template <class R, class Combine>
  static R combine(R value, Combine of_two) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      value = of_two(value, __shfl_xor_sync(device::kAllLanes, value, step));
    }
    return value;
  }

  bool excused_ = false;
};

}  // namespace pullback::entmax
