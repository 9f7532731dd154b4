// Tile sizes of sm90_backward.cuh: the host plans with them and the kernels are compiled with them.
// Plain C++20.
#pragma once

#include "ops/attention/cuda/backward_tuning.cuh"

namespace pullback::attention {

// bias_sum: d_bias is summed over the batch, by a chain (BackwardParams).
enum class HopperBackwardKind {
  plain,
  softcap,
  dropout,
  bias,
  bias_sum,
  bias_dropout,
  bias_sum_dropout,
  blocks
};
inline constexpr HopperBackwardKind kHopperBackwardKinds[] = {HopperBackwardKind::plain,
                                                              HopperBackwardKind::softcap,
                                                              HopperBackwardKind::dropout,
                                                              HopperBackwardKind::bias,
                                                              HopperBackwardKind::bias_sum,
                                                              HopperBackwardKind::bias_dropout,
                                                              HopperBackwardKind::bias_sum_dropout,
                                                              HopperBackwardKind::blocks};

// A warpgroup that copies and adds up d_q, and two that work; tiles as backward_tiles() has them on
// sm_90.
struct HopperBackwardTile {
  HopperBackwardKind kind;
  int width, keys;
  // Tiles of q and, but see d_out_stages(), of d_out. The last one is where keys are made finite,
  // where that is needed.
  int stages;
  int copy_registers, work_registers;  // of a thread
  int queries = 64;  // of a step: a tile of the plan, or two; with a block mask from anywhere

  constexpr bool blocks() const { return kind == HopperBackwardKind::blocks; }
  constexpr bool bias() const {
    return kind >= HopperBackwardKind::bias && kind <= HopperBackwardKind::bias_sum_dropout;
  }
  constexpr bool bias_sum() const {
    return kind == HopperBackwardKind::bias_sum || kind == HopperBackwardKind::bias_sum_dropout;
  }
  constexpr bool dropout() const {
    return kind == HopperBackwardKind::dropout || kind == HopperBackwardKind::bias_dropout ||
           kind == HopperBackwardKind::bias_sum_dropout;
  }
  // Tiles of dS, or wide of P: one where a tile of a bias needs the other one's place.
  constexpr int score_tiles() const { return bias() ? 1 : 2; }
  constexpr bool wide() const { return width > 128; }
  constexpr int d_out_stages() const { return width == 256 ? 1 : stages; }
  static constexpr int groups() { return 2; }
  static constexpr int threads() { return (groups() + 1) * 128; }
  constexpr int panels() const { return (width + 63) / 64; }  // of 64 columns, 128 bytes
  constexpr int query_panels() const { return queries / 64; }
  constexpr int part_queries() const { return blocks() ? 64 : queries; }
  constexpr int sum_width() const { return panels() * 64; }  // of d_q's sums
  constexpr int stats() const { return stages * query_panels() * stats_bytes(64); }
  // Keys and values; queries and d_out; dS, and a bias; d_q. Wide: two tiles each of P and dS, and
  // a part of d_q for each warpgroup.
  constexpr int tiles_bytes() const {
    const int rows = 2 * keys + (stages + d_out_stages()) * queries;
    const int score_rows = (wide() ? 4 : 2) * keys * query_panels();
    const int sums = queries * (width == 256 ? sum_width() / 2 : sum_width());
    return rows * panels() * 128 + score_rows * 128 + sums * 4;
  }
  // Barriers and the block's place; statistics; tiles, which begin at a multiple of 1024.
  static constexpr int kPlaceBytes = 1024;
  constexpr int first_tile() const { return (kPlaceBytes + stats() + 1023) / 1024 * 1024; }
  constexpr int shared_bytes() const { return first_tile() + tiles_bytes(); }
};
constexpr bool has_hopper_backward_tile(HopperBackwardKind kind, int width, int element_bytes) {
  const int widest = kind == HopperBackwardKind::blocks ? 128 : 256;
  return width >= 64 && width <= widest && element_bytes == 2;
}
// Heads of 64 with few queries are little work for what a thread block begins and ends with: where
// there are many blocks, other kernels have two of a multiprocessor.
constexpr bool hopper_backward_pays(int width, int64_t queries, int64_t blocks,
                                    int multiprocessors) {
  return width > 64 || queries > 256 || blocks <= 2 * multiprocessors;
}
constexpr HopperBackwardTile hopper_backward_tile(HopperBackwardKind kind, int width) {
  const bool sums =
      kind == HopperBackwardKind::bias_sum || kind == HopperBackwardKind::bias_sum_dropout;
  const bool draws =
      kind == HopperBackwardKind::dropout || kind == HopperBackwardKind::bias_dropout;
  // Twice the queries need registers that sums of a bias, and draws, have use for.
  if (width == 64 && !sums && !draws) return {kind, width, 128, 2, 40, 232, 128};
  if (width == 64) return {kind, width, 128, 4, 40, 232};
  if (width == 96) return {kind, width, 128, 2, 56, 224};
  if (width == 128) {
    // Either those who copy spill or those who work: measured.
    const bool plain = kind == HopperBackwardKind::plain;
    if (plain || sums) return {kind, width, 128, 2, 40, 232};
    return {kind, width, 128, 2, 24, 240};
  }
  return {kind, width, 64, 2, 40, 232};
}

// sm90_backward_blocks.cuh: a warpgroup whose first warp copies and one that works, which owns a
// tile of keys, or of queries.
struct BlockBackwardTile {
  int width;
  bool owns_keys;
  int stages;  // pairs of listed tiles
  int copy_registers, work_registers;
  int resident;
  static constexpr int kRows = 64, kThreads = 256, kPlaceBytes = 1024;

  constexpr int panels() const { return (width + 63) / 64; }
  constexpr int tile_bytes() const { return panels() * kRows * 128; }
  constexpr int first_tile() const {
    return (kPlaceBytes + (owns_keys ? stages * stats_bytes(kRows) : 0) + 1023) / 1024 * 1024;
  }
  constexpr int shared_bytes() const {
    return first_tile() + (2 + 2 * stages) * tile_bytes() + (owns_keys ? kRows * 128 : 0);
  }
};
constexpr BlockBackwardTile block_backward_tile(int width, bool owns_keys) {
  // Two sums of 128 columns leave few registers for the rest, one of 64 enough for a third block.
  if (width == 128 && owns_keys) return {width, owns_keys, 2, 32, 224, 2};
  if (width == 64 && !owns_keys) return {width, owns_keys, 3, 24, 136, 3};
  return {width, owns_keys, width == 64 ? 4 : 2, 40, 216, 2};
}

// sm90_bias_gradient.cuh: a tile of the bias, and stages of what it takes of an item.
struct HopperBiasTile {
  int width, halves;  // tiles of 64 queries
  bool dropout;
  static constexpr int keys = 128, stages = 2, threads = 256;

  constexpr int queries() const { return halves * 64; }
  constexpr int panels() const { return (width + 63) / 64; }
  // With what it takes to begin at a multiple of 1024.
  constexpr int shared_bytes() const {
    return stages * (2 * (keys + queries()) * panels() * 128 + queries() * 8) +
           queries() * keys * 2 + 1024;
  }
};
constexpr bool has_hopper_bias_tile(int width, int element_bytes) {
  return width <= 128 && element_bytes == 2;
}
// Heads up to 32 take the room of those of 64.
constexpr HopperBiasTile hopper_bias_tile(int width, bool dropout) {
  return width <= 64 ? HopperBiasTile{64, 2, dropout} : HopperBiasTile{width, 1, dropout};
}

}  // namespace pullback::attention
