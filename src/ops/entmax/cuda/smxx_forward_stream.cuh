// The forward of contiguous rows of any length that reads x once: sparse families.
//
// A warp walks along the row (each of several warps: along its own tiles) and stores zeros at once.
// What lies above a lower bound of the threshold goes to a list of the lane's own in shared memory.
// The bound is the threshold of what the warp has seen: of the lanes' largest elements after the
// first tile, of the lists whenever one of them has grown. At the end the threshold of the lists is
// the row's, and their elements are stored over the zeros, by the lanes that stored those.
// A row with more survivors than the lists hold is read again (smxx_forward_any.cuh).
#pragma once

#include "device/registers.cuh"
#include "ops/entmax/cuda/smxx_edge.cuh"
#include "ops/entmax/cuda/smxx_forward_any.cuh"
#include "ops/entmax/cuda/smxx_vector.cuh"

namespace pullback::entmax {

struct Survivor {
  float x;
  int at;  // from the first vector of the row on
};

// One lane's list, and the bound that its warp shares.
// kLength: elements that are added at a time, at most.
template <class P, int kLength>
class Survivors {
 public:
  Survivors(const P& power, Survivor* list) : power_(power), list_(list) {}

  float bound = -device::infinity<float>();  // of x: what is not above it is not in the support
  bool overflow = false;

  // Room for more; else the list has lost something.
  bool room() {
    if (count_ + kLength > kSurvivors) overflow = true;
    return count_ + kLength <= kSurvivors;
  }
  void add(float x, int at) {
    if (x > bound) list_[device::kWarpSize * count_++] = {x, at};
  }

  template <class Use>
  void for_each(const Use& use) const {
#pragma unroll 1
    for (int k = 0; k < count_; ++k) use(list_[device::kWarpSize * k]);
  }

  void raise(float largest, float theta) {
    bound = max(bound, bound_of_theta(power_, largest, theta));
  }

  // Raises the bound to the threshold of the warp's lists when one of them has become long.
  void tighten(float own_largest) {
    if (!__any_sync(device::kAllLanes, count_ > trigger_)) return;
    GroupScratch<1> none;
    Group<1> warp(none);
    const float seen = warp.max(own_largest);
    if (!(magnitude(seen) < device::infinity<float>())) return;
    // The largest that was seen may not be listed yet, and without it theta has no root above
    // P::start, from where steps would go on for ever.
    float own_listed = -device::infinity<float>();
    for_each([&](Survivor s) { own_listed = max(own_listed, s.x); });
    const float largest = warp.max(own_listed);
    const auto listed = [&](auto use) { for_each([&](Survivor s) { use(s.x - largest); }); };
    const float start = theta_of_bound(power_, largest, bound);
    const float theta = power_.with_rough(
        [&](const auto& rough) { return rise<float>(rough, start, warp, listed, 0x1p-6f).theta; });
    raise(largest, theta - 0x1p-20f);  // a step that passes the root leaves less
    raise(seen, P::start);
    int kept = 0;
    for_each([&](Survivor s) {
      if (s.x > bound) list_[device::kWarpSize * kept++] = s;
    });
    count_ = kept;
    const int longest = static_cast<int>(warp.max(static_cast<float>(count_)));
    trigger_ = min(max(kFirstTrigger, 2 * longest), kSurvivors - 2 * kLength);
  }

 private:
  static constexpr int kFirstTrigger = kSurvivors / 4;

