#include "ops/segment/cpu/plan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/workspace.hpp"

namespace pullback::segment_cpu {
namespace {

constexpr std::int64_t kFewestItems = 256;  // keeps the slots below 2 % of x and out in f32
constexpr std::int64_t kManyTiles = 128;
constexpr std::int64_t kScratchVectors = 16;
constexpr std::int64_t kScratchBlocks = 5;

Layout layout_of(const SegmentProblem& problem, Pass pass, int threads, bool apart) {
  const std::int64_t rows = problem.x.shape[0], columns = problem.x.shape[1];
  const std::size_t real = size_of(accumulation_dtype(problem.x.dtype));
  Layout layout{};
  layout.apart = apart;
  layout.column_block = apart ? 1 : kColumnBlock;
  layout.column_blocks = (columns + layout.column_block - 1) / layout.column_block;
  const std::int64_t block = std::min(columns, layout.column_block);
  const std::int64_t wide = std::max<std::int64_t>(apart ? columns : block, 1);  // of a tile's rows
  // Of few columns, whose rows take long to fold, small problems have many tiles, not large ones.
  const std::int64_t tile_elements =
      std::clamp((rows + problem.num_segments) / kManyTiles * wide,
                 kTileElements / 4 * std::min<std::int64_t>(wide, 4), kTileElements);
  layout.tile_items = std::max(kFewestItems, tile_elements / wide);
  layout.most_tiles = (rows + problem.num_segments + layout.tile_items - 1) / layout.tile_items;
  // Whole vectors are written to slots.
  layout.slot_columns = apart ? columns * kColumnAlign : padded(columns);

  layout.tiles_at = workspace_aligned(segments_workspace_bytes(problem));
  layout.slots_at = workspace_aligned(
      layout.tiles_at + static_cast<std::size_t>(layout.most_tiles + 1) * sizeof(TileStart));
  // Without a fold nothing is left in slots. What else folds depends on the tensors of a run.
  const bool sum = problem.reduce == SegmentReduce::sum || problem.reduce == SegmentReduce::mean;
  const bool folds = pass == Pass::forward || !sum;
  const std::int64_t slots = folds ? layout.most_tiles * 4 * layout.slot_columns : 0;
  layout.scratch_at = workspace_aligned(layout.slots_at + static_cast<std::size_t>(slots) * real);
  layout.uncut_rows = std::min(layout.tile_items, kTileElements / wide);
  // What is written row by row may be staged; backward of prod keeps the products of all later
  // rows.
  layout.stage_elements = (layout.tile_items + layout.uncut_rows) * block + kStagePad;
  const bool rows_out = pass == Pass::backward || problem.reduce == SegmentReduce::softmax;
  const bool products = pass == Pass::backward && problem.reduce == SegmentReduce::prod;
  const std::int64_t elements =
      kScratchBlocks * kScratchElements + (rows_out + products) * layout.stage_elements;
  layout.scratch_bytes =
      workspace_aligned(static_cast<std::size_t>(elements) * real +
                        static_cast<std::size_t>(kScratchVectors * padded(block)) * sizeof(double));
  layout.total_bytes = layout.scratch_at + layout.scratch_bytes * static_cast<std::size_t>(threads);
  return layout;
}

// The items of tiles [first, first + count), each with a search of its own. They take their steps
// together, so that the waits for memory do. Returns how many are within a segment.
constexpr std::int64_t kSearches = 16;
std::int64_t find_starts(const Segments& segments, const Layout& layout, std::int64_t items,
                         std::int64_t first, std::int64_t count, TileStart* starts) {
  const std::int64_t base = segments.first_row();
  const auto item_of = [&](std::int64_t k) {
    return std::min(items, (first + k) * layout.tile_items);
  };
  // The segment is the first whose end is at or after the item.
  std::int64_t low[kSearches] = {};
  for (std::int64_t size = segments.count; size > 0;) {
    const std::int64_t half = (size + 1) / 2;
    for (std::int64_t k = 0; k < count; ++k) {
      const std::int64_t middle = low[k] + half - 1;
      const std::int64_t end = std::clamp(segments.end(middle), base, segments.last_row());
      if (end - base + middle < item_of(k)) low[k] += half;
    }
    size -= half;
  }
  std::int64_t cut = 0;
  for (std::int64_t k = 0; k < count; ++k) {
    TileStart& start = starts[first + k] = {low[k], base + item_of(k) - low[k]};
    if (start.segment == segments.count) continue;
    const std::int64_t begin = segments.begin(start.segment), end = segments.end(start.segment);
    if (begin >= start.row) continue;
    // Nothing is known of the offsets yet: no difference of theirs before both are near the row. A
    // start that moved up, or far, would make a tile of more rows than there is room for.
    const std::int64_t most = layout.uncut_rows;
    const bool near = begin >= start.row - most && end >= start.row && end <= start.row + most;
    if (near && end - begin <= most && end <= segments.last_row()) {
      start = {start.segment + 1, end};
    } else {
      ++cut;
    }
  }
  return cut;
}

// Whether the columns are so few that they are quicker one by one.
bool takes_apart(const SegmentProblem& problem, Pass pass) {
  const SegmentReduce reduce = problem.reduce;
  const bool extreme = is_extreme(reduce);
  const bool sum = reduce == SegmentReduce::sum || reduce == SegmentReduce::mean;
  std::int64_t most = sum || extreme ? 3 : 4;
  if (pass == Pass::backward) {
    const bool few_rows_at_once = reduce == SegmentReduce::softmax ||
                                  reduce == SegmentReduce::prod ||
                                  (extreme && problem.ties == Ties::even);
    most = few_rows_at_once ? 2 : kMostApart;
  }
  return problem.x.shape[1] > 1 && problem.x.shape[1] <= most;
}

class CpuBody final : public SegmentBody {
 public:
  CpuBody(const SegmentProblem& problem, const Device& device, Pass pass)
      : problem_(problem),
        pass_(pass),
        threads_(device.threads),
        whole_(layout_of(problem, pass, threads_.count(), false)),
        apart_(layout_of(problem, pass, threads_.count(), takes_apart(problem, pass))) {
    workspace_bytes = std::max(whole_.total_bytes, apart_.total_bytes);
    description = fmt::format(
        "tiles of {} rows and segment ends by {} columns, {} accumulation; deterministic, the same "
        "bits for any number of threads{}",
        apart_.tile_items, std::min(problem.x.shape[1], apart_.column_block),
        name_of(accumulation_dtype(problem.x.dtype)),
        problem.permutation.given() ? " unless the permutation names a row twice" : "");
  }

