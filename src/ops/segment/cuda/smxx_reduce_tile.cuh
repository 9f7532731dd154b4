// Forward for narrow contiguous rows that are not made of whole pieces of 16 bytes.
//
// A block holds the rows of its tile (smxx_row_tile.cuh), and lanes reduce its segments.
// Neighbouring lanes have neighbouring columns of the results, which follow each other for all of
// the tile. Segments that reach over the tile's borders go through its slots to smxx_combine.cuh.
#pragma once

#include "ops/segment/cuda/smxx_row_tile.cuh"

namespace pullback::segment_cuda {

template <class Op, class T, class Out, int kVector, int kStateBytes>
void reduce_tile(const Params& p) {
  using State = typename Op::State;
  using Piece = Values<T, kVector>;
  using R = Real<T>;
  static_assert(sizeof(State) == kStateBytes);
  constexpr int kAtOnce = row_tile_at_once(kVector);
  extern __shared__ __align__(128) unsigned char memory[];

  const auto [segments, tile] = begin_tile(p);
  device::allow_next_kernel();
  RowTile rows(p, tile, sizeof(T));
  const RowImage image{memory};
  rows.copy_rows(image, p.x.data);
  async_commit();
  unsigned char* const ends = memory + rows.image_bytes();
  rows.find_ends(segments, ends);
  // Of the parts of longer segments.
  State* const parts = reinterpret_cast<State*>(ends + ((2 * rows.end_count + 7) & -8));
  async_wait<0>();

  R none[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) none[i] = Op::value(Op::start());
  const Piece nothing = Piece::of(none);
  // Of whole segments, and of what the tile has of others.
  const auto store = [&](int k, int column, const auto& state) {
    const int begin = rows.begin_of(k), many = rows.end_of(k) - begin;
    const int64_t j = rows.tile.first + k;
    if (rows.reaches_out(k)) {
      State* const slot = slot_of<Op>(p, blockIdx.x, k == rows.end_count) + column;
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(state) / sizeof(State)); ++i) slot[i] = state[i];
    } else {
      finish_to<Op, Out>(
          p, RowOutputs<false>{p, Tile::problem_segment(j), column}, state, rows.tile.row,
          [&] { return rows.tile.row + begin; }, [&] { return int64_t{many}; });
    }
  };
  const int columns = static_cast<int>(p.columns);
  rows.share_out<kVector, Parts::meet>(
      [&](int k, int column, int begin, int end, int rank, int step, int lanes, int slot) {
        if (!rows.in_problem(k)) return;
        const uint32_t first =
            rows.skew + begin * rows.row_bytes + column * static_cast<int>(sizeof(T));
        const int many = end - begin;
        State state[kVector];
        add_tile_rows<Op, kAtOnce, R>(
            state, [&](int at) { return image.load<Piece>(first + at * rows.row_bytes); }, nothing,
            [](const Piece& row, int i) { return row.real(i); }, begin, many, rank, step, lanes);
        if (rank != 0) return;
        if (slot >= 0 && many > 0) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) parts[slot * columns + column + i] = state[i];
        } else if (many > 0) {
          store(k, column, state);
        } else if (rows.end_of(k) == rows.begin_of(k) && !rows.reaches_out(k)) {
#pragma unroll 1
          for (int i = 0; i < kVector; ++i) {
            finish_empty<Op, Out>(p, rows.tile.first + k, column + i);
          }
        }
      },
      [&](int k, int column, int slot, int count) {
        if (!rows.in_problem(k)) return;
        State state[1] = {parts[slot * columns + column]};
#pragma unroll 1
        for (int i = 1; i < count; ++i) {
          Op::append(state[0], parts[(slot + i) * columns + column]);
        }
        store(k, column, state);
      });
}

}  // namespace pullback::segment_cuda
