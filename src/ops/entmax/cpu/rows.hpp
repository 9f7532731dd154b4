// How the CPU variant walks over rows of any layout: tiles of neighbouring rows, whose tensors are
// used in place where the axis has unit stride and packed into scratch rows where it has not.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/threads.hpp"
#include "core/workspace.hpp"
#include "ops/entmax/cpu/packing.hpp"
#include "ops/entmax/cpu/walk.hpp"

namespace pullback::entmax {

// Outputs of a call from this size on bypass the caches: storing into lines that are not cached
// would read them first, and an output this large is gone from L2 when its reader comes.
inline constexpr std::int64_t kStreamBytes = std::int64_t{8} << 20;
inline constexpr std::int64_t kTileElements = 32768;  // in place: makes the cost of a task vanish
// Tiles of short rows begin at whole cache lines if the first one does.
inline std::int64_t tile_rows_in_place(std::int64_t length) {
  constexpr std::int64_t kLine = 64;
  const std::int64_t rows = kTileElements / length;
  return rows < kLine ? rows : rows / kLine * kLine;
}
// A tile of packed rows: this many bytes across neighbouring rows, as every axis position takes a
// page walk and a DRAM page; within this much scratch.
inline constexpr std::int64_t kPackedLineBytes = 256;
inline constexpr std::int64_t kPackedTileBytes = std::int64_t{4} << 20;
// Such rows side by side in a tile of which little has to be kept.
inline constexpr std::int64_t kSparseColumns = 256;
inline constexpr std::int64_t kLeastStripeColumns = 5;  // fewer would leave vectors empty
inline constexpr std::int64_t kMostStripeBytes = 4 * kPackedTileBytes;  // beyond, rows are packed

// Scratch for one row of numbers that are stored by whole vectors, and for one more in 64.
inline std::int64_t vector_scratch_bytes(std::int64_t length, bool in_double) {
  return std::max<std::int64_t>(length + length / 64 + 128, 1024) * (in_double ? 8 : 4);
}

// What the tasks of both passes begin with: rows of one length, side by side.
struct RowTile {
  DType dtype;
  std::int64_t rows, length, pitch;
  double alpha;
  bool stream;
  TensorRows support, alpha_per_row;
  std::uint8_t* bits;  // scratch for the support bits of a row that are not side by side

  template <class Statistic>
  double alpha_of(std::int64_t row) const {
    return alpha_per_row ? static_cast<double>(*alpha_per_row.row<Statistic>(row)) : alpha;
  }
};

// What forward and backward share: tiles × ragged rows as one list of tasks.
class RowPlan : public PlanBody<EntmaxTensors> {
 protected:
  // Tiles are of `columns` rows, unless that is 0, and cut for rows that have to be packed.
  RowPlan(const EntmaxProblem& problem, const Device& device, Walk walk, bool packs,
          std::int64_t columns = 0)
      : problem_(problem),
        threads_(device.threads),
        walk_(std::move(walk)),
        length_(row_length(problem)),
        groups_(group_count(problem)) {
    const auto bytes = static_cast<std::int64_t>(size_of(problem.x.dtype));
    const std::int64_t length = std::max<std::int64_t>(length_, 1);
    const std::int64_t packed =
        std::min(kPackedLineBytes / bytes, kPackedTileBytes / (length * bytes));
    walk_.set_tile_rows(columns > 0    ? columns
                        : packs        ? packed
                        : groups_ >= 0 ? 1
                                       : tile_rows_in_place(length));
    packed_rows_ =
        packs ? std::clamp<std::int64_t>(packed, 1, walk_.tile_rows()) : walk_.tile_rows();
    pitch_ = packs ? packed_pitch(length_, bytes) : length_;
    if (groups_ >= 0) offsets_at_ = layout_.take((groups_ + 1) * 8);
    slots_at_ = layout_.bytes();
    // Neighbouring ragged rows go together until they are worth a task.
    const std::int64_t mean = length / (tasks_per_tile() + 1) + 1;
    grain_ = std::max<std::int64_t>(1, kTileElements / (mean * walk_.tile_rows()));
    if (groups_ < 0) grain_ = 1;
  }

  void add_support_bits(WorkspaceLayout& slot, const TensorSpec& support, std::size_t which) {
    if (support.given() && !walk_.contiguous(which)) bits_ = slot.take((length_ + 7) / 8);
  }

