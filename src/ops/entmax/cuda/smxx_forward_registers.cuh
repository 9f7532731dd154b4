// The forward of contiguous rows of at most a few thousand elements: the row stays in the registers
// of a warp or a block from the one read to the one write.
//
// All steps of the threshold run over all elements. The first lower bound, from the largest element
// of each lane alone, leaves one to four of them.
#pragma once

#include "device/shared.cuh"
#include "ops/entmax/cuda/forward_params.cuh"
#include "ops/entmax/cuda/smxx_bounds.cuh"
#include "ops/entmax/cuda/smxx_edge.cuh"
#include "ops/entmax/cuda/smxx_vector.cuh"

namespace pullback::entmax {

template <class T, int kVectors>
inline constexpr int kHeld = kVectors * device::kVectorLength<T>;  // elements of a lane

// Elements of vector j of a row's thread begin at vector_begin(j).
template <class T, int kThreads>
int vector_begin(int j, int thread) {
  return (j * kThreads + thread) * device::kVectorLength<T>;
}

template <class T, int kThreads, int kVectors, class ValueOf>
void store_held(T* to, int length, int thread, const ValueOf& value_of) {
  constexpr int kLength = device::kVectorLength<T>;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int begin = vector_begin<T, kThreads>(j, thread);
    if (begin >= length) break;
    Words packed;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float x[kPerWord<T>];
#pragma unroll
      for (int k = 0; k < kPerWord<T>; ++k) x[k] = value_of(j * kLength + w * kPerWord<T> + k);
      packed.element[w] = pack<T>(x);
    }
    store_words(to + begin, packed);
  }
}

// Bit k of the result: element k of this thread's vector j is active.
template <class T, int kThreads, int kVectors, class Active>
void store_held_bits(uint8_t* to, int64_t step, int length, int thread, const Active& active) {
  constexpr int kLength = device::kVectorLength<T>;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int begin = vector_begin<T, kThreads>(j, thread);
    unsigned bits = 0;
#pragma unroll
    for (int k = 0; k < kLength; ++k) bits |= (active(j * kLength + k) ? 1u : 0u) << k;
    // Two lanes make a byte of f32.
    if constexpr (kLength == 4) bits |= __shfl_down_sync(device::kAllLanes, bits, 1) << 4;
    if (begin % 8 == 0 && begin < length) to[begin / 8 * step] = static_cast<uint8_t>(bits);
  }
}

template <class T, int kThreads, int kVectors>
void load_held(Words (&held)[kVectors], const T* x, int length, int thread) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int begin = vector_begin<T, kThreads>(j, thread);
    if (begin < length) {
      held[j] = load_words(x + begin);
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w) held[j].element[w] = kHiddenWord<T>;
    }
  }
}

// What the threads keep of their kCount elements, in shared memory, as registers are what bounds
// the number of warps: the powers that value_after_step() takes, or, where few elements are above a
// first bound, a list of these. kLanes threads share a row or a warp's part of it, and keep the
// same. T and kFamily without such: nothing.
template <class T, Family kFamily, int kThreads, int kLanes, int kCount>
struct Kept {
  static constexpr bool kUsed = kByLastPowers<T, kFamily>;
  // Fours of elements. Neighbouring rows of a warp are in different banks.
  static constexpr int kOfRow =
      ((kCount + 3) / 4 * 4 + (kLanes < device::kWarpSize ? 1 : 0)) * kLanes;

  alignas(16) float of[kUsed ? kThreads / kLanes : 1][kUsed ? kOfRow : 4];
};

template <int kLanes, int kCount>
class Notes {
 public:
  template <class Memory>
  explicit Notes(Memory& memory)
      : powers_(memory.of[threadIdx.x / kLanes]),
        first_(device::shared_address(powers_) + lane() * 4) {}

  float& power(int i) { return powers_[(i / 4 * kLanes + lane()) * 4 + i % 4]; }

