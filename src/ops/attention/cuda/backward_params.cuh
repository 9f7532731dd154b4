// What the host hands to the kernels of the backward pass. Plain C++20; host and device compile it.
#pragma once

#include "ops/attention/cuda/params.cuh"

namespace pullback::attention {

// Which launch, or which batch item, of those that add up d_bias.
enum class BiasStep : int32_t { only, first, middle, last };

// A plane is the scores of one query head: batch · heads of them, or, when varlen, heads. A pair is
// the planes that share a key/value head: planes [pair · group, (pair + 1) · group).
struct BackwardParams {
  Problem problem;
  HeadRows q, k, v, out, d_out;
  HeadRows d_q, d_k, d_v;  // data null: not wanted
  RowValues lse, d_lse;    // d_lse.data null: zero
  Plane bias, d_bias;      // data null: none, or not wanted from this kernel
  // Their rows are contiguous and aligned to 16 bytes.
  int32_t bias_vectors, d_bias_vectors;
  BiasShape bias_shape;
  BiasStep bias_step;
  int32_t bias_parts;  // smxx_backward_bias.cuh: blocks that share a tile of d_bias
  // Of smxx_backward_bias.cuh [bias_parts, elements of the bias], unless bias_parts is 1; or of the
  // batch items that add up d_bias one after the other [heads, q_tiles, k_tiles, rows of both
  // tiles].
  float* bias_sums;
  // Of a chain: a launch in which a tile of keys of each batch item waits, step by step, for that
  // of the item before to have added to d_bias. Steps that have [pairs, k_tiles], of which tells;
  // batch items; key/value heads of a pair group, each of pair_group / chain_heads items.
  int32_t* bias_turns;
  int32_t chain_items, chain_heads;

  int32_t q_tiles, k_tiles;  // of a plane; varlen: upper bounds for all sequences together
  // Rows of q k v d_out d_q d_k d_v, and of out and d_out, are contiguous and aligned to 16 bytes.
  int32_t vectors, row_vectors;

  // The pairs of this launch. The grid in order: groups of pairs that work at the same time, their
  // key tiles, the pairs of the group: of a chain, all heads of an item, then those of the next.
  int64_t first_pair;
  int32_t pairs, pair_group;

  void* stats;  // [planes, q_tiles] of StatsTile: smxx_backward_rows.cuh
  // A line is a sum of d_q with its turns: one for each tile of queries or, with a block mask,
  // more.
  int32_t lines;   // of a plane
  int32_t* turns;  // [planes, lines]: key tiles whose part of d_q is in `sums`
  float* sums;     // [planes of this launch, lines, rows of a tile · width]
  // Of tiles of keys that several owners share.
  int32_t* parts_done;  // [pairs, blocks.shared_count, d_k and d_v]: how many are in `key_sums`
  float* key_sums;      // [pairs of this launch, …, keys of a tile · width]
  int64_t turn_count;   // `turns` and what lies behind, which begin as zeros
};

}  // namespace pullback::attention
