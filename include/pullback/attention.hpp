// attention: softmax(scale · q kᵀ + bias) v and its gradients, without a [B,H,Sq,Sk] tensor.
//
// Letters: B batch, Sq/Sk query/key length, H query heads, Hkv key/value heads (H a multiple of
// Hkv), D head dim of q and k, Dv head dim of v. Formulas: src/ops/attention/README.md.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>

#include "pullback/block_layout.hpp"
#include "pullback/export.hpp"
#include "pullback/plan.hpp"
#include "pullback/tensor.hpp"

namespace pullback {

enum class Corner { top_left, bottom_right };

// Query i sees key j when i + o - left <= j <= i + o + right, with o = 0 for top_left and Sk - Sq
// for bottom_right (of each sequence when varlen). Causal is {kUnbounded, 0, corner}; a window of
// W keys with the query's own is {W - 1, 0, corner}.
struct BandMask {
  static constexpr std::int64_t kUnbounded = -1;
  std::int64_t left = kUnbounded;
  std::int64_t right = kUnbounded;
  Corner corner = Corner::top_left;

  static constexpr BandMask causal(Corner corner) { return {kUnbounded, 0, corner}; }
  friend bool operator==(const BandMask&, const BandMask&) = default;
};

// Query i sees key j only where the layout has the block (i / block, j / block), beside what the
// band says. A kernel's tiles that have absent blocks alone are neither read nor computed. The last
// blocks may reach past Sq and Sk.
struct BlockMask {
  std::shared_ptr<const BlockLayout> layout;  // null: none. [batches · heads, R, C], heads H or 1
  std::int64_t batches = 1;                   // B, or 1 for all
  std::int64_t block = 0;                     // 16 to 128, a multiple of 16

  bool given() const { return layout != nullptr; }
  PULLBACK_API friend bool operator==(const BlockMask& a, const BlockMask& b);
};

// Forward needs q, k, v; backward needs d_out too. Specs not given of out and lse are filled in:
// row-major, in the dtype of what they belong to; and so are those of d_q, d_k, d_v and d_bias
// where none of them is given. Else a plan makes only the gradients that are. q, k, v, bias, out
// and their gradients have one dtype: f64, f32, bf16 or f16.
struct AttentionProblem {
  TensorSpec q;  // [B,Sq,H,D], or [total_q,H,D] when varlen
  TensorSpec k;  // [B,Sk,Hkv,D], or [total_k,Hkv,D]
  TensorSpec v;  // [B,Sk,Hkv,Dv], or [total_k,Hkv,Dv]

  TensorSpec bias;  // optional [B|1,H|1,Sq|1,Sk|1], added after scale and softcap; not varlen
  // Optional i32 or i64 [B+1]: varlen. Sequence b has rows [cu[b], cu[b+1]); rows outside every
  // sequence get zeros (lse -inf). Each entry is clamped to [largest before it, total], and a
  // sequence longer than max_seqlen is cut to it.
  TensorSpec cu_seqlens_q;
  TensorSpec cu_seqlens_k;
  std::int64_t max_seqlen_q = 0;  // varlen: upper bounds of the lengths; 0 = total
  std::int64_t max_seqlen_k = 0;

  TensorSpec out;  // [B,Sq,H,Dv] or [total_q,H,Dv]
  TensorSpec
      lse;  // natural log; f32 (f64 for f64); [B,H,Sq] or [H,total_q]; -inf: row sees nothing

  TensorSpec d_out;  // like out; any strides
  TensorSpec d_lse;  // optional, like lse
  TensorSpec d_q, d_k, d_v;
  TensorSpec d_bias;  // the bias's own shape, summed over its broadcast dimensions

  std::optional<double> scale;  // 1/sqrt(D) when unset
  double softcap = 0;           // c > 0: s <- c tanh(s/c), after the scale and before the bias
  BandMask mask;
  BlockMask blocks;    // R = ⌈Sq / block⌉, C = ⌈Sk / block⌉; not varlen
  double dropout = 0;  // in [0, 1); the README defines the generator
  std::uint64_t dropout_seed = 0;
  // i64, one element: where each run reads the seed, in place of dropout_seed. One plan then serves
  // a training loop, and a captured run draws anew at each replay.
  TensorSpec seed;
  bool deterministic = true;   // false allows variants whose sums have no fixed order
  bool check_indices = false;  // checked mode: run() reports the first bad cu_seqlens entry

  friend bool operator==(const AttentionProblem&, const AttentionProblem&) = default;
};

// Forward reads q, k, v, bias, cu_seqlens, seed and writes out and, unless null, lse.
// Backward reads those, out, lse, d_out, d_lse and writes the non-null of d_q,
// d_k, d_v, d_bias.
struct AttentionTensors {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* bias = nullptr;
  const void* cu_seqlens_q = nullptr;
  const void* cu_seqlens_k = nullptr;
  void* out = nullptr;
  void* lse = nullptr;
  const void* d_out = nullptr;
  const void* d_lse = nullptr;
  void* d_q = nullptr;
  void* d_k = nullptr;
  void* d_v = nullptr;
  void* d_bias = nullptr;
  const void* seed = nullptr;
};

// The problem with every default filled in. Throws Error where `problem` breaks the contract.
PULLBACK_API AttentionProblem complete(const AttentionProblem& problem);

PULLBACK_API Plan<AttentionTensors> make_plan(const Device& device, const AttentionProblem& problem,
                                              Pass pass, const PlanOptions& options = {});

// Writes what dropout keeps: mask is u8 or bool [B,H,Sq,Sk], 1 = kept; any strides. For tests.
PULLBACK_API void write_dropout_mask(const TensorSpec& spec, void* mask, double dropout,
                                     std::uint64_t dropout_seed);

}  // namespace pullback
