// How the CPU cuts a segment problem into tiles.
//
// The work is a list of items: the rows of segment 0, the end of segment 0, the rows of segment 1,
// and so on. A tile is a fixed number of items, so one giant segment and a million empty ones cost
// the same as any others (merge-path of Merrill and Garland, SC16); but a segment of up to about as
// many rows belongs to the tile where it begins, as one that is cut may be read twice. The rows of
// a segment in one tile are a piece. At most two pieces of a tile belong to segments that reach
// beyond it: the head, whose segment began before the tile, and the tail, whose segment goes on
// after it. Their partial results wait in slots 2t and 2t+1 of the workspace, to be combined in the
// order of the tiles.
//
// Offsets are read from memory once: a tile proves its own before it uses them. When one of them is
// out of order the whole run is done again, from repaired ones.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/threads.hpp"
#include "ops/segment/index.hpp"
#include "ops/segment/problem.hpp"

namespace pullback::segment_cpu {

inline constexpr std::int64_t kColumnBlock = 1024;  // columns that one task handles
inline constexpr std::int64_t kColumnAlign = 16;    // no vector has more lanes
// Behind the rows of a stage: whole vectors are written at their end.
inline constexpr std::int64_t kStagePad = 4 * kColumnAlign;
inline constexpr std::int64_t kTileElements = 1 << 16;   // 256 KiB of f32: well inside L2
inline constexpr std::int64_t kWaveElements = 1 << 21;   // 8 MiB of f32: inside the last cache
inline constexpr std::int64_t kBlockElements = 1 << 12;  // rows taken at a time: twice inside L1

// Of a block in scratch memory: with a row more, of results that wait for whole lines.
inline constexpr std::int64_t kScratchElements = kBlockElements + kColumnBlock + kStagePad;

// More columns are not taken apart.
inline constexpr std::int64_t kMostApart = 6;

inline std::int64_t padded(std::int64_t columns) {
  return (columns + kColumnAlign - 1) / kColumnAlign * kColumnAlign;
}
// From row to row of a block `columns` wide that is copied, and how many there are.
inline std::int64_t block_stride(std::int64_t columns) {
  return columns < kColumnAlign ? columns : padded(columns);
}
inline std::int64_t block_rows(std::int64_t columns) {
  return kBlockElements / block_stride(columns);
}

// First item of a tile: row `row`, or when that is past the segment, the segment's end.
struct TileStart {
  std::int64_t segment, row;
};

struct Tiles {
  std::int64_t begin, end;
};

struct Piece {
  std::int64_t segment, begin, end;  // rows of the sorted order
  bool whole;                        // all rows of the segment
  bool head;                         // else, when not whole: a tail
};

// Sizes that follow from the problem.
struct Layout {
  bool apart;  // the columns, each as a tensor with one column
  std::int64_t column_block, column_blocks, tile_items, most_tiles;
  std::int64_t uncut_rows;      // segments of up to so many lie in one tile
  std::int64_t slot_columns;    // padded columns of a slot's vectors
  std::int64_t stage_elements;  // rows of x of a tile, at most
  std::size_t tiles_at, slots_at, scratch_at, scratch_bytes, total_bytes;
};

// One call of run(), as the kernels see it.
struct Run {
  const SegmentProblem& problem;
  const SegmentTensors& tensors;
  const Threads& threads;
  const Layout& layout;
  std::byte* workspace;
  Segments segments;
  std::int64_t tile_count, cut_tiles;  // of which so many begin within a segment
  std::atomic<bool>* unsound;          // null when the offsets are proven

  // `tile_count` + 1 of them.
  const TileStart* tiles() const {
    return reinterpret_cast<const TileStart*>(workspace + layout.tiles_at);
  }
  // Vector `vector` (0 or 1) of the head (0) or tail (1) of a tile, from column `column` on.
  template <class Real>
  Real* slot(std::int64_t tile, int which, int vector, std::int64_t column) const {
    auto* slots = reinterpret_cast<Real*>(workspace + layout.slots_at);
    return slots + ((tile * 2 + which) * 2 + vector) * layout.slot_columns + column;
  }
  std::byte* scratch(int thread) const {
    return workspace + layout.scratch_at + static_cast<std::size_t>(thread) * layout.scratch_bytes;
  }

  // Whether the offsets that the tile uses are sound. When those of all tiles are, all are.
  bool sound(std::int64_t tile) const {
    const TileStart first = tiles()[tile], stop = tiles()[tile + 1];
    const auto inside = [&](const TileStart& start) {
      if (start.segment == segments.count) return start.row == segments.last_row();
      return segments.begin(start.segment) <= start.row && start.row <= segments.end(start.segment);
    };
    if (tile == 0 && first.segment != 0) return false;
    if (tile == tile_count - 1 && stop.segment != segments.count) return false;
    return first.segment <= stop.segment && first.row <= stop.row && inside(first) &&
           inside(stop) &&
           ascend(segments, first.segment, std::min(stop.segment + 1, segments.count));
  }
  bool failed() const { return unsound != nullptr && unsound->load(std::memory_order_relaxed); }