  // The list: elements of z above `bound`, one under the other. Some that count for nothing fill
  // the last four.
  void collect(const float (&z)[kCount], float bound) {
    bound_ = bound;
    end_ = next_ = first_;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (z[i] > bound) add(z[i]);
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if ((end_ - first_) % (4 * kStep) != 0) add(-device::infinity<float>());
    }
  }
  template <class Use>
  void for_each(const Use& use) const {
#pragma unroll 1
    for (uint32_t at = first_; at != end_; at += 4 * kStep) {
      float z[4];
      load(z, at);
#pragma unroll
      for (int i = 0; i < 4; ++i) use(z[i]);
    }
  }
  template <class ValueOf>
  void replace(const ValueOf& value_of) const {
#pragma unroll 1
    for (uint32_t at = first_; at != end_; at += 4 * kStep) {
      float z[4];
      load(z, at);
#pragma unroll
      for (int i = 0; i < 4; ++i) store(at + i * kStep, value_of(z[i]));
    }
  }
  // What replaced the next of all elements; 0 below the bound.
  float look_up(float z) {
    float value = 0;
    if (z > bound_) {
      value = __uint_as_float(device::load_shared_word(next_));
      next_ += kStep;
    }
    return value;
  }

 private:
  static constexpr uint32_t kStep = kLanes * 4;

  static int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  static void store(uint32_t at, float z) { device::store_shared(at, __float_as_uint(z)); }
  static void load(float (&z)[4], uint32_t at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) z[i] = __uint_as_float(device::load_shared_word(at + i * kStep));
  }
  void add(float z) {
    store(end_, z);
    end_ += kStep;
  }

  float* powers_;
  uint32_t first_, end_ = 0, next_ = 0;
  float bound_ = 0;
};

// Where less than a kListed-th of a row's elements is above a bound, steps take less by a list.
inline constexpr int kListed = 4;

// Of p, at the edge of the support: as little as may be lost of a gradient of 16 bits.
inline constexpr float kLeastSlope = 0x1p-10f;

// The threshold of a row of a 16-bit type and its y, of rough powers. start_of(power): an Estimate;
// store(value_of): y from an element's index. `digits` are wanted of p. `closes`: only for tau, and
// z is not needed any more; then, where p is smooth, y comes along with one more step; else from
// the powers of the last evaluation.
template <class T, class P, int kLanes, int kCount, class G, class StartOf, class Store>
Threshold<float> solve_and_store(const P& power, float (&z)[kCount], Notes<kLanes, kCount>& notes,
                                 G& group, const StartOf& start_of, int digits, bool closes,
                                 const Store& store) {
  const Estimate start = start_of(power);
  const auto all = [&](auto use) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) use(z[i], notes.power(i));
  };
  const unsigned lanes = (0xffffffffu >> (32 - kLanes)) << (lane_index() / kLanes * kLanes);
  bool listed = false;
  Threshold<float> found;
  if constexpr (P::smooth) {
    // y is of powers at the threshold, then: no series has to reach there from where a step began.
    constexpr int kCloser = 3;
    const float tolerance = power.tolerance(closes ? kDigits<T> - kCloser : digits);
    found = rise<float>(power, start.theta, group, all, tolerance);
    if (closes) {
      Sums<float> sums;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float e = power.excess(z[i], found.theta);
        const float of_slope = power.slope(e);
        z[i] = of_slope * e;
        sums.f += z[i];
        sums.slope += of_slope;
      }
      store([&](int i) { return z[i]; });
      group.sum(sums.f, sums.slope);
      // So little is left that Newton's step on f squares it away.
      found.rest = quotient(sums.f - 1, power.descent(sums.slope));
      return found;
    }
  } else {
    constexpr int kLength = device::kVectorLength<T>;
    if constexpr (kCount > kLength) {
      // The first element of each vector tells how many are above the bound, of a group of lanes.
      const float bound = start.bound * power.inverse;  // of z
      int above = 0;
#pragma unroll
      for (int i = 0; i + kLength <= kCount; i += kLength) {
        above += __popc(__ballot_sync(device::kAllLanes, z[i] > bound) & lanes);
      }
      listed = above * kListed < kCount / kLength * kLanes;
      if (listed) notes.collect(z, bound);
    }
    const auto elements = [&](auto use) { listed ? notes.for_each(use) : all(use); };
    found = rise<float>(power, start.theta, group, elements, power.tolerance(digits));
  }
  // Within a step of the edge the series may take for 0 what is next to nothing; backward it is
  // not, where the slope of p there, e^(1/b - 1), is steep.
  const float reach = fabsf(found.step);
  bool near = false;
  if (!listed && rough_power_of(reach, power.inverse - 1) > kLeastSlope) {
    uint32_t least = ~0u;  // of the bits of e above 0, less one
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      least = min(least, __float_as_uint(power.excess(z[i], found.theta)) - 1);
    }
    near = least < __float_as_uint(reach);
  }
  // A list takes the place of powers, which lie among those of the row's other lanes.
  __syncwarp();
  if ((__ballot_sync(device::kAllLanes, near) & lanes) != 0) {
    listed = true;
    notes.collect(z, found.theta * power.inverse);
  }
  if (listed) {
    notes.replace([&](float v) { return power.value(power.excess(v, found.theta)); });
    store([&](int i) { return notes.look_up(z[i]); });
  } else {
    store([&](int i) {
      return power.value_after_step(power.excess(z[i], found.theta), notes.power(i), found.step);
    });
  }
  return found;
}

