// The forward of contiguous rows of many thousand elements: a block, or a cluster of blocks
// (sm_90), holds a row in registers from the one read to the one write, while its next row comes to
// shared memory. The blocks stay until all rows are done.
//
// All steps of the threshold run over the elements above a first lower bound, which is the
// threshold of the threads' largest elements, or of some of them: where powers cost much, over
// lists (smxx_candidates.cuh) or counts (smxx_counts.cuh) of them in shared memory, where y takes
// their place; where they cost little, or there is no room, over the vectors in the registers.
#pragma once

#include "device/async_copy.cuh"
#include "ops/entmax/cuda/forward_params.cuh"
#include "ops/entmax/cuda/smxx_candidates.cuh"
#include "ops/entmax/cuda/smxx_edge.cuh"

namespace pullback::entmax {

// Rows as for forward_registers, less than 2^30 and up to kResidentVectors vectors a thread. All
// blocks of a cluster have the edge, but count it once.
template <class T, Family kFamily, int kWarps, bool kClustered, bool kEdges = false>
void forward_resident(const ForwardParams& p) {
  using device::infinity;
  constexpr int kLength = device::kVectorLength<T>;
  constexpr int kThreads = kWarps * device::kWarpSize;
  extern __shared__ Words coming[];  // [kResidentVectors][kThreads], each thread's own
  constexpr int kComing = kResidentVectors * kThreads;
  constexpr bool kCollects = collects(kFamily, sizeof(T), kClustered);
  constexpr bool kLists = kCollects && sizeof(T) == 4, kCounts = kCollects && sizeof(T) == 2;
  Candidates<T, kWarps, kClustered, kCollects> candidates(
      coming + kComing, static_cast<int>(device::dynamic_shared_bytes() - kComing * sizeof(Words)));
  __shared__ GroupScratch<kWarps, kClustered> scratch;
  Group<kWarps, kClustered> group(scratch);
  const auto blocks = static_cast<int>(kClustered ? device::cluster_size() : 1);
  const int groups = static_cast<int>(gridDim.x) / blocks;
  // Made anew where a block of many threads has no register left for it.
  const auto rows_apart = [&] {
    if constexpr (!kClustered || kWarps <= 8) return groups;
    return static_cast<int>(gridDim.x / device::cluster_size());
  };
  // A block's elements lie side by side; those of vector j of this thread begin at begin + j kStep.
  constexpr int kStep = kThreads * kLength;
  int begin = static_cast<int>(threadIdx.x) * kLength, end = static_cast<int>(p.rows.length);
  if constexpr (kEdges) end = end / kLength * kLength;  // a row may have a vector less
  if constexpr (kClustered) {
    constexpr int kOfWarp = device::kWarpSize * kLength;
    const int slice = (end + blocks * kOfWarp - 1) / (blocks * kOfWarp) * kOfWarp;
    const int first = static_cast<int>(device::cluster_rank()) * slice;
    begin += first;
    end = min(end, first + slice);
  }

  const auto thread = static_cast<int>(threadIdx.x);
  const auto length = [&] { return static_cast<int>(p.rows.length); };
  const auto x_of = [&](int row) {
    return static_cast<const T*>(p.x.data) + row_offset(p.rows, p.x, row);
  };
  // How many elements the vectors of a row have from this thread's first on.
  const auto left = [&](const RowSpan<T, kEdges>& span) {
    return device::kept((kEdges ? min(end, span.whole) : end) - begin);
  };
  // Kept, as the compiler would make it anew for each vector that may not be there.
  const uint32_t own_coming = device::kept(device::shared_address(coming + threadIdx.x));
  constexpr uint32_t kComingStep = kThreads * sizeof(Words);
  float next_edge = 0;
  const auto prefetch = [&](int row) {
    if (row < p.rows.count) {
      const T* x = x_of(row);
      const RowSpan<T, kEdges> span(x, length());
      next_edge = load_edge<T, kEdges>(x, length(), thread);
      x += span.head + begin;
      const int count = left(span);
#pragma unroll
      for (int j = 0; j < kResidentVectors; ++j) {
        if (j * kStep < count) {
          device::async_copy(own_coming + j * kComingStep, x + j * kStep);
        }
      }
    }
    device::async_commit();
  };
  // All blocks have started before one writes into another's memory.
  if constexpr (kClustered) device::cluster_barrier();

  // The first step only asks for a row.
  int row = static_cast<int>(blockIdx.x) / blocks - rows_apart();
#pragma unroll 1
  for (; row < p.rows.count; row += rows_apart()) {
    HeldRow<T> held;
    const float edge = next_edge;
    if (row >= 0) {
      device::async_wait<0>();
      const int present = left(RowSpan<T, kEdges>(x_of(row), length()));
#pragma unroll
      for (int j = 0; j < kResidentVectors; ++j) {
        if (j * kStep < present) {
          held.vector[j] = device::load_shared<Words>(own_coming + j * kComingStep);
        } else {
#pragma unroll
          for (int w = 0; w < 4; ++w) held.vector[j].element[w] = kHiddenWord<T>;
        }
      }
    }
    prefetch(row + rows_apart());
    if (row < 0) continue;
    constexpr bool kOwnAlpha = kFamily == Family::general;
    if (kOwnAlpha && !is_general(alpha_of<kOwnAlpha>(p, row))) continue;

    // Where the edge counts for the cluster.
    const auto counted_edge = [&] {
      return kClustered && device::cluster_rank() != 0 ? -infinity<float>() : edge;
    };
    // Every warp looks at the largest of all threads; of those of a cluster's blocks, at 256.
    float tops[kWarps];
    const float top = max_in_word<T>(held.top());
    group.gather_max(kEdges ? max_or_nan(top, edge) : top, tops);
    float largest = tops[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) largest = max_or_nan(largest, tops[w]);
    largest = warp_max_or_nan(largest);
    const Power<kFamily, float> power(alpha_of<kOwnAlpha>(p, row));
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

    // store_vectors(store) calls store(vector of y, j) for all j.
    const auto store_y = [&](auto value_of, auto store_vectors) {
      if (!p.y.data) return;
      T* y = static_cast<T*>(p.y.data) + row_offset(p.rows, p.y, row);
      if (!kClustered || device::cluster_rank() == 0) {
        store_edge<T, kEdges>(y, length(), thread, [&] { return value_of(edge); });
      }
      const RowSpan<T, kEdges> span(y, length());
      y += span.head + begin;
      const int wanted = left(span);
      store_vectors([&](const Words& of_y, int j) {
        if (j * kStep < wanted) store_words(y + j * kStep, of_y);
      });
    };
    const auto store_bits = [&](auto active) {
      if (kEdges || !p.support.data) return;
      uint8_t* bytes = static_cast<uint8_t*>(p.support.data) + row_offset(p.rows, p.support, row);
      const int first = device::kept(begin);
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
    const auto every = [&](auto use) {
      held.template for_each_vector<kCollects>([&](const Words& of_x, int) {
        if (held.above(of_x, bound)) {
          held.for_each_in(of_x, [&](float x, int) { use(x - largest); });
        }
      });
      if constexpr (kEdges) use(counted_edge() - largest);
    };
    // How many elements of a row whose threads are `threads` are active.
    const auto count = [&](auto& threads, const auto& elements, auto active) {
      if (!p.support_size.data) return 0;
      int mine = 0;
      elements([&](auto element) {
        if (active(z_of(element))) mine += static_cast<int>(count_of(element));
      });
      return threads.count(mine);
    };

    float tau = infinity<float>();
    int size = 0;
    if (!(magnitude(largest) < infinity<float>())) {
      const bool empty = largest < 0;
      const float fill = empty ? 0 : device::quiet_nan<float>();
      const auto fill_of = [&](float) { return fill; };
      store_y(fill_of, [&](auto store) {
        const Words filled = held.map(Words{}, fill_of);
#pragma unroll 1
        for (int j = 0; j < kResidentVectors; ++j) store(filled, j);
      });
      store_bits([](float) { return false; });
      if (!empty) tau = fill, size = -1;
    } else if constexpr (kFamily == Family::softmax) {
      size = count(group, every, [](float z) { return z > -infinity<float>(); });
      const auto power_of_e = [&](float x) { return exp2_approx((x - largest) * 1.44269504f); };
      float sum = 0, unused = 0;
#pragma unroll
      for (int j = 0; j < kResidentVectors; ++j) {
        float part = 0;
        held.for_each_in(held.fresh(j), [&](float x, int) { part += power_of_e(x); });
        sum += part;
      }
      if constexpr (kEdges) sum += power_of_e(counted_edge());
      group.sum(sum, unused);
      const float scale = 1 / sum;
      const auto value_of = [&](float x) { return power_of_e(x) * scale; };
      store_y(value_of, [&](auto store) {
        held.template for_each_vector<false>(
            [&](const Words& of_x, int j) { store(held.map(of_x, value_of), j); });
      });
      tau = largest + log_of(sum);
    } else {
      const float lowest = theta_of_bound(power, largest, bound);
      const auto start_of = [&](const auto& rough) {
        if constexpr (kFamily != Family::general && !(kFamily == Family::entmax15 && kClustered)) {
          return lowest;
        } else {
          const float top_of_vectors = max_in_word<T>(held.top());
          const float own[] = {
              (kEdges ? max_or_nan(top_of_vectors, counted_edge()) : top_of_vectors) - largest};
          return theta_by_sample(rough, lowest, own, kLength, group, [&](auto use) {
            held.template for_each_vector<kCounts>([&](const Words& of_x, int) {
              float first[kPerWord<T>];
              unpack<T>(of_x.element[0], first);
              use(first[0] - largest);
            });
          });
        }
      };
      Threshold<float> threshold;
      const auto active = [&](float z) { return power.excess(z, threshold) > power.edge; };
      // By `elements`, which `threads` share.
      const auto settle = [&](auto& threads, const auto& start, const auto& elements) {
        if constexpr (kFamily == Family::sparsemax) {
          threshold = {rise_of_sparsemax(lowest, threads, elements), 0, 1};
        } else {
          threshold = solve<float>(power, start, threads, elements, digits_wanted<T>(p));
        }
        size = count(threads, elements, active);
      };
      const auto output = power_of_output<T>(power);
      const auto value_of = [&](float x) { return probability<T>(output, x - largest, threshold); };
      // A cluster's lists begin half way from the bound to where the sample says that the threshold
      // is; should that have been too far, all begins again from the bound.
      constexpr bool kTries = kLists && kClustered && kFamily == Family::general;
      float begin_of_steps = lowest, begin_of_list = lowest;
      if constexpr (kTries) {
        begin_of_steps = power.with_rough(start_of);
        begin_of_list = lowest + max(begin_of_steps - lowest, 0.0f) / 2;
        candidates.collect(held, bound_of_theta(power, largest, begin_of_list), largest);
      } else {
        candidates.collect(held, bound, largest);
      }
      bool settled = candidates.complete();
      // Each block counts all of a cluster's values by itself.
      const auto each = [&](auto use) {
        candidates.for_each(largest, use);
        if constexpr (kEdges) use((kCounts ? edge : counted_edge()) - largest);
      };
      if constexpr (kLists) {
        // Threads go either way.
        const auto any = [&](auto use) { settled ? each(use) : every(use); };
        if constexpr (kTries) {
          for (bool first = true;; first = false) {
            settle(
                group, [&](const auto&) { return begin_of_steps; }, any);
            if (!first || threshold.theta >= begin_of_list) break;
            settled = false;
          }
        } else {
          settle(group, start_of, any);
        }
      } else {
        if (settled) {
          if constexpr (kCounts) {
            candidates.share(group, [&](auto& threads) {
              settle(
                  threads, [&](const auto&) { return lowest; }, each);
            });
          }
        } else {
          settle(group, start_of, every);
        }
      }
      if (settled && p.y.data) candidates.replace(value_of);
      store_y(value_of, [&](auto store) {
        if (settled) {
          held.template for_each_vector<false>(
              [&](const Words& x_or_places, int j) { store(candidates.look_up(x_or_places), j); });
        } else {
          held.template for_each_vector<kCollects>([&](const Words& of_x, int j) {
            store(held.above(of_x, bound) ? held.map(of_x, value_of) : Words{}, j);
          });
        }
      });
      if constexpr (kFamily == Family::sparsemax) {
        store_bits([&](float x) { return active(x - largest); });
      }
      tau = tau_of<decltype(power)>(alpha_of<kOwnAlpha>(p, row), largest, threshold);
    }
    if (group.thread() == 0) {
      if (p.tau.data) static_cast<float*>(p.tau.data)[row_offset(p.rows, p.tau, row)] = tau;
      if (p.support_size.data) {
        static_cast<int32_t*>(p.support_size.data)[row_offset(p.rows, p.support_size, row)] = size;
      }
    }
  }
  // No block leaves while another may read its counts.
  if constexpr (kClustered && kCounts) device::cluster_barrier();
}

}  // namespace pullback::entmax