  // Calls body(tile, first column, columns, scratch of the thread) for all tiles and column blocks.
  // With `first` it proves their offsets. Unless failed() then, other steps may follow.
  template <class Body>
  void for_tiles(Tiles tiles, bool first, const Body& body) const {
    // Columns that are apart share the lines of a tile's rows.
    const std::int64_t blocks = layout.apart ? layout.column_blocks : 1;
    const std::int64_t count = tiles.end - tiles.begin;
    threads.parallel_for(count * layout.column_blocks / blocks, [&](std::int64_t task, int thread) {
      const std::int64_t tile = tiles.begin + task % count;
      if (first && unsound != nullptr && !sound(tile)) {
        unsound->store(true, std::memory_order_relaxed);
        return;
      }
      for (std::int64_t k = 0; k < blocks; ++k) {
        const std::int64_t column = (task / count + k) * layout.column_block;
        const std::int64_t columns = std::min(layout.column_block, problem.x.shape[1] - column);
        body(tile, column, columns, scratch(thread));
      }
    });
  }

  // Calls on_piece(Piece) for each piece of the tile and on_empty(s) for each empty segment; but
  // first offers the segments that lie between the first and the last one, all whole or empty, to
  // on_inner(begin, end), which says whether it took them.
  template <class OnPiece, class OnEmpty, class OnInner>
  void walk(std::int64_t tile, const OnPiece& on_piece, const OnEmpty& on_empty,
            const OnInner& on_inner) const {
    const TileStart first = tiles()[tile], stop = tiles()[tile + 1];
    std::int64_t row = first.row;
    std::int64_t begin = first.segment < segments.count ? segments.begin(first.segment) : row;
    for (std::int64_t s = first.segment; s < stop.segment; ++s) {
      if (s == first.segment + 1 && on_inner(s, stop.segment)) {
        row = begin = segments.begin(stop.segment);
        break;
      }
      const std::int64_t end = segments.end(s);
      if (row < end) {
        on_piece(Piece{s, row, end, row == begin, row > begin});
      } else if (begin == end) {
        on_empty(s);
      }
      row = begin = end;
    }
    if (row < stop.row) {
      const bool whole = row == begin && stop.row == segments.end(stop.segment);
      on_piece(Piece{stop.segment, row, stop.row, whole, row > begin});
    }
  }
  // Calls on_piece(Piece) for the head and the tail of a tile.
  template <class OnPiece>
  void walk_ends(std::int64_t tile, const OnPiece& on_piece) const {
    walk(
        tile,
        [&](const Piece& piece) {
          if (!piece.whole) on_piece(piece);
        },
        [](std::int64_t) {}, [](std::int64_t, std::int64_t) { return true; });
  }

  // How many tiles are folded before the first of them are finished. A wave is a wait for the
  // slowest thread, which has to be worth it.
  std::int64_t wave_tiles() const {
    if (cut_tiles < tile_count / 4) return tile_count;
    const std::int64_t tile_elements =
        layout.tile_items * std::max<std::int64_t>(problem.x.shape[1], 1);
    return std::max<std::int64_t>(kWaveElements / tile_elements, 8 * threads.count());
  }

  // The tiles whose pieces all belong to segments that end before tile `stop` are those before
  // this.
  std::int64_t whole_before(std::int64_t stop) const {
    const TileStart& start = tiles()[stop];
    if (start.segment == segments.count) return stop;
    const std::int64_t begin = segments.begin(start.segment);
    while (stop > 0 && begin < tiles()[stop].row) --stop;
    return stop;
  }

  // Calls on_piece(tile, Piece) for the pieces, in order, of the segment that is this tile's tail,
  // if it has one. That visits every segment which has more than one piece once.
  template <class OnPiece>
  void walk_tail(std::int64_t tile, const OnPiece& on_piece) const {
    const TileStart first = tiles()[tile], stop = tiles()[tile + 1];
    const std::int64_t s = stop.segment;
    if (s >= segments.count) return;
    const std::int64_t begin = segments.begin(s), end = segments.end(s);
    if (begin < first.row || begin >= stop.row || end <= stop.row) return;
    on_piece(tile, Piece{s, begin, stop.row, false, false});
    for (std::int64_t t = tile + 1; t < tile_count && tiles()[t].row < end; ++t) {
      on_piece(t, Piece{s, tiles()[t].row, std::min(end, tiles()[t + 1].row), false, true});
    }
  }
};

// One column of a run, as a run of its own.
struct ColumnRun {
  ColumnRun(const Run& all, std::int64_t column);
  ColumnRun(const ColumnRun&) = delete;
  ColumnRun& operator=(const ColumnRun&) = delete;

  SegmentProblem problem;
  SegmentTensors tensors;
  Layout layout;
  Run run;
};

// In forward.cpp and backward.cpp, for the best instruction set of this CPU.
void run_forward(const Run& run);
void run_backward(const Run& run);

}  // namespace pullback::segment_cpu