// edge: the element that the thread has beside its vectors, where kEdges; see load_edge().
template <class T, Family kFamily, bool kEdges, int kWarps, int kVectors>
void forward_held(const ForwardParams& p, int64_t row, const Words (&held)[kVectors], float edge,
                  Group<kWarps>& group) {
  constexpr bool kOwnAlpha = kFamily == Family::general;
  if (kOwnAlpha && !is_general(alpha_of<kOwnAlpha>(p, row))) return;
  constexpr int kThreads = kWarps * device::kWarpSize;
  constexpr int kOfVectors = kHeld<T, kVectors>;
  constexpr int kCount = kOfVectors + (kEdges ? 1 : 0);
  constexpr int kLength = device::kVectorLength<T>;
  const int thread = group.thread();
  const int length = static_cast<int>(p.rows.length);
  uint32_t largest_word = max_of<T>(held[0]);
#pragma unroll
  for (int j = 1; j < kVectors; ++j)
    largest_word = max_of_words<T>(largest_word, max_of<T>(held[j]));
  const auto with_edge = [&](float largest) {
    return kEdges ? max_or_nan(largest, edge) : largest;
  };
  // Every warp looks at the largest of all threads.
  constexpr int kTops = kWarps == 1 ? kPerWord<T> : kWarps;
  float tops[kTops];
  if constexpr (kWarps == 1) {
    unpack<T>(largest_word, tops);
    tops[0] = with_edge(tops[0]);
  } else {
    group.gather_max(with_edge(max_in_word<T>(largest_word)), tops);
  }
  float largest = tops[0];
#pragma unroll
  for (int w = 1; w < kTops; ++w) largest = max_or_nan(largest, tops[w]);
  largest = warp_max_or_nan(largest);

  // Computed where they are used: they need no registers before.
  const auto store = [&](auto value_of) {  // value_of(i)
    if (!p.y.data) return;
    T* y = static_cast<T*>(p.y.data) + row_offset(p.rows, p.y, row);
    const RowSpan<T, kEdges> span(y, length);
    store_held<T, kThreads, kVectors>(y + span.head, span.whole, thread, value_of);
    store_edge<T, kEdges>(y, length, thread, [&] { return value_of(kOfVectors); });
  };
  const auto support_of_row = [&] {
    return p.support.data
               ? static_cast<uint8_t*>(p.support.data) + row_offset(p.rows, p.support, row)
               : nullptr;
  };
  const auto finish = [&](float tau, int size) {
    if (thread != 0) return;
    if (p.tau.data) static_cast<float*>(p.tau.data)[row_offset(p.rows, p.tau, row)] = tau;
    if (p.support_size.data) {
      static_cast<int32_t*>(p.support_size.data)[row_offset(p.rows, p.support_size, row)] = size;
    }
  };

  if (!(magnitude(largest) < device::infinity<float>())) {
    const bool empty = largest < 0;
    const float fill = empty ? 0 : device::quiet_nan<float>();
    store([&](int) { return fill; });
    if constexpr (!kEdges) {
      if (uint8_t* support = support_of_row()) {
        store_held_bits<T, kThreads, kVectors>(support, p.support.axis, length, thread,
                                               [](int) { return false; });
      }
    }
    finish(empty ? device::infinity<float>() : fill, empty ? 0 : -1);
    return;
  }

  float z[kCount];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float pair[kPerWord<T>];
      unpack<T>(held[j].element[w], pair);
#pragma unroll
      for (int k = 0; k < kPerWord<T>; ++k) {
        z[j * kLength + w * kPerWord<T> + k] = pair[k] - largest;
      }
    }
  }
  if constexpr (kEdges) z[kOfVectors] = edge - largest;
  // How many elements `active` holds for, in the row.
  const auto count = [&](auto active) {
    int mine = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) mine += active(z[i]);
    return group.count(mine);
  };

  if constexpr (kFamily == Family::softmax) {
    float sum = 0, unused = 0;
    const int size =
        p.support_size.data ? count([](float v) { return v > -device::infinity<float>(); }) : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      z[i] = exp_of(z[i]);
      sum += z[i];
    }
    group.sum(sum, unused);
    const float scale = 1 / sum;
    store([&](int i) { return z[i] * scale; });
    finish(largest + log_of(sum), size);
  } else {
    const Power<kFamily, float> power(alpha_of<kOwnAlpha>(p, row));
#pragma unroll
    for (int w = 0; w < kTops; ++w) tops[w] -= largest;
    const auto all = [&](auto use) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) use(z[i]);
    };
    Threshold<float> threshold;
    if constexpr (kFamily == Family::sparsemax) {
      threshold = {rise_of_sparsemax(warp_bound(power, tops), group, all), 0, 1};
    } else {
      const auto start_of = [&](const auto& rough) {
        if constexpr (kFamily != Family::general) {
          return warp_bound(power, tops);
        } else {
          WarpOfFractions<kTops> warp;
          Estimate found = estimate(rough, tops, warp);
          const auto sample = [&](auto use) {
#pragma unroll
            for (int j = 0; j < kVectors; ++j) use(z[j * kLength]);
          };
          if constexpr (kWarps == 1) {
            found.theta = theta_by_sample(rough, found.theta, tops, kLength, group, sample);
          } else {
            const float own[] = {with_edge(max_in_word<T>(largest_word)) - largest};
            found.theta = theta_by_sample(rough, found.theta, own, kLength, group, sample);
          }
          if constexpr (kByLastPowers<T, kFamily>) {
            return found;
          } else {
            return found.theta;
          }
        }
      };
      if constexpr (kByLastPowers<T, kFamily>) {
        constexpr int kBlock = (kWarps == 1 ? kSingleWarps : kWarps) * device::kWarpSize;
        __shared__ Kept<T, kFamily, kBlock, device::kWarpSize, kCount> kept;
        Notes<device::kWarpSize, kCount> notes(kept);
        const bool closes = p.tau.data && !p.support_size.data;
        threshold = power.with_rough([&](const auto& rough) {
          return solve_and_store<T>(rough, z, notes, group, start_of, digits_wanted<T>(p), closes,
                                    store);
        });
      } else {
        threshold = solve<float>(power, start_of, group, all, digits_wanted<T>(p));
      }
    }
    const auto active = [&](float v) { return power.excess(v, threshold) > power.edge; };
    if constexpr (!kByLastPowers<T, kFamily>) {
      store([&](int i) { return probability<T>(power, z[i], threshold); });
    }
    if constexpr (kFamily == Family::sparsemax && !kEdges) {
      if (uint8_t* support = support_of_row()) {
        store_held_bits<T, kThreads, kVectors>(support, p.support.axis, length, thread,
                                               [&](int i) { return active(z[i]); });
      }
    }
    finish(tau_of<decltype(power)>(alpha_of<kOwnAlpha>(p, row), largest, threshold),
           p.support_size.data ? count(active) : 0);
  }
}