  void run(Stream, const SegmentTensors& tensors, Workspace workspace) const override {
    auto* memory = static_cast<std::byte*>(workspace.data);
    check_indices(problem_, tensors, memory);
    if (pass_ == Pass::backward && tensors.d_x == nullptr) return;
    // u8 places need to know the lengths of all segments first.
    const bool prove_first = !problem_.offsets.given() || problem_.check_indices ||
                             (tensors.arg != nullptr && problem_.arg.dtype == DType::u8);
    if (!prove_first && run_unproven(tensors, memory)) return;
    const Segments segments = make_segments(problem_, tensors, memory, threads_);
    check_places(problem_, tensors, segments);
    run_tiles(segments, tensors, memory, nullptr);
  }

 private:
  // False when the offsets turned out to be unsound.
  bool run_unproven(const SegmentTensors& tensors, std::byte* memory) const {
    const Segments segments = unproven_segments(problem_, tensors);
    const std::int64_t first = segments.first_row(), last = segments.last_row();
    if (first < 0 || last > segments.rows || first > last) return false;
    std::atomic<bool> unsound = false;
    run_tiles(segments, tensors, memory, &unsound);
    return !unsound.load();
  }

  void run_tiles(const Segments& segments, const SegmentTensors& tensors, std::byte* memory,
                 std::atomic<bool>* unsound) const {
    const Layout& layout = uses_mask(tensors) ? whole_ : apart_;
    const std::int64_t items = segments.last_row() - segments.first_row() + segments.count;
    const std::int64_t tiles = (items + layout.tile_items - 1) / layout.tile_items;
    auto* starts = reinterpret_cast<TileStart*>(memory + layout.tiles_at);
    std::atomic<std::int64_t> cut = 0;
    threads_.parallel_for((tiles + kSearches) / kSearches, [&](std::int64_t batch, int) {
      const std::int64_t begin = batch * kSearches;
      cut += find_starts(segments, layout, items, begin, std::min(kSearches, tiles + 1 - begin),
                         starts);
    });
    const Run run{problem_, tensors, threads_, layout, memory, segments, tiles, cut, unsound};
    pass_ == Pass::forward ? run_forward(run) : run_backward(run);
  }

  // A byte of the mask has several columns.
  bool uses_mask(const SegmentTensors& tensors) const {
    return tensors.arg_mask != nullptr &&
           (pass_ == Pass::forward || saved_of(problem_, tensors) == SegmentSaved::arg_mask);
  }

  SegmentProblem problem_;
  Pass pass_;
  Threads threads_;
  Layout whole_, apart_;
};

}  // namespace

ColumnRun::ColumnRun(const Run& all, std::int64_t column)
    : problem(all.problem),
      tensors(all.tensors),
      layout(all.layout),
      run{problem,      tensors,        all.threads,   layout,     all.workspace,
          all.segments, all.tile_count, all.cut_tiles, all.unsound} {
  const auto take = [&](TensorSpec& spec, auto& data) {
    if (!spec.given()) return;
    if (data != nullptr) {
      const std::int64_t elements = column * spec.strides[1];
      data = const_cast<std::byte*>(static_cast<const std::byte*>(data)) +
             elements * static_cast<std::int64_t>(size_of(spec.dtype));
    }
    spec.shape[1] = 1;
  };
  take(problem.x, tensors.x);
  take(problem.out, tensors.out);
  take(problem.arg, tensors.arg);
  take(problem.lse, tensors.lse);
  take(problem.d_out, tensors.d_out);
  take(problem.d_x, tensors.d_x);
  const std::size_t real = size_of(accumulation_dtype(problem.x.dtype));
  layout.slots_at += static_cast<std::size_t>(column * kColumnAlign) * real;
}

}  // namespace pullback::segment_cpu

namespace pullback {

std::unique_ptr<SegmentBody> make_segment_cpu(const SegmentProblem& problem, const Device& device,
                                              Pass pass) {
  return std::make_unique<segment_cpu::CpuBody>(problem, device, pass);
}

}  // namespace pullback
