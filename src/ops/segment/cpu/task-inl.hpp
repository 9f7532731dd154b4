// What a task of either pass works with: some columns of a tile, scratch memory, and the vectors in
// which a piece of a segment waits for the others.

#if defined(PULLBACK_SEGMENT_TASK_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_TASK_INL_HPP
#undef PULLBACK_SEGMENT_TASK_INL_HPP
#else
#define PULLBACK_SEGMENT_TASK_INL_HPP
#endif

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

// Calls f(tile, task) for all tiles and blocks of columns.
template <class R, class F>
void ForTasks(const Run& run, const F& f) {
  run.for_tiles(
      [&](std::int64_t tile, std::int64_t column, std::int64_t columns, std::byte* scratch) {
        f(tile, Task<R>(run.layout, column, columns, scratch));
      });
}

// The same for the first of the steps over all tiles.
template <class R, class F>
void ForTasksFirst(const Run& run, const F& f) {
  run.for_tiles_first(
      [&](std::int64_t tile, std::int64_t column, std::int64_t columns, std::byte* scratch) {
        f(tile, Task<R>(run.layout, column, columns, scratch));
      });
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
