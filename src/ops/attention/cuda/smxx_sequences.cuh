// The sequences of a varlen run: cu_seqlens, which nobody has checked, as a table that kernels can
// trust.
//
//   end_b = max(end_{b-1}, min(cu[b], total)), end before the first 0
// Sequence b has the rows [end_b, end_{b+1}), cut to the longest length. One thread block; in each
// turn a thread looks at one entry, and two scans over the block make the ends and the numbers of
// tiles.
#pragma once

#include "device/types.cuh"
#include "ops/attention/cuda/params.cuh"
#include "ops/attention/cuda/tuning.hpp"

namespace pullback::attention {

struct ScanPair {
  int64_t q, k;
};

// Inclusive scan over the kSequenceThreads threads of the block; `combine(before, own)`.
template <class Combine>
ScanPair block_scan(ScanPair value, const Combine& combine, ScanPair* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const ScanPair before = {__shfl_up_sync(0xffffffffu, value.q, step),
                             __shfl_up_sync(0xffffffffu, value.k, step)};
    if (lane >= step) value = combine(before, value);
  }
  if (lane == 31) shared[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; ++w) value = combine(shared[w], value);
  __syncthreads();
  return value;
}

inline int64_t entry_of(const void* cu, int64_t stride, int32_t wide, int64_t b, int64_t total) {
  const int64_t entry = wide ? static_cast<const int64_t*>(cu)[b * stride]
                             : static_cast<const int32_t*>(cu)[b * stride];
  return entry < total ? entry : total;
}

// Turn by turn, thread i has entry b + 1 and, from the thread before it, entry b: sequence b.
inline void list_sequences(const SequencesParams& p) {
  __shared__ ScanPair ends[kSequenceThreads + 1], sums[kSequenceThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  const auto larger = [](ScanPair a, ScanPair b) {
    return ScanPair{a.q > b.q ? a.q : b.q, a.k > b.k ? a.k : b.k};
  };
  const auto added = [](ScanPair a, ScanPair b) { return ScanPair{a.q + b.q, a.k + b.k}; };
  const auto ends_at = [&](int64_t b) {
    return ScanPair{entry_of(p.cu_q, p.stride_q, p.wide_q, b, p.total_q),
                    entry_of(p.cu_k, p.stride_k, p.wide_k, b, p.total_k)};
  };
  const ScanPair first = larger({0, 0}, ends_at(0));
  ScanPair end = first;     // of the sequences listed so far
  ScanPair tiles = {0, 0};  // in them
  for (int64_t begin = 0; begin <= p.sequences; begin += kSequenceThreads) {
    const int64_t b = begin + thread;
    ScanPair own = b < p.sequences ? ends_at(b + 1) : ScanPair{0, 0};
    own = larger(end, block_scan(own, larger, sums));
    if (thread == 0) ends[0] = end;
    ends[thread + 1] = own;
    __syncthreads();
    const ScanPair before = ends[thread];
    end = ends[kSequenceThreads];

    PackedSequence sequence = {};
    if (b < p.sequences) {
      const ScanPair length = {own.q - before.q, own.k - before.k};
      const bool last = b + 1 == p.sequences;
      sequence.rows = {before.q, length.q < p.max_q ? length.q : p.max_q,  //
                       before.k, length.k < p.max_k ? length.k : p.max_k};
      sequence.q_extent = last ? p.total_q - before.q : length.q;
      sequence.k_extent = last ? p.total_k - before.k : length.k;
    } else if (b == p.sequences) {
      sequence.q_extent = p.sequences > 0 ? first.q : p.total_q;
      sequence.k_extent = p.sequences > 0 ? first.k : p.total_k;
    }
    const ScanPair count = {(sequence.q_extent + p.q_tile - 1) / p.q_tile,
                            (sequence.k_extent + p.k_tile - 1) / p.k_tile};
    const ScanPair sum = added(tiles, block_scan(count, added, sums));
    if (b <= p.sequences) {
      sequence.first_q_tile = sum.q - count.q;
      sequence.first_k_tile = sum.k - count.k;
      p.table[b] = sequence;
    }
    if (b == p.sequences) {
      p.table[b + 1] = {};
      p.table[b + 1].first_q_tile = sum.q;
      p.table[b + 1].first_k_tile = sum.k;
    }
    if (thread == kSequenceThreads - 1) ends[0] = sum;
    __syncthreads();
    tiles = ends[0];
    __syncthreads();
  }
}

// The entry with tile `tile`, by all lanes of a warp: [0, B + 1]; B + 1: past the last one.
inline int64_t sequence_of_tile(const PackedSequence* table, int64_t count,
                                int64_t PackedSequence::*first_tile, int64_t tile) {
  // The last entry whose first tile is not past ours lies in [low, high].
  int64_t low = 0, high = count + 1;
  const int lane = threadIdx.x % 32;
  while (low < high) {
    const int64_t step = (high - low + 31) / 32;
    const int64_t probe = low + (lane + 1) * step;
    const bool not_past = probe <= high && table[probe].*first_tile <= tile;
    const int64_t passed = __popc(__ballot_sync(0xffffffffu, not_past));
    low += passed * step;
    const int64_t next = low + step - 1;
    high = next < high ? next : high;
  }
  return low;
}

}  // namespace pullback::attention
