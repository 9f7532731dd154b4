// The tile kernels (smxx_tile.cuh): what there is, which rows they serve, and in which shape.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cuda/op_kernel.hpp"
#include "ops/entmax/cuda/tile_params.cuh"

namespace pullback::entmax {

// `kind`: the type of the formula, Family or Weights, and `formula` which one.
inline cuda::OpKernel tile_kernel(std::string_view pass, DType dtype, std::string_view kind,
                                  std::string_view formula, bool staged) {
  const auto type = cuda::device_type(dtype);
  const bool forward = pass == "forward";
  // As many as leave the registers that a staged kernel needs.
  const bool wide = forward && formula == "near_one" && dtype == DType::bf16;
  const int blocks = !staged ? 1 : wide ? 4 : forward ? 5 : 6;
  return {.name = fmt::format("entmax_{}_tile_{}_{}_{}", pass, type, formula,
                              staged ? "staged" : "strided"),
          .file = forward ? "ops/entmax/cuda/smxx_forward_tile.cuh"
                          : "ops/entmax/cuda/smxx_backward_tile.cuh",
          .function = fmt::format("entmax::{}_tile<{}, entmax::{}::{}, {}>", pass, type, kind,
                                  formula, staged),
          .parameters = forward ? "entmax::ForwardTileParams" : "entmax::BackwardTileParams",
          .threads = staged ? kTileThreads : kTileMostThreads,
          .blocks = blocks,
          .constants = {{"entmax::kForwardTileHeld", kForwardTileHeld},
                        {"entmax::kBackwardTileHeld", kBackwardTileHeld},
                        {"entmax::kTileScratch", kTileScratch}}};
}

// Of rows across memory that are read several times; arguments as for tile_kernel().
inline cuda::OpKernel columns_kernel(std::string_view pass, DType dtype, std::string_view kind,
                                     std::string_view formula) {
  const auto type = cuda::device_type(dtype);
  const bool forward = pass == "forward";
  return {
      .name = fmt::format("entmax_{}_columns_{}_{}", pass, type, formula),
      .file = forward ? "ops/entmax/cuda/smxx_forward_columns.cuh"
                      : "ops/entmax/cuda/smxx_backward_columns.cuh",
      .function = fmt::format("entmax::{}_columns<{}, entmax::{}::{}>", pass, type, kind, formula),
      .parameters = forward ? "entmax::ForwardTileParams" : "entmax::BackwardTileParams",
      .threads = kColumnsThreads,
      .blocks = 2,
      .constants = {{"entmax::kForwardTileHeld", kForwardTileHeld},
                    {"entmax::kBackwardTileHeld", kBackwardTileHeld},
                    {"entmax::kTileScratch", kTileScratch}}};
}

// Staged rows have this many elements at most; rows of so few are served whatever their layout is.
inline constexpr std::int64_t kTileLength = 128;

struct TilePlan {
  TileShape shape{};
  bool staged = false;
  int threads = kTileThreads, shared_bytes = 0;
  std::int64_t rows = 0;  // of a block
};

class TilePlanner {
 public:
  // `tensors`: what has the shape of x.
  TilePlanner(const Rows& rows, std::span<const RowTensor* const> tensors, DType dtype,
              bool forward, const cuda::DeviceInfo& device)
      : rows_(rows),
        tensors_(tensors),
        bytes_(static_cast<int>(size_of(dtype))),
        held_(forward ? kForwardTileHeld : kBackwardTileHeld),
        tiles_(forward ? 1 : 2),
        least_read_(forward ? 8 : 16),
        device_(device) {}

  // Nothing where the rows are too long, or lie one after the other along memory.
  std::optional<TilePlan> plan() const {
    if (rows_.length == 0 || rows_.count == 0 || bytes_ > 4) return std::nullopt;
    std::optional<TilePlan> plan;
    if (rows_.length <= kTileLength && side_by_side()) {
      plan = staged();
    } else if ((rows_.length <= kTileLength || across()) && steps_fit()) {
      plan = strided();
    }
    if (plan && (rows_.count - 1) / plan->rows >= std::numeric_limits<std::int32_t>::max()) {
      return std::nullopt;
    }
    return plan;
  }

  // Whether a warp reads parts of sectors of 32 bytes which lie apart. Those are sooner read twice.
  bool reads_scattered_parts(const TilePlan& plan) const {
    return !plan.staged && plan.shape.columns * bytes_ < 32 &&
           rows_.sizes[rows_.rank - 1] * bytes_ > 32;
  }
  // For rows of many threads, of which a warp reads a sector at a time.
  std::optional<TilePlan> columns() const {
    constexpr std::int64_t kLongest = 1 << 17;  // counts and sums in f32
    constexpr std::int64_t kFarthest = 1 << 24;
    const bool near = std::ranges::all_of(
        tensors_, [](const RowTensor* tensor) { return std::abs(tensor->axis) < kFarthest; });
    if (rows_.count == 0 || bytes_ > 4 || rows_.length > kLongest || !near || !across()) {
      return std::nullopt;
    }
    TilePlan plan;
    plan.shape.columns = 32 / bytes_;
    plan.shape.warps = kColumnsThreads / kWarp;
    plan.threads = kColumnsThreads;
    plan.rows = plan.shape.columns;
    return plan;
  }

 private:
  static constexpr int kWarp = 32;

