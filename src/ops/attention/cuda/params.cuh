// What the host hands to the kernels of attention. Plain C++20; host and device compile it.
#pragma once

#include "ops/attention/cuda/blocks.cuh"
#include "ops/attention/dropout.cuh"
#include "ops/attention/sequence.cuh"

namespace pullback::attention {

// q k v out and their gradients: [B,S,H,width], or [total,H,width] with batch 0. Steps in elements.
struct HeadRows {
  void* data;
  int64_t batch, row, head, element;
};

// lse, d_lse, delta: [B,H,S], or [H,total] with batch 0.
struct RowValues {
  void* data;
  int64_t batch, head, row;
};

// [B,H,Sq,Sk]; a step of 0 broadcasts.
struct Plane {
  void* data;
  int64_t batch, head, query, key;
};

// A dimension of the problem, or 1.
struct BiasShape {
  int64_t batch, head, query, key;
};

// smxx_aligned_rows.cuh: rows of tensors, by as many words of them as are told, from their places
// to others. Heads' elements count as keys.
struct RowCopy {
  Plane from, to;
  BiasShape shape;
  int64_t width;      // of the rows written
  int32_t lane_bits;  // log 2 of the threads of a row
  uint32_t chunks;    // of a row, by as many thread blocks
  uint32_t blocks;    // along the grid's x
};
inline constexpr int kMostCopies = 6;
struct RowCopyParams {
  RowCopy copies[kMostCopies];  // the grid's z
};
inline constexpr int kCopyThreads = 256, kCopyPieces = 8;

// One sequence of a varlen problem, as smxx_sequences.cuh lists it. Its tiles also cover the rows
// behind it that belong to no sequence: extents count both.
struct PackedSequence {
  Sequence rows;
  int64_t q_extent, k_extent;
  int64_t first_q_tile, first_k_tile;  // tiles of the sequences before
};

struct SequencesParams {
  const void *cu_q, *cu_k;
  int64_t stride_q, stride_k;
  int32_t wide_q, wide_k;  // int64 rather than int32
  int64_t sequences;       // B
  int64_t total_q, total_k, max_q, max_k;
  int32_t q_tile, k_tile;
  // [B + 2]: the sequences, the rows before the first one as an empty sequence, and an entry that
  // holds the numbers of tiles.
  PackedSequence* table;
};

// What both passes know of a problem.
struct Problem {
  int32_t heads, group;  // query heads, and how many share a key/value head
  int32_t head_dim, value_dim;
  int64_t batch, query, key;        // lengths when not varlen
  const PackedSequence* sequences;  // null unless varlen
  Band band;
  SeenBlocksTable blocks;
  float scale, softcap;               // softcap 0: none
  float inner_scale;                  // scale / softcap, or scale without one
  double exact_scale, exact_softcap;  // for f64
  Dropout dropout;
  float keep_scale;
};

struct ForwardParams {
  Problem problem;
  HeadRows q, k, v, out;
  RowValues lse;         // data null: not wanted
  Plane bias;            // data null: none
  int32_t bias_vectors;  // 8 neighbouring keys from a multiple of 8 on are 16-byte pieces of it
  // The grid in order: groups of (batch, head) pairs that work at the same time, their tiles from
  // the last one on, the pairs of the group.
  int32_t q_tiles;     // of a pair; varlen: an upper bound for all sequences together
  int32_t pair_group;  // pairs
  // sm90_forward.cuh, with groups of one pair: units of one or two tiles of a pair; and after how
  // many units a thread block would come to the same tiles of other pairs, and again.
  int32_t units, unit_tiles, cycle_units;
  // Of tiles that several blocks share, [pairs, blocks.shared_count]: how many are done, and what
  // they have come to (smxx_forward_parts.cuh).
  int32_t* parts_done;
  float* parts;
};

}  // namespace pullback::attention
