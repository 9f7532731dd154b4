// block_softmax and block_matmul: the pieces of block-sparse attention, and their block layouts.
//
// Letters: Z batch, H heads, R and C block rows and block columns of a layout, b the block size
// (16 to 128, a multiple of 16), nnz the number of blocks set. A block-sparse tensor is
// [Z, nnz, b, b], blocks ordered by (head, row, column).
#pragma once

#include <cstdint>
#include <memory>

#include "pullback/block_layout.hpp"
#include "pullback/export.hpp"
#include "pullback/plan.hpp"
#include "pullback/tensor.hpp"

namespace pullback {

enum class MaskMode {
  add,   // the value is added to the score
  keep,  // zero hides the score, any other value keeps it
};

// y = softmax over the blocks of a row of (scale · x + rpe + key_padding_mask + attn_mask).
// x, y, rpe, d_y, d_x and added masks have one dtype: f64, f32, bf16 or f16; masks in keep mode may
// also be u8 or bool. A row that sees nothing gives zeros and zero gradients. x that a keep mask
// hides is not looked at, even if it is NaN; a NaN or +inf that is seen makes the row NaN, as does
// one that is added after the mask hid it. Where y is exactly 0, d_y is not looked at and the
// gradients are 0.
struct BlockSoftmaxProblem {
  std::shared_ptr<const BlockLayout> layout;
  std::int64_t block = 0;

  TensorSpec x;                 // [Z,nnz,b,b]
  TensorSpec rpe;               // optional [Z|1,H|1,R·b,C·b]
  TensorSpec key_padding_mask;  // optional [Z,C·b]
  TensorSpec attn_mask;         // optional [R·b,C·b]
  MaskMode key_padding_mode = MaskMode::add;
  MaskMode attn_mask_mode = MaskMode::keep;
  double scale = 1;  // of x alone, never of the added terms

  TensorSpec y;                   // like x; y may be x's memory (in place)
  TensorSpec d_y, d_x;            // like x; d_x may be d_y's memory
  TensorSpec d_rpe;               // the shape of rpe; zero where no block is
  TensorSpec d_key_padding_mask;  // the mask's shape, summed over heads and rows; add mode only
  TensorSpec d_attn_mask;         // the mask's shape, summed over Z and H; add mode only

  friend bool operator==(const BlockSoftmaxProblem& a, const BlockSoftmaxProblem& b);
};

// Forward reads x and the added terms, writes y. Backward reads y and d_y, writes the non-null of
// d_x, d_rpe, d_key_padding_mask, d_attn_mask.
struct BlockSoftmaxTensors {
  const void* x = nullptr;
  const void* rpe = nullptr;
  const void* key_padding_mask = nullptr;
  const void* attn_mask = nullptr;
  void* y = nullptr;
  const void* d_y = nullptr;
  void* d_x = nullptr;
  void* d_rpe = nullptr;
  void* d_key_padding_mask = nullptr;
  void* d_attn_mask = nullptr;
};

PULLBACK_API BlockSoftmaxProblem complete(const BlockSoftmaxProblem& problem);
PULLBACK_API Plan<BlockSoftmaxTensors> make_plan(const Device& device,
                                                 const BlockSoftmaxProblem& problem, Pass pass,
                                                 const PlanOptions& options = {});

// c = op(a) · op(b), where op transposes the logical matrix if asked. The letters name what is
// sparse: c, a, b. Dense tensors are [Z,H,rows,columns]; the sparse one is [Z,nnz,b,b] over layout.
//   sdd: a [Z,H,R·b,K] or transposed, b [Z,H,K,C·b] or transposed, c sparse
//   dsd: a sparse, b [Z,H,C·b,N] (R·b when transpose_a), c [Z,H,R·b,N] (C·b when transpose_a)
//   dds: a [Z,H,M,R·b] (C·b when transpose_b), b sparse, c [Z,H,M,C·b] (R·b when transpose_b)
// With transpose_c, c is stored transposed: each dense matrix, or for sdd each block and the layout
// (c is then ordered by layout.transposed()). Rows of c that no block reaches are zeros.
// All tensors have one dtype: f64, f32, bf16 or f16; sums are f64 for f64 and f32 for the others.
enum class BlockMatmulMode { sdd, dsd, dds };

struct BlockMatmulProblem {
  BlockMatmulMode mode = BlockMatmulMode::sdd;
  bool transpose_a = false, transpose_b = false, transpose_c = false;
  std::shared_ptr<const BlockLayout> layout;
  std::int64_t block = 0;
  TensorSpec a, b, c;
  TensorSpec d_c, d_a, d_b;

  friend bool operator==(const BlockMatmulProblem& a, const BlockMatmulProblem& b);
};

// Forward reads a and b, writes c. Backward reads a, b, d_c, writes the non-null of d_a, d_b.
struct BlockMatmulTensors {
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  const void* d_c = nullptr;
  void* d_a = nullptr;
  void* d_b = nullptr;
};

PULLBACK_API BlockMatmulProblem complete(const BlockMatmulProblem& problem);
PULLBACK_API Plan<BlockMatmulTensors> make_plan(const Device& device,
                                                const BlockMatmulProblem& problem, Pass pass,
                                                const PlanOptions& options = {});

}  // namespace pullback