  // The rows, as memory has them, without gaps. What is one of a row may keep dimensions apart.
  bool side_by_side() const {
    return std::ranges::all_of(tensors_, [&](const RowTensor* tensor) {
      bool dense = tensor->axis == 1 || rows_.length == 1;
      std::int64_t step = rows_.length;
      for (int dim = rows_.rank - 1; dim >= 0; step *= rows_.sizes[dim--]) {
        dense &= tensor->outer[dim] == step;
      }
      return dense;
    });
  }
  // Whether neighbouring rows are closer to each other than neighbouring elements of one.
  bool across() const {
    const RowTensor& tensor = *tensors_[0];
    return rows_.rank > 0 && std::abs(tensor.outer[rows_.rank - 1]) < std::abs(tensor.axis);
  }
  bool steps_fit() const {
    return std::ranges::all_of(tensors_, [&](const RowTensor* tensor) {
      return std::abs(tensor->axis) < (std::int64_t{1} << 30) / (2 * rows_.length);
    });
  }

  TilePlan staged() const {
    const auto length = static_cast<int>(rows_.length);
    const bool halves = bytes_ == 2 && length % 2 != 0;
    const int per_word = 4 / bytes_, words = halves ? 0 : length / per_word;
    int lanes = 1;
    while (lanes * held_ < length) lanes *= 2;
    const bool gaps = !halves && words % 2 == 0;
    const auto divided = [&](int elements) { return (elements + lanes - 1) / lanes; };
    TilePlan plan;
    plan.staged = true;
    plan.shape.columns = kWarp / lanes;
    plan.shape.warps = 1;
    plan.shape.held = halves ? divided(length) : divided(words) * per_word;
    plan.shape.pitch = length + (gaps ? per_word : 0);
    if (gaps) {
      plan.shape.per_row =
          static_cast<std::uint32_t>((std::uint64_t{1} << 32) / static_cast<unsigned>(words)) + 1;
    }
    // Enough for a block's threads to have several 16 bytes under way, unless blocks get few.
    constexpr int kBytes = 12 << 10;
    const int rows = kTileThreads / lanes, bytes = rows * plan.shape.pitch * bytes_ * tiles_;
    const std::int64_t of_device = rows_.count / (std::int64_t{8} * device_.multiprocessors * rows);
    plan.shape.passes = static_cast<std::int32_t>(
        std::clamp<std::int64_t>(std::min<std::int64_t>(kBytes / bytes, of_device), 1, 16));
    plan.rows = rows * plan.shape.passes;
    plan.shared_bytes = bytes * plan.shape.passes;
    return plan;
  }

  std::optional<TilePlan> strided() const {
    // Within a warp, while it reads all of a sector of 32 bytes.
    for (int lanes = 1; kWarp / lanes * bytes_ >= 32; lanes *= 2) {
      if (lanes * held_ >= rows_.length) return strided(lanes, 1);
    }
    for (int lanes = 2; kWarp / lanes * bytes_ >= least_read_; lanes *= 2) {
      // As many at least as lanes share what they exchange.
      const std::int64_t warps =
          std::max<std::int64_t>((rows_.length + lanes * held_ - 1) / (lanes * held_), lanes);
      if (warps * (kWarp / lanes) <= kTileScratch && warps * kWarp <= kTileMostThreads) {
        return strided(lanes, static_cast<int>(warps));
      }
    }
    return std::nullopt;
  }
  TilePlan strided(int lanes, int warps) const {
    const int parts = lanes * warps, columns = kWarp / lanes;
    TilePlan plan;
    plan.shape.columns = columns;
    plan.shape.warps = warps;
    plan.shape.held = static_cast<std::int32_t>((rows_.length + parts - 1) / parts);
    if (warps > 1) plan.threads = warps * kWarp;
    plan.rows = warps == 1 ? columns * (kTileThreads / kWarp) : columns;
    return plan;
  }

  const Rows& rows_;
  std::span<const RowTensor* const> tensors_;
  int bytes_, held_;
  int tiles_;       // in shared memory, where staged
  int least_read_;  // bytes of neighbouring rows that are worth reading together
  const cuda::DeviceInfo& device_;
};

// A kernel in its shape.
template <class Params>
class TileKernel {
 public:
  TileKernel(const cuda::OpKernel& kernel, const TilePlan& plan, std::int64_t rows,
             const cuda::DeviceInfo& device)
      : kernel_(kernel, device, plan.shared_bytes), shape_(plan.shape) {
    kernel_.shape.block = static_cast<unsigned>(plan.threads);
    kernel_.shape.grid[0] = grid_of((rows + plan.rows - 1) / plan.rows);
  }

  template <class OpParams>
  void launch(Stream stream, const OpParams& params) const {
    kernel_.launch(stream, Params{params, shape_});
  }

  // Of the plan's description.
  std::string how() const {
    const int lanes = 32 / shape_.columns * shape_.warps;
    if (shape_.held == 0) return fmt::format("rows read again in every step, by {} threads", lanes);
    return fmt::format("rows in the registers of {} thread{}{}", lanes, lanes == 1 ? "" : "s",
                       shape_.pitch > 0 ? ", tiles of rows in shared memory" : "");
  }

 private:
  cuda::PlannedKernel<Params> kernel_;
  TileShape shape_;
};

}  // namespace pullback::entmax