// Rows are `length` elements, a multiple of the vector length, and begin at multiples of 16 bytes
// in x and y, where the axis has unit stride. No mask, no offsets; but for Family::general, which
// leaves rows of others, one alpha. kEdges: of any
// length, and wherever they begin, alike in x and y; no support is wanted, whose bits count from
// there.
template <class T, Family kFamily, int kWarps, int kVectors, bool kEdges = false>
void forward_registers(const ForwardParams& p) {
  __shared__ GroupScratch<kWarps> scratch;
  Group<kWarps> group(scratch);
  constexpr int kRows = kWarps == 1 ? kSingleWarps : 1;  // of a block
  const int length = static_cast<int>(p.rows.length);
  int64_t row = static_cast<int64_t>(blockIdx.x) * kRows;
  if constexpr (kRows > 1) row += threadIdx.x / device::kWarpSize;
  if (row >= p.rows.count) return;
  // Returns the element of the edge.
  const auto load = [&](Words(&to)[kVectors], int64_t of_row) {
    const T* x = static_cast<const T*>(p.x.data) + row_offset(p.rows, p.x, of_row);
    const RowSpan<T, kEdges> span(x, length);
    load_held<T, kWarps * device::kWarpSize>(to, x + span.head, span.whole, group.thread());
    return load_edge<T, kEdges>(x, length, group.thread());
  };
  Words held[kVectors];
  float edge = load(held, row);
  if constexpr (!walks_over_rows(kFamily, sizeof(T), kWarps)) {
    forward_held<T, kFamily, kEdges>(p, row, held, edge, group);
  } else {
    while (true) {
      const int64_t next_row = row + static_cast<int64_t>(gridDim.x) * kRows;
      Words next[kVectors];
      float next_edge = 0;
      if (next_row < p.rows.count) next_edge = load(next, next_row);
      forward_held<T, kFamily, kEdges>(p, row, held, edge, group);
      if (next_row >= p.rows.count) return;
      row = next_row;
      edge = next_edge;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) held[j] = next[j];
    }
  }
}

}  // namespace pullback::entmax
