// Tile sizes of the backward pass: the host plans with them and the kernels are compiled with them.
// Plain C++20.
#pragma once

#include "ops/attention/cuda/tuning.hpp"

namespace pullback::attention {

// What a kernel is compiled for beside the band.
enum class Features {
  plain,  // nothing
  dropout,
  blocks,          // a block mask
  general,         // as the parameters say: bias, softcap, dropout, rows of any strides
  general_blocks,  // that and a block mask
  bias,            // in 16-byte pieces, and d_bias of one launch
  bias_sum,        // the same, and d_bias summed over several launches
};
inline constexpr Features kBackwardFeatures[] = {
    Features::plain,          Features::dropout, Features::blocks,  Features::general,
    Features::general_blocks, Features::bias,    Features::bias_sum};
constexpr bool has_blocks(Features features) {
  return features == Features::blocks || features == Features::general_blocks;
}
constexpr bool is_general(Features features) {
  return features == Features::general || features == Features::general_blocks;
}
// A bias that nothing else comes with: only f16 and bf16 have these.
constexpr bool has_own_bias(Features features) {
  return features == Features::bias || features == Features::bias_sum;
}
constexpr bool has_bias(Features features) {
  return is_general(features) || has_own_bias(features);
}
constexpr bool may_drop(Features features) {
  return features == Features::dropout || is_general(features);
}

// A block owns `keys` keys and goes over tiles of `queries`. Its warps stand in keys / 32 rows of
// `split`: a warp computes the scores of 32 keys and of its share of the queries, and sums d_k and
// d_v of these keys in its share of the width. `stages` tiles of q and d_out are held at a time.
struct BackwardTiles {
  int keys, queries, split, stages;
  int blocks;      // of a multiprocessor: bounds the registers
  int query_rows;  // warps that share the queries of d_q; the others share the width

