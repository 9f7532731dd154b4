// Stable radix sort of (id, row) pairs for plan_permutation, least significant digit first. A pass
// counts digits per tile of pairs, sums the counts in (digit, tile) order, and moves the pairs; so
// the result is that of a serial counting sort. Ids that are out of range sort as segment S.
#pragma once

#include "device/warp.cuh"
#include "ops/segment/cuda/smxx_tile.cuh"

namespace pullback::segment_cuda {

template <class Word>
struct Pair {
  Word id, row;
};

template <class Word>
Pair<Word> pair_at(const SortParams& p, int64_t i) {
  if (!p.first) return static_cast<const Pair<Word>*>(p.from)[i];
  const int64_t id = index_at(p.ids, i);
  return {static_cast<Word>(id >= 0 && id < p.segments ? id : p.segments), static_cast<Word>(i)};
}

template <class Word>
int digit_of(const SortParams& p, const Pair<Word>& pair) {
  return static_cast<int>(pair.id >> p.shift) & (kDigits - 1);
}

template <class Word>
void sort_count(const SortParams& p) {
  __shared__ uint32_t count[kDigits];
  for (int digit = threadIdx.x; digit < kDigits; digit += kSortThreads) count[digit] = 0;
  __syncthreads();
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kSortTile;
  for (int64_t i = base + threadIdx.x; i < base + kSortTile && i < p.rows; i += kSortThreads) {
    atomicAdd(&count[digit_of(p, pair_at<Word>(p, i))], 1u);
  }
  __syncthreads();
  for (int digit = threadIdx.x; digit < kDigits; digit += kSortThreads) {
    p.counts[digit * p.tiles + blockIdx.x] = count[digit];
  }
}

// By one block: counts become the places where a tile's pairs with that digit go.
inline void sort_sum(const SortParams& p) {
  __shared__ int64_t scan[kSortSumThreads];
  const int thread = threadIdx.x;
  const int64_t count = kDigits * p.tiles;
  int64_t carry = 0;
  for (int64_t base = 0; base < count; base += kSortSumThreads) {
    const int64_t i = base + thread;
    const int64_t own = i < count ? p.counts[i] : 0;
    scan[thread] = own;
    __syncthreads();
    for (int step = 1; step < kSortSumThreads; step *= 2) {
      const int64_t other = thread >= step ? scan[thread - step] : 0;
      __syncthreads();
      scan[thread] += other;
      __syncthreads();
    }
    if (i < count) p.places[i] = carry + scan[thread] - own;
    carry += scan[kSortSumThreads - 1];
    __syncthreads();
  }
}

// A warp moves consecutive pairs, 32 at a time, so that equal digits keep their order.
template <class Word>
void sort_move(const SortParams& p) {
  constexpr int kWarps = kSortThreads / device::kWarpSize;
  constexpr int kWarpRows = kSortTile / kWarps;
  __shared__ uint32_t count[kWarps][kDigits];
  const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;
  const int lane = threadIdx.x % device::kWarpSize;
  for (int i = threadIdx.x; i < kWarps * kDigits; i += kSortThreads) (&count[0][0])[i] = 0;
  __syncthreads();
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kSortTile + warp * kWarpRows;
  for (int step = 0; step < kWarpRows; step += device::kWarpSize) {
    const int64_t i = base + step + lane;
    if (i < p.rows) atomicAdd(&count[warp][digit_of(p, pair_at<Word>(p, i))], 1u);
  }
  __syncthreads();
  for (int digit = threadIdx.x; digit < kDigits; digit += kSortThreads) {
    uint32_t before = 0;
    for (int other = 0; other < kWarps; ++other) {
      const uint32_t own = count[other][digit];
      count[other][digit] = before;
      before += own;
    }
  }
  __syncthreads();
  for (int step = 0; step < kWarpRows; step += device::kWarpSize) {
    const int64_t i = base + step + lane;
    const bool valid = i < p.rows;
    Pair<Word> pair{};
    int digit = kDigits;  // of no pair
    if (valid) {
      pair = pair_at<Word>(p, i);
      digit = digit_of(p, pair);
    }
    const uint32_t same = __match_any_sync(device::kAllLanes, digit);
    const uint32_t before = same & ((1u << lane) - 1);
    uint32_t rank = 0;
    if (valid) rank = count[warp][digit] + static_cast<uint32_t>(__popc(before));
    __syncwarp();
    if (valid && before == 0) count[warp][digit] += static_cast<uint32_t>(__popc(same));
    __syncwarp();
    if (!valid) continue;
    const int64_t to = p.places[digit * p.tiles + blockIdx.x] + rank;
    static_cast<Pair<Word>*>(p.to)[to] = pair;
  }
}

inline void set_index(const Indices& indices, int64_t i, int64_t value) {
  void* data = const_cast<void*>(indices.data);
  if (indices.wide) {
    static_cast<int64_t*>(data)[i * indices.stride] = value;
  } else {
    static_cast<int32_t*>(data)[i * indices.stride] = static_cast<int32_t>(value);
  }
}

// Rows in their order, and for each segment the number of ids below it, by bisection.
template <class Word>
void sort_store(const SortParams& p) {
  const auto* pairs = static_cast<const Pair<Word>*>(p.from);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kSortThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kSortThreads;
  if (p.permutation.data != nullptr) {
    for (int64_t r = thread; r < p.rows; r += threads) {
      set_index(p.permutation, r, static_cast<int64_t>(pairs[r].row));
    }
  }
  if (p.offsets.data == nullptr) return;
  for (int64_t s = thread; s <= p.segments; s += threads) {
    int64_t low = 0, high = p.rows;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (static_cast<int64_t>(pairs[middle].id) >= s) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    set_index(p.offsets, s, low);
  }
}

}  // namespace pullback::segment_cuda
