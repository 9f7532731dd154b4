// What a task of either pass works with: some columns of a tile, scratch memory, and the vectors in
// which a piece of a segment waits for the others.

#if defined(PULLBACK_SEGMENT_TASK_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_TASK_INL_HPP
#undef PULLBACK_SEGMENT_TASK_INL_HPP
#else
#define PULLBACK_SEGMENT_TASK_INL_HPP
#endif

#include <array>
#include <optional>

#include "ops/segment/cpu/softmax-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

// State of a piece, one vector of columns each. What they hold depends on the pass and the
// reduction.
template <class R>
struct State {
  R *a, *b;

  Int<R>* places() const { return reinterpret_cast<Int<R>*>(b); }
  LogSum<R> log_sum() const { return {a, b}; }
  void CopyTo(const State& to, std::int64_t columns) const {
    std::copy_n(a, columns, to.a);
    std::copy_n(b, columns, to.b);
  }
};

// Where the head or the tail of a tile waits.
template <class R>
State<R> SlotOf(const Run& run, std::int64_t tile, bool head, std::int64_t column) {
  const int which = head ? 0 : 1;
  return {run.slot<R>(tile, which, 0, column), run.slot<R>(tile, which, 1, column)};
}

template <class R>
struct Task {
  Task(const Layout& layout, std::int64_t column_, std::int64_t columns_, std::byte* scratch)
      : column(column_), columns(columns_), block_rows(segment_cpu::block_rows(columns_)) {
    const std::int64_t width = padded(columns);
    wide = reinterpret_cast<std::int64_t*>(scratch);
    state.a = reinterpret_cast<R*>(wide + width);
    state.b = state.a + width;
    gradient = state.b + width;
    value = gradient + width;
    vector = value + width;
    row = vector + width;
    block = row + width;
    block2 = block + kScratchElements;
    run = block2 + kScratchElements;
    window = run + kScratchElements;
    window2 = window + kScratchElements;
    stage = window2 + kScratchElements;
    products = stage + layout.stage_elements;
    bits = reinterpret_cast<std::uint8_t*>(vector);
  }

  // From rows of the sorted order, in `wide`, to places in a piece: -1 for those outside of it.
  void PlacesIn(const Piece& piece, Int<R>* places) const {
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::int64_t place = wide[c] - piece.begin;
      const bool inside = wide[c] >= 0 && place >= 0 && place < piece.end - piece.begin;
      places[c] = inside ? static_cast<Int<R>>(place) : Int<R>{-1};
    }
  }

  std::int64_t column, columns, block_rows;
  State<R> state;
  // Vectors of columns; blocks; and room for the rows of a tile, which only some passes have.
  R *gradient, *value, *vector, *row, *block, *block2, *run, *window, *window2, *stage, *products;
  std::uint8_t* bits;
  std::int64_t* wide;
};

// Runs a pass over the problem; where the columns are taken apart, one over each of them. Of a Pass
//   Fold(tile, task)      folds pieces, or writes rows at once
//   Combine(tile, task)   joins the pieces of longer segments, if combines()
//   Finish(tile, task)    writes the rows of those, if writes_rows()
//   Clear()               those of no segment
// Where many segments are cut, these steps follow each other wave by wave, so that Finish finds in
// cache what Fold has read.
template <class Pass, class R>
void RunPass(const Run& run) {
  std::array<std::optional<ColumnRun>, kMostApart> columns;
  std::array<std::optional<Pass>, kMostApart> passes;
  if (run.layout.apart) {
    for (std::int64_t c = 0; c < run.layout.column_blocks; ++c) {
      passes[c].emplace(columns[c].emplace(run, c).run);
    }
  } else {
    passes[0].emplace(run);
  }
  using Task = segment_cpu::HWY_NAMESPACE::Task<R>;
  const auto for_tasks = [&](Tiles tiles, bool first, const auto& f) {
    run.for_tiles(
        tiles, first,
        [&](std::int64_t tile, std::int64_t column, std::int64_t count, std::byte* scratch) {
          const bool apart = run.layout.apart;
          f(*passes[apart ? column : 0], tile,
            Task(run.layout, apart ? 0 : column, count, scratch));
        });
  };
  const bool combines = passes[0]->combines(), writes_rows = passes[0]->writes_rows();
  const std::int64_t wave = writes_rows ? run.wave_tiles() : run.tile_count;
  for (std::int64_t folded = 0, done = 0; done < run.tile_count;) {
    const Tiles next{folded, run.tile_count - folded > wave ? folded + wave : run.tile_count};
    for_tasks(next, true,
              [](const Pass& pass, std::int64_t tile, const Task& task) { pass.Fold(tile, task); });
    if (run.failed()) return;
    folded = next.end;
    const Tiles ready{done, run.whole_before(folded)};
    if (combines) {
      for_tasks(ready, false, [](const Pass& pass, std::int64_t tile, const Task& task) {
        pass.Combine(tile, task);
      });
    }
    if (writes_rows) {
      for_tasks(ready, false, [](const Pass& pass, std::int64_t tile, const Task& task) {
        pass.Finish(tile, task);
      });
    }
    done = ready.end;
  }
  for (const std::optional<Pass>& pass : passes) {
    if (pass) pass->Clear();
  }
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
