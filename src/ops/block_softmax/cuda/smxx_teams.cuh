// Which rows a thread works on, and reductions over the threads that share a row.
//
// A row (z, h, r, i) is `blocks` pieces of b elements. Its team is 2 to 256 threads. Block rows are
// grouped by length into classes with a team size each; longer classes come first in the grid, so
// that short rows fill the gaps at its end.
#pragma once

#include "device/dependent.cuh"
#include "device/warp.cuh"
#include "ops/block_softmax/cuda/params.cuh"
#include "ops/block_softmax/cuda/smxx_powers.cuh"
#include "ops/block_softmax/cuda/tuning.hpp"

namespace pullback::block_softmax {

using namespace device;

struct Place {
  BlockRow block_row;
  uint32_t row;     // in the block
  uint32_t thread;  // in the team
  uint32_t team;
  uint32_t row_mask;  // the bits of the lane that are the row's
  uint32_t slot;      // the row's number among those of the thread block
  uint32_t warp;      // of the unit's
  uint32_t warps;     // of a unit
};

inline uint32_t divide(uint32_t value, const Divisor& by) {
  value >>= by.shift;
  return by.magic == 0 ? value : __umulhi(value, by.magic);
}

inline const RowClass& find_class(const Schedule& schedule, uint32_t cta) {
  int index = 0;
  while (index + 1 < schedule.class_count && cta >= schedule.classes[index + 1].first_cta) ++index;
  return schedule.classes[index];
}

// `warp` is the number of this warp in the unit.
inline Place place_of(const Schedule& schedule, const RowClass& row_class, uint32_t unit,
                      uint32_t warp) {
  Place place;
  place.warp = warp;
  place.warps = row_class.warps;
  const uint32_t block_row = divide(unit, row_class.units_per_block_row);
  const uint32_t group = unit - block_row * row_class.units_per_block_row.value;
  place.block_row = schedule.block_rows[row_class.first_block_row + block_row];

  const uint32_t lane = threadIdx.x % kWarpSize;
  const uint32_t segment = row_class.segment_shift, rows = row_class.row_shift;
  place.slot = lane >> segment & ((1u << rows) - 1);
  place.row = (group << rows) + place.slot;
  place.row_mask = ((1u << rows) - 1) << segment;
  const uint32_t low = lane & ((1u << segment) - 1);
  const uint32_t high = (lane >> (segment + rows)) + (warp << (5 - segment - rows));
  place.thread = high << segment | low;
  place.team = kWarpSize * place.warps >> rows;
  return place;
}

// For kernels in which a block of kWarps warps takes one unit or several. A unit that the last
// block is too large for has rows without blocks.
inline Place find_place(const Schedule& schedule) {
  const RowClass& row_class = find_class(schedule, blockIdx.x);
  const uint32_t warp = threadIdx.x / kWarpSize;
  const uint32_t of_block = (warp << row_class.units_shift) / kWarps;
  const uint32_t unit = (blockIdx.x - row_class.first_cta << row_class.units_shift) + of_block;
  const bool exists = unit < row_class.units;
  Place place = place_of(schedule, row_class, exists ? unit : 0, warp - of_block * row_class.warps);
  if (!exists) place.block_row.blocks = 0;
  place.slot += of_block << row_class.row_shift;
  return place;
}

struct Maximum {
  template <class R>
  R operator()(R a, R b) const {
    return larger(a, b);
  }
};
struct Sum {
  template <class R>
  R operator()(R a, R b) const {
    return a + b;
  }
};

// Over those lanes of a warp that share the row.
template <class Operation, class R>
R reduce_lanes(R value, const Place& place) {
#pragma unroll
  for (uint32_t step = 1; step < kWarpSize; step *= 2) {
    if (!(place.row_mask & step)) {
      value = Operation()(value, __shfl_xor_sync(kAllLanes, value, step));
    }
  }
  return value;
}

// Rows of a unit, at most.
inline constexpr int kMaxUnitRows = 16;

template <class R>
struct alignas(2 * sizeof(R)) Two {
  R first, second;
};
// What the warps of a thread block leave for each other: those of a unit side by side, for each of
// its rows.
template <class R>
using OfWarps = Two<R>[kWarps * kMaxUnitRows / 2];

// Over the team, in an order that the class fixes; the result is on all of its threads.
// `shared` serves one call only.
template <class Operation, class R>
R reduce(R value, const Place& place, OfWarps<R>& shared) {
  value = reduce_lanes<Operation>(value, place);
  if (place.warps == 1) return value;
  reinterpret_cast<R*>(shared)[place.slot * place.warps + place.warp] = value;
  __syncthreads();
  const Two<R>* const parts = shared + place.slot * (place.warps / 2);
  value = Operation()(parts[0].first, parts[0].second);
#pragma unroll
  for (uint32_t warp = 2; warp < kWarps; warp += 2) {
    if (warp < place.warps) {
      value = Operation()(Operation()(value, parts[warp / 2].first), parts[warp / 2].second);
    }
  }
  return value;
}

// The kernels of one pass work on rows of their own, so each may start while the one before still
// runs; only the last block of each waits at its end, so that whatever follows in the stream finds
// all rows written.
inline void begin_rows() { allow_next_kernel(); }
inline void end_rows() {
  if (blockIdx.x == gridDim.x - 1) wait_for_previous_kernel();
}

// What to subtract before exp: the maximum, or 0 in a row that sees nothing.
template <class R>
R shift_of(R maximum) {
  return maximum == -infinity<R>() ? R{0} : maximum;
}

// 0 in a row that sees nothing; NaN stays NaN.
template <class R>
R inverse(R sum) {
  return sum == R{0} ? R{0} : R{1} / sum;
}

// What a thread takes of a contiguous row whose team goes over it in whole pieces: one vector in
// each of the blocks first, first + step, … of the row, at the same place in all. Threads that are
// left over when the team is divided into pieces take none.
struct Share {
  uint32_t first, step, blocks;
  uint32_t column;   // of the vector's first element in the block
  int64_t begin;     // of its first vector, in elements from the row's beginning in its first block
  uint32_t advance;  // from a vector to the next, in bytes

  // Whether it has a vector number v.
  bool has(int v) const { return first + v * step < blocks; }
};

template <class T>
Share share_of(const Place& place, const Divisor& piece, int32_t block) {
  Share share;
  share.step = divide(place.team, piece);
  share.first = divide(place.thread, piece);
  share.column = (place.thread - share.first * piece.value) * kVectorLength<T>;
  share.blocks = share.first < share.step ? place.block_row.blocks : 0;
  const uint32_t size = block * block;
  share.begin = static_cast<int64_t>(share.first) * size + share.column;
  share.advance = share.step * size * static_cast<uint32_t>(sizeof(T));
  return share;
}

template <class T>
T* after(T* pointer, int64_t bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<uint64_t>(pointer) + bytes);
}

// Where the thread's row begins in its first block.
template <class T>
T* row_begin(const BlockTensor& tensor, const Place& place, int64_t batch, int32_t block) {
  return static_cast<T*>(tensor.data) + batch * tensor.batch +
         place.block_row.first_rank * (block * block) + place.row * block;
}

}  // namespace pullback::block_softmax
