// The forward of contiguous rows of some dozens to some hundred elements: several rows a warp, each
// in the registers of a few lanes.
//
// All rows of a warp take steps until the last one has its threshold.
#pragma once

#include "ops/entmax/cuda/smxx_forward_registers.cuh"

namespace pullback::entmax {

// Rows as for forward_registers, up to kLanes * kVectors vectors long.
template <class T, Family kFamily, int kLanes, int kVectors>
void forward_lanes(const ForwardParams& p) {
  using device::infinity;
  constexpr int kCount = kHeld<T, kVectors>;
  constexpr int kRows = kLanesWarps * device::kWarpSize / kLanes;  // of a block
  LaneGroup<kLanes> group;
  const int thread = group.thread(), length = static_cast<int>(p.rows.length);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kLanes;
  constexpr bool kOwnAlpha = kFamily == Family::general;
  bool exists = row < p.rows.count;
  const auto alpha = [&] { return exists ? alpha_of<kOwnAlpha>(p, row) : p.alpha; };
  if (kOwnAlpha) exists = exists && is_general(alpha());
  Words held[kVectors];
  const T* x = static_cast<const T*>(p.x.data) + (exists ? row_offset(p.rows, p.x, row) : 0);
  load_held<T, kLanes>(held, x, exists ? length : 0, thread);

  uint32_t top = max_of<T>(held[0]);
#pragma unroll
  for (int j = 1; j < kVectors; ++j) top = max_of_words<T>(top, max_of<T>(held[j]));
  const float largest = group.max(max_in_word<T>(top));
  const bool finite = magnitude(largest) < infinity<float>();
  if (!finite) group.excuse();
  const float origin = finite ? largest : 0;
  float z[kCount];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float pair[kPerWord<T>];
      unpack<T>(held[j].element[w], pair);
#pragma unroll
      for (int k = 0; k < kPerWord<T>; ++k) {
        z[(j * 4 + w) * kPerWord<T> + k] = pair[k] - origin;
      }
    }
  }
  const auto all = [&](auto use) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) use(z[i]);
  };
  const auto count = [&](auto active) {
    int mine = 0;
    all([&](float v) { mine += active(v); });
    return group.count(mine);
  };
  const auto store = [&](auto value_of) {  // value_of(i)
    if (!p.y.data || !exists) return;
    T* y = static_cast<T*>(p.y.data) + row_offset(p.rows, p.y, row);
    const float fill = largest < 0 ? 0 : device::quiet_nan<float>();
    if (finite) {
      store_held<T, kLanes, kVectors>(y, length, thread, value_of);
    } else {
      store_held<T, kLanes, kVectors>(y, length, thread, [&](int) { return fill; });
    }
  };
  const auto finish = [&](float tau, int size) {
    if (thread != 0 || !exists) return;
    if (!finite) {
      const bool empty = largest < 0;
      tau = empty ? infinity<float>() : device::quiet_nan<float>();
      size = empty ? 0 : -1;
    }
    if (p.tau.data) static_cast<float*>(p.tau.data)[row_offset(p.rows, p.tau, row)] = tau;
    if (p.support_size.data) {
      static_cast<int32_t*>(p.support_size.data)[row_offset(p.rows, p.support_size, row)] = size;
    }
  };

  if constexpr (kFamily == Family::softmax) {
    const int size =
        p.support_size.data ? count([](float v) { return v > -infinity<float>(); }) : 0;
    float sum = 0, unused = 0;
    all([&](float& v) {
      v = exp_of(v);
      sum += v;
    });
    group.sum(sum, unused);
    const float scale = 1 / sum;
    store([&](int i) { return z[i] * scale; });
    finish(largest + log_of(sum), size);
  } else {
    const Power<kFamily, float> power(alpha());
    // Rows that share a warp take the same kind of steps.
    const bool by_bend =
        kOwnAlpha && __all_sync(device::kAllLanes, power.has_bend() || !exists) != 0;
    float tops[kPerWord<T>];
    unpack<T>(top, tops);
#pragma unroll
    for (float& of_lane : tops) of_lane -= origin;
    Threshold<float> threshold;
    if constexpr (kFamily == Family::sparsemax) {
      const float start = kVectors == 1 ? power.start : lower_bound(power, tops, group);
      threshold = {rise_of_sparsemax(start, group, all), 0, 1};
    } else {
      constexpr int kLength = device::kVectorLength<T>;
      const auto start_of = [&](const auto& rough) {
        if constexpr (kVectors == 1) {
          return Estimate{rough.start, rough.start};
        } else if constexpr (kFamily == Family::general) {
          const float bound = bound_of_mean(rough, tops, group);
          const auto sample = [&](auto use) {
#pragma unroll
            for (int j = 0; j < kVectors; ++j) use(z[j * kLength]);
          };
          return Estimate{theta_by_sample(rough, bound, tops, kLength, group, sample),
                          bound - kBoundSlack<decltype(power)>};
        } else {
          const float bound = lower_bound(power, tops, group);
          return Estimate{bound, bound};
        }
      };
      const int digits = digits_wanted<T>(p);
      if constexpr (kByLastPowers<T, kFamily>) {
        __shared__ Kept<T, kFamily, kLanesWarps * device::kWarpSize, kLanes, kCount> kept;
        Notes<kLanes, kCount> notes(kept);
        const bool closes = p.tau.data && !p.support_size.data;
        threshold = power.with_rough(by_bend, [&](const auto& rough) {
          return solve_and_store<T>(rough, z, notes, group, start_of, digits, closes, store);
        });
      } else {
        threshold = power.with_rough(by_bend, [&](const auto& rough) {
          return rise<float>(rough, start_of(rough).theta, group, all, rough.tolerance(digits));
        });
      }
    }
    const auto active = [&](float v) { return power.excess(v, threshold) > power.edge; };
    if constexpr (!kByLastPowers<T, kFamily>) {
      store([&](int i) { return probability<T>(power, z[i], threshold); });
    }
    if constexpr (kFamily == Family::sparsemax) {
      if (p.support.data) {
        uint8_t* support = static_cast<uint8_t*>(p.support.data) +
                           (exists ? row_offset(p.rows, p.support, row) : 0);
        store_held_bits<T, kLanes, kVectors>(support, p.support.axis, exists ? length : 0, thread,
                                             [&](int i) { return finite && active(z[i]); });
      }
    }
    finish(tau_of<decltype(power)>(alpha(), largest, threshold),
           p.support_size.data ? count(active) : 0);
  }
}

}  // namespace pullback::entmax