  const P& power_;
  Survivor* list_;
  int count_ = 0;
  int trigger_ = kFirstTrigger;
};

// The bits of the survivors in the zeroed support. A byte of f32 belongs to two lanes.
template <class T, class List, class Active>
void store_survivor_bits(uint8_t* support, int64_t step, const List& list, const Active& active) {
  constexpr int kLanes = 8 / device::kVectorLength<T>;  // of a byte
#pragma unroll
  for (int turn = 0; turn < kLanes; ++turn) {
    if (lane_index() % kLanes == turn) {
      list.for_each([&](Survivor s) {
        if (!active(s)) return;
        volatile uint8_t* byte = support + s.at / 8 * step;
        *byte = static_cast<uint8_t>(*byte | 1u << s.at % 8);
      });
    }
    __syncwarp();
  }
}

// Rows as for forward_registers, of less than 2^30 elements. kWarps: of a row, which is a block of
// its own; but kStreamWarps rows of one warp share a block.
template <class T, Family kFamily, int kWarps, bool kEdges = false>
void forward_stream(const ForwardParams& p) {
  using device::infinity;
  constexpr int kLength = device::kVectorLength<T>;
  constexpr int kStep = device::kWarpSize * kLength;  // from a lane's vector to its next
  constexpr int kTile = kStreamVectors * kStep;
  extern __shared__ Survivor lists[];
  __shared__ GroupScratch<kWarps> scratch;
  Group<kWarps> group(scratch);
  const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize, lane = lane_index();
  const int64_t row = kWarps == 1 ? static_cast<int64_t>(blockIdx.x) * kStreamWarps + warp
                                  : static_cast<int64_t>(blockIdx.x);
  if (row >= p.rows.count) return;
  const T* x = static_cast<const T*>(p.x.data) + row_offset(p.rows, p.x, row);
  T* y = p.y.data ? static_cast<T*>(p.y.data) + row_offset(p.rows, p.y, row) : nullptr;
  uint8_t* support = !kEdges && p.support.data ? static_cast<uint8_t*>(p.support.data) +
                                                     row_offset(p.rows, p.support, row)
                                               : nullptr;
  const RowSpan<T, kEdges> span(x, static_cast<int>(p.rows.length));
  const int length = span.whole;  // of the vectors

  const Power<kFamily, float> power(p.alpha);
  Survivors<Power<kFamily, float>, kLength> survivors(
      power, lists + warp * kSurvivors * device::kWarpSize + lane);

  float own = -infinity<float>();  // this lane's largest
  if constexpr (kEdges) {
    x += span.head;
    if (y) y += span.head;
    if (group.thread() < span.edge) {
      const int at = span.edge_at(group.thread()) - span.head;
      own = device::to_real(x[at]);
      if (y) y[at] = device::from_real<T>(0.0f);
      survivors.add(own, at);
    }
  }
  int begin = (kWarps == 1 ? 0 : warp * kTile) + lane * kLength;
  const auto load = [&](Words(&tile)[kStreamVectors], int first) {
#pragma unroll
    for (int j = 0; j < kStreamVectors; ++j) {
      const int at = first + j * kStep;
      if (at < length) {
        tile[j] = load_words(x + at);
      } else {
#pragma unroll
        for (int w = 0; w < 4; ++w) tile[j].element[w] = kHiddenWord<T>;
      }
    }
  };
  bool first = true;
  Words tile[kStreamVectors], next[kStreamVectors];
  load(next, begin);
  for (; begin - lane * kLength < length; begin += kWarps * kTile) {
    uint32_t tops[kStreamVectors];
#pragma unroll
    for (int j = 0; j < kStreamVectors; ++j) tile[j] = next[j];
    load(next, begin + kWarps * kTile);
#pragma unroll
    for (int j = 0; j < kStreamVectors; ++j) tops[j] = max_of<T>(tile[j]);
    uint32_t top = tops[0];
#pragma unroll
    for (int j = 1; j < kStreamVectors; ++j) top = max_of_words<T>(top, tops[j]);
    own = max_or_nan(own, max_in_word<T>(top));
    if (first) {
      first = false;
      const float largest = warp_max_or_nan(own);
      if (magnitude(largest) < infinity<float>()) {
        GroupScratch<1> none;
        Group<1> alone(none);
        survivors.raise(largest, lower_bound(power, own - largest, alone));
      }
    }
#pragma unroll
    for (int j = 0; j < kStreamVectors; ++j) {
      const int at = begin + j * kStep;
      if (at < length) {
        if (y) store_words(y + at, Words{});
        if (support && at % 8 == 0) support[at / 8 * p.support.axis] = 0;
      }
      if (max_in_word<T>(tops[j]) > survivors.bound && survivors.room()) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          float element[kPerWord<T>];
          unpack<T>(tile[j].element[w], element);
#pragma unroll
          for (int k = 0; k < kPerWord<T>; ++k) {
            survivors.add(element[k], at + w * kPerWord<T> + k);
          }
        }
      }
      if ((j + 1) * kLength % kTightenLength == 0) survivors.tighten(own);
    }
  }

  const float largest = group.max(own);
  // All warps' bounds hold for the row. A list that has lost something spoils them all.
  survivors.bound = group.max(survivors.bound);
  const bool again = group.max(survivors.overflow ? 1.0f : 0.0f) > 0;
  const auto finish = [&](float tau, int size) {
    if (group.thread() != 0) return;
    if (p.tau.data) static_cast<float*>(p.tau.data)[row_offset(p.rows, p.tau, row)] = tau;
    if (p.support_size.data) {
      static_cast<int32_t*>(p.support_size.data)[row_offset(p.rows, p.support_size, row)] = size;
    }
  };
  const bool finite = magnitude(largest) < infinity<float>();
  if (!finite || again) {
    // The zeros above were stored by other lanes than the values to come.
    kWarps == 1 ? __syncwarp() : __syncthreads();
    RowOfAny<T> whole{x, nullptr, y, support, 1, 0, 1, p.support.axis, length};
    if constexpr (kEdges) {
      // Computed again: while x is read, no register is left for where the row begins.
      const int64_t same_row = device::kept(row);
      whole.x = static_cast<const T*>(p.x.data) + row_offset(p.rows, p.x, same_row);
      if (y) whole.y = static_cast<T*>(p.y.data) + row_offset(p.rows, p.y, same_row);
      whole.length = p.rows.length;
    }
    RowResult<float> result;
    if (finite) {
      result = row_of_family<kFamily>(whole, p.alpha, group, largest, own,
                                      p.support_size.data != nullptr);
    } else {
      result = degenerate_row(whole, group, !(largest < 0));
    }
    finish(result.tau, result.size);
    return;
  }
  const Threshold<float> threshold = solve<float>(
      power, [&](const auto&) { return theta_of_bound(power, largest, survivors.bound); }, group,
      [&](auto use) { survivors.for_each([&](Survivor s) { use(s.x - largest); }); },
      digits_wanted<T>(p));
  if (y) {
    survivors.for_each([&](Survivor s) {
      y[s.at] = device::from_real<T>(probability<T>(power, s.x - largest, threshold));
    });
  }
  const auto active = [&](Survivor s) {
    return power.excess(s.x - largest, threshold) > power.edge;
  };
  if constexpr (kFamily == Family::sparsemax) {
    if (support) store_survivor_bits<T>(support, p.support.axis, survivors, active);
  }
  int size = 0;
  if (p.support_size.data) {
    survivors.for_each([&](Survivor s) { size += active(s); });
    size = group.count(size);
  }
  finish(tau_of<decltype(power)>(p.alpha, largest, threshold), size);
}

}  // namespace pullback::entmax
