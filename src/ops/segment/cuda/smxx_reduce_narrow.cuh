// Forward for contiguous rows of 2^lane_bits pieces of 16 bytes, up to 128 bytes (smxx_stream.cuh).
// A group of as many lanes as a row has pieces walks the rows of a short segment, each lane its own
// piece of them; all groups together walk those of a long one. The results of a warp's groups are
// stored side by side.
#pragma once

#include "ops/segment/cuda/smxx_run.cuh"
#include "ops/segment/cuda/smxx_stream.cuh"

namespace pullback::segment_cuda {

// The rows that a warp is at, piece by piece.
template <class T>
struct PieceRing {
  static constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  static constexpr uint32_t kStepBytes = 16 * device::kWarpSize;
  static constexpr uint32_t kChunkBytes = kNarrowLanePieces * kStepBytes;
  static constexpr uint32_t kBytes = kStreamChunks * kChunkBytes;
  using Piece = Values<T, kVector>;

  uint32_t ring, own;  // in shared memory: all, and this lane's piece of the first chunk
  const char* next;    // this lane's first piece of the next chunk to ask for
  int64_t left;        // bytes of the tensor from there on

  // The tensor has `bytes` more from `from` on.
  PieceRing(const void* shared, const char* from, int64_t bytes) {
    const int at = static_cast<int>(threadIdx.x % device::kWarpSize) * 16;
    ring = kept(shared_address(shared));
    own = ring + at;
    next = from + at;
    left = bytes - at;
  }
  // Asks for one chunk after the other.
  void request(int chunk) {
    const uint32_t to = own + static_cast<uint32_t>(chunk) % kStreamChunks * kChunkBytes;
#pragma unroll
    for (uint32_t at = 0; at < kChunkBytes; at += kStepBytes) {
      if (static_cast<int64_t>(at) < left) async_copy<16>(to + at, next + at);
    }
    next += kChunkBytes;
    left -= kChunkBytes;
  }
  // The piece at so many bytes from the first chunk's begin.
  Piece at(uint32_t bytes) const { return load_shared<Piece>(ring + (bytes & (kBytes - 1))); }
};

// A lane's pieces of some rows.
template <class T, int kVector, int kCount>
struct PieceRows {
  Values<T, kVector> row[kCount];
  Real<T> operator()(int i, int k) const { return row[k].real(i); }
  // Columns 2 i and 2 i + 1.
  uint32_t pair(int i, int k) const
    requires(kPairs<T, kVector>)
  {
    return row[k].word[i];
  }
};

// What a block has in shared memory.
template <class T>
struct NarrowShared {
  unsigned char x[kStreamWarps][PieceRing<T>::kBytes];
  Walk<0>::Shared ends[kStreamWarps];
};

template <class Op, class T, class Out, int kStateBytes>
void reduce_narrow(const Params& p) {
  using State = typename Op::State;
  using R = Real<T>;
  using Ring = PieceRing<T>;
  constexpr int kVector = Ring::kVector, kAtOnce = kStreamAtOnce;
  constexpr RunKind kKind = kRunKind<Op, T, kVector>;
  static_assert(sizeof(State) == kStateBytes && sizeof(NarrowShared<T>) == kNarrowBytes);
  extern __shared__ __align__(kRingAlignment) unsigned char memory[];
  NarrowShared<T>& shared = *reinterpret_cast<NarrowShared<T>*>(memory);
  const Segments segments = begin_reduction(p);
  const int lanes = 1 << p.lane_bits, groups = device::kWarpSize >> p.lane_bits;
  const int warp = threadIdx.x / device::kWarpSize, lane = threadIdx.x % device::kWarpSize;
  const int group = lane >> p.lane_bits, column = (lane & (lanes - 1)) * kVector;
  const int row_bits = 4 + p.lane_bits;  // a row has 2^row_bits bytes
  Walk<0> steps(p, segments, shared.ends[warp]);
  Ring ring(shared.x[warp], static_cast<const char*>(p.x.data) + (steps.base << row_bits),
            (p.rows - steps.base) << row_bits);
  const auto piece_of = [&](int row) {
    return ring.at((static_cast<uint32_t>(row) << row_bits) + column * sizeof(T));
  };
  // What changes nothing among other rows.
  R nothing[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) nothing[i] = Op::value(Op::start());

  const auto load = [&](PieceRows<T, kVector, kAtOnce>& rows, int row, int end) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      rows.row[k] = Values<T, kVector>::of(nothing);
      if (row + k < end) rows.row[k] = piece_of(row + k);
    }
  };
  const auto aim_of = [](R x) {
    if constexpr (kKind == RunKind::powers) return Run<Op, T, kVector>::aim_of(x);
    return x;
  };
  // Adds the rows from `row` to `end`, kAtOnce of them every `step`, of the segment's from `begin`.
  const auto add = [&](State(&state)[kVector], int begin, int row, int end, int step) {
    if (row >= end) return;
    if constexpr (kKind == RunKind::pairs) {
      Run<Op, T, kVector> run;
      const int first = row, last = end - 1;
      run.begin(0);
#pragma unroll 1
      for (; row < end; row += step) {
        PieceRows<T, kVector, kAtOnce> rows;
        load(rows, row, end);
        // Of rows behind the segment the place is that of its last.
        run.template add<kAtOnce>(rows, row - first, last - first);
      }
      State part[kVector];
      run.close(part, 0, last - first, [&](int place) {
        return load_row<T, kVector>(p.x, steps.base + first + place, column);
      });
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if constexpr (Op::kPlaces) part[i].place += first;
        Op::append(state[i], part[i]);
      }
      return;
    }
    if constexpr (kAims<Op>) {
      // All groups at one row, so that their states are put together without an exponential.
      const auto first = piece_of(begin);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (state[i].sum == 0) Op::aim(state[i], aim_of(first.real(i)));
      }
    }
    if constexpr (kKind == RunKind::powers) {
      Run<Op, T, kVector> run;
      run.begin(0);
      // Of a state that has rows already, at its shift; one that is far makes no exact sum.
#pragma unroll
      for (int i = 0; i < kVector; ++i) run.aim(i, state[i].shift);
#pragma unroll 1
      for (int at = row; at < end; at += step) {
        PieceRows<T, kVector, kAtOnce> rows;
        load(rows, at, end);
        run.template add_aimed<kAtOnce>(rows);
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) run.sum[i] += state[i].sum;
      const bool exact = run.are_exact(run.sum);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (exact) {
          state[i].sum = run.sum[i];
        } else if (state[i].sum == 0) {
          state[i] = Op::start();  // what it aims at may be no row
        }
      }
      if (exact) return;
    }
    if constexpr (Op::kPlaces) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (state[i].place < 0) state[i] = begin_run<Op>(row);
      }
    }