  // When all scratch is added. `output` is the tensor that the pass writes whole.
  void finish(const WorkspaceLayout& slot, const TensorSpec& output, bool packs) {
    slot_bytes_ = slot.bytes();
    workspace_bytes = slots_at_ + slot_bytes_ * static_cast<std::size_t>(threads_.count());
    stream_ = output.numel() * static_cast<std::int64_t>(size_of(output.dtype)) >= kStreamBytes;
    description = fmt::format(
        "tiles of {} rows of {} elements, {}; one thread a row; accumulation {}\n"
        "deterministic: every row is computed on its own{}",
        walk_.tile_rows(), length_, packs ? "packed into scratch" : "in place",
        name_of(accumulation_dtype(problem_.x.dtype)),
        stream_ ? "; the output is written past the caches" : "");
  }

  std::int64_t tile_elements(std::int64_t element_bytes) const {
    return packed_rows_ * pitch_ * element_bytes;
  }

  // Rows of one ragged group (the only one, where rows are not ragged) in one tile.
  struct Task {
    const Walk& walk;
    const Walk::Tile& tile;
    std::int64_t group, begin, length;
    std::byte* scratch;

    TensorRows along_axis(std::size_t which, const void* data) const {
      return walk.place(which, data, tile, begin);
    }
    TensorRows per_row(std::size_t which, const void* data) const {
      return walk.place(which, data, tile, group);
    }
  };

  RowTile row_tile(const Task& task, std::size_t support_at, const void* support,
                   std::size_t alpha_at, const void* alpha_per_row) const {
    return {problem_.x.dtype,
            task.tile.rows,
            task.length,
            pitch_,
            problem_.alpha,
            stream_,
            walk_.place(support_at, support, task.tile, 0),
            task.per_row(alpha_at, alpha_per_row),
            reinterpret_cast<std::uint8_t*>(task.scratch + bits_)};
  }

  // Calls row_task for every tile and row group, and fills the stretches of `output`, tensor number
  // `output_at`, that belong to no ragged row with zeros.
  template <class RowTask>
  void for_each(const EntmaxTensors& tensors, Workspace workspace, std::size_t output_at,
                const void* output, const RowTask& row_task) const {
    auto* base = static_cast<std::byte*>(workspace.data);
    auto* offsets = reinterpret_cast<std::int64_t*>(base + offsets_at_);
    if (groups_ >= 0) {
      if (problem_.check_indices) check_offsets(problem_, tensors.offsets);
      OffsetReader reader(problem_, tensors.offsets);
      for (std::int64_t i = 0; i <= groups_; ++i) offsets[i] = reader.next();
    }
    const auto run_task = [&](std::int64_t task, int slot) {
      const Walk::Tile tile = walk_.tile(task / tasks_per_tile());
      const std::int64_t group = task % tasks_per_tile();
      std::byte* scratch = base + slots_at_ + slot_bytes_ * static_cast<std::size_t>(slot);
      if (groups_ < 0) {
        row_task(Task{walk_, tile, 0, 0, length_, scratch});
      } else if (group < groups_) {
        const std::int64_t begin = offsets[group];
        row_task(Task{walk_, tile, group, begin, offsets[group + 1] - begin, scratch});
      } else if (output != nullptr) {
        const std::int64_t end = offsets[groups_];
        clear(walk_.place(output_at, output, tile, 0), tile.rows, offsets[0]);
        clear(walk_.place(output_at, output, tile, end), tile.rows, length_ - end);
      }
    };
    threads_.parallel_for(walk_.tiles() * tasks_per_tile(), run_task, grain_);
  }

  EntmaxProblem problem_;
  Threads threads_;
  Walk walk_;
  std::int64_t length_, groups_, pitch_ = 0;
  std::int64_t packed_rows_ = 0;  // the most that are copied to scratch together

 private:
  void clear(const TensorRows& output, std::int64_t rows, std::int64_t length) const {
    dispatch_floating(problem_.x.dtype, [&]<class T>() {
      for_each_blocked(rows, length, [&](std::int64_t r, std::int64_t i) {
        output.row<T>(r)[i * output.step] = T{};
      });
    });
  }

  // Ragged: one for each row, one for the elements that belong to none.
  std::int64_t tasks_per_tile() const { return groups_ < 0 ? 1 : groups_ + 1; }

  std::int64_t grain_ = 1;
  WorkspaceLayout layout_;
  std::size_t offsets_at_ = 0, slots_at_ = 0, slot_bytes_ = 0, bits_ = 0;
  bool stream_ = false;
};

}  // namespace pullback::entmax