  constexpr int warps() const { return keys / 32 * split; }
  constexpr int threads() const { return warps() * 32; }
  // Whether a step has one barrier, and two tiles each of p and ds: smxx_backward.cuh. A tile of
  // queries is needed up to the barrier, or with a split behind it too: hence the stages.
  static constexpr bool one_barrier(int split, int stages, bool bias) {
    return !bias && stages > (split > 1 ? 2 : 1);
  }
  // Where a step has two barriers its statistics are needed up to the first one: one place will do,
  // but in f32, which reads units there later on.
  static constexpr int stats_stages(int element_bytes, int split, int stages, bool bias) {
    return element_bytes == 4 || one_barrier(split, stages, bias) ? stages : 1;
  }
  // Rows of q, d_out, k, v; p and ds; statistics; a bias of 16 bits.
  constexpr int shared_bytes(int width, int element_bytes, bool bias) const;
};

// Of a tile of queries in the workspace: lse and delta of each row, and flags.
inline constexpr int stats_bytes(int queries) { return queries * 8 + 16; }

constexpr int BackwardTiles::shared_bytes(int width, int element_bytes, bool bias) const {
  const int stats = stats_bytes(queries) * stats_stages(element_bytes, split, stages, bias);
  return (2 * width * keys + 2 * width * queries * stages +
          (split > 1 ? 2 : 1) * (one_barrier(split, stages, bias) ? 2 : 1) * keys * queries) *
             element_bytes +
         (stats + 127) / 128 * 128 + (bias ? 2 * keys * queries : 0);
}

// The same tiles for kernels with a bias, which takes room of a stage. Where 8 warps have too few
// registers as they are, or no room, they have enough in pairs that share the width. `written`:
// d_bias of one launch, in 16-byte pieces; `sums`: over launches.
inline constexpr BackwardTiles with_bias(BackwardTiles tiles, int width, int arch, bool written,
                                         bool sums) {
  const int shared = max_shared_bytes(arch);
  const bool pairs = sums || (width == 64 && (!written || shared < 227 * 1024));
  if (tiles.split == 1 && pairs && shared >= 163 * 1024) {
    tiles.split = 2, tiles.query_rows = 4, tiles.blocks = 128 / tiles.keys;
  }
  if (tiles.stages > 2) tiles.stages = 2;
  if (tiles.blocks > 2) tiles.blocks = 2;
  if (tiles.shared_bytes(width, 2, true) * tiles.blocks > shared) tiles.stages = 1;
  return tiles;
}

// f16 and bf16. Registers bound the tiles: 32 keys x 64 elements of d_k and d_v in f32 are 128 a
// thread; 99 KiB of shared memory bound them on sm_86, 89 and 120. small_blocks: with a mask of
// blocks of 64, which larger tiles would meet in part.
inline constexpr BackwardTiles backward_tiles(int width, int arch, bool small_blocks) {
  const int shared = max_shared_bytes(arch);
  if (small_blocks && width <= 64) return {64, 64, 1, 1, shared < 200 * 1024 ? 2 : 4, 2};
  if (small_blocks && width == 128 && shared >= 163 * 1024) {
    // Of 228 KiB two blocks leave nothing.
    return {64, 64, 2, shared > 200 * 1024 ? 2 : 1, 2, 2};
  }
  if (width <= 64) return {128, 64, 1, 2, shared >= 163 * 1024 ? 2 : 1, 2};
  if (shared >= 163 * 1024) {
    const int stages = shared > 200 * 1024 ? 3 : 2;
    if (width == 96) return {128, 64, 2, stages, 1, 4};
    if (width == 128) return {128, 64, 2, stages, 1, 2};
    return {64, 64, 4, width == 192 ? stages : stages - 1, 1, 2};
  }
  if (width == 96) return {64, 64, 2, 2, 1, 2};
  if (width == 128) return {64, 64, 2, 1, 1, 2};
  if (width == 192) return {32, 64, 4, 1, 1, 2};
  return {32, 32, 4, 1, 1, 1};
}

// f32, smxx_backward_split.cuh: in tiles of twice the bytes. No keys: they do not fit.
inline constexpr int split_width(int width) { return width == 96 ? 128 : width; }
inline constexpr BackwardTiles split_tiles(int width, int arch) {
  const int shared = max_shared_bytes(arch);
  if (shared < 163 * 1024) {
    if (width == 32) return {64, 32, 2, 2, 1, 2};
    if (width == 64) return {64, 32, 4, 2, 1, 2};
    if (width == 128) return {32, 32, 4, 1, 1, 2};
    return {};
  }
  const bool large = shared > 200 * 1024;
  if (width == 32) return {128, 64, 2, 2, 1, 4};
  if (width == 64) return {128, large ? 64 : 32, 2, 2, 1, 2};
  if (width == 128 && large) return {128, 32, 2, 2, 1, 2};
  if (width == 256 && !large) return {32, 32, 4, 1, 1, 2};
  return {64, 32, 4, width == 128 || (width == 192 && large) ? 2 : 1, 1, 2};
}

// smxx_backward_bias.cuh: a block has so many keys and queries of the bias; its warps stand in
// keys / 32 rows of `side`.
struct BiasTiles {
  int keys, queries, side;

  constexpr int threads() const { return keys * side; }
  constexpr int shared_bytes(int width) const { return 4 * width * (keys + queries) + 8 * queries; }
};

inline constexpr BiasTiles bias_tiles(int width, int arch) {
  constexpr BiasTiles kTiles[] = {{128, 128, 2}, {64, 64, 2}};
  for (const BiasTiles& tiles : kTiles) {
    if (tiles.shared_bytes(width) <= max_shared_bytes(arch)) return tiles;
  }
  return {64, 32, 1};
}

inline constexpr int kRowThreads = 256;  // smxx_backward_rows.cuh

// smxx_backward_plain.cuh: rows that a block goes over, a warp one at a time.
inline constexpr int kPlainThreads = 256;
inline constexpr int kMostPlainBlocks = 1 << 20;  // that share the elements of d_bias
inline constexpr int kPlainTile = 32;

}  // namespace pullback::attention