#pragma unroll 1
    for (; row < end; row += step) {
      PieceRows<T, kVector, kAtOnce> rows;
      load(rows, row, end);
      if (add_rows<Op, R, kAtOnce>(state, rows, row)) continue;
#pragma unroll 1
      for (int k = 0; row + k < end && k < kAtOnce; ++k) {
        const auto piece = piece_of(row + k);
#pragma unroll
        for (int i = 0; i < kVector; ++i) Op::add(state[i], piece.real(i), row + k);
      }
    }
  };
  // Puts together what the groups have.
  const auto meet = [&](State(&state)[kVector]) {
#pragma unroll 1
    for (int step = lanes; step < device::kWarpSize; step *= 2) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) unite<Op>(state[i], shuffle_xor(state[i], step));
    }
  };
  const auto clear = [&](State(&state)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) state[i] = Op::start();
  };
  const auto store_slot = [&](int which, const State(&state)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      slot_of<Op>(p, steps.share, which)[column + i] = state[i];
    }
  };

  State open[kVector];  // of the rows of `segment` before `row`
  clear(open);
  bool in_head = steps.starts_inside, is_open = in_head;
  while (steps.goes_on()) {
    steps.advance([&](int chunk) { ring.request(chunk); });
    auto batch = steps.batch();
    if (batch.count == 0) {
      add(open, steps.row, steps.row + group * kAtOnce, batch.open_stop, groups * kAtOnce);
      is_open = true;
      steps.next(batch);
      continue;
    }
    if (batch.count > groups) batch.count = groups;
    const int source = (steps.segment + group) % device::kWarpSize;
    const int begin = __shfl_sync(device::kAllLanes, batch.begin, source);
    const int end = __shfl_sync(device::kAllLanes, batch.end, source);
    const bool mine = group < batch.count, goes_on = is_open && group == 0;
    const bool is_long = mine && (goes_on || end - begin > kNarrowGroupRows);
    State state[kVector];
    clear(state);
    if (mine && !is_long) add(state, begin, begin, end, kAtOnce);
    for (uint32_t longs = __ballot_sync(device::kAllLanes, is_long && column == 0); longs != 0;
         longs &= longs - 1) {
      const int owner = __ffs(static_cast<int>(longs)) - 1;
      State whole[kVector];
      clear(whole);
      if (is_open) {  // the first of them goes on
#pragma unroll
        for (int i = 0; i < kVector; ++i) whole[i] = open[i];
        clear(open);
        is_open = false;
      }
      const int from = __shfl_sync(device::kAllLanes, begin, owner);
      add(whole, from, from + group * kAtOnce, __shfl_sync(device::kAllLanes, end, owner),
          groups * kAtOnce);
      meet(whole);
      if (group == owner >> p.lane_bits) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) state[i] = whole[i];
      }
    }
    const int64_t j = steps.first_group + steps.segment + group;
    if (mine && j >= 1 && j <= p.segments) {
      if (in_head && group == 0) {
        store_slot(0, state);
      } else if (begin == end && !goes_on) {
#pragma unroll 1
        for (int i = 0; i < kVector; ++i) finish_empty<Op, Out>(p, j, column + i);
      } else {
        finish<Op, Out, false>(p, segments, j, column, state, steps.base);
      }
    }
    in_head = false;
    steps.next(batch);
  }
  meet(open);
  if (group == 0) store_slot(1, open);
  steps.report();
}

}  // namespace pullback::segment_cuda
