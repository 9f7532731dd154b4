// What the variants of attention see: sizes, sequences, visible ranges, and their makers.
// Everything here takes a problem that complete() has returned.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "core/variant.hpp"
#include "ops/attention/dropout.cuh"
#include "ops/attention/sequence.cuh"
#include "pullback/attention.hpp"

namespace pullback::attention {

// --- Features ---

enum class Feature {
  f64,
  f32,
  bf16,
  f16,
  bias,
  bias_gradient,
  varlen,
  grouped_heads,
  dropout,
  softcap,
  band_mask,
  d_lse,
  odd_head_dim,      // D or Dv not a multiple of 8
  value_dim,         // Dv != D
  strided_elements,  // a tensor of rows whose last stride is not 1
  block_layout,
  count
};

inline constexpr std::string_view kFeatureNames[] = {
    "f64",         "f32",    "bf16",         "f16",     "bias",
    "d_bias",      "varlen", "GQA",          "dropout", "softcap",
    "band mask",   "d_lse",  "odd head dim", "Dv != D", "strided elements",
    "block layout"};
static_assert(std::size(kFeatureNames) == static_cast<std::size_t>(Feature::count));

inline constexpr FeatureSet kAllFeatures = (FeatureSet{1} << static_cast<int>(Feature::count)) - 1;

FeatureSet needs(const AttentionProblem& problem, Pass pass);

// --- Sizes ---

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct AttentionSizes {
  std::int64_t batch = 0;
  std::int64_t max_query = 0;  // no sequence is longer; Sq itself when not varlen
  std::int64_t max_key = 0;
  std::int64_t total_query = 0;  // rows of q in one batch item: Sq, or total_q when varlen
  std::int64_t total_key = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t group = 1;  // query heads per key/value head
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;
  bool varlen = false;
};

AttentionSizes sizes_of(const AttentionProblem& problem);

// Element strides of [B,S,H,D] or [total,H,D] (batch stride 0), and of [B,H,S] or [H,total]
// (element stride 0). Dimensions of size 1 have stride 0, so that a bias broadcasts by itself.
struct RowStrides {
  std::int64_t batch = 0, row = 0, head = 0, element = 0;
};
RowStrides row_strides(const TensorSpec& spec);  // q k v out and their gradients
RowStrides lse_strides(const TensorSpec& spec);  // lse d_lse

struct BiasStrides {
  std::int64_t batch = 0, head = 0, query = 0, key = 0;
};
BiasStrides bias_strides(const TensorSpec& spec);

// --- Sequences ---

// The sequences of one run. Whatever cu_seqlens holds, they lie within the tensors, do not overlap
// and come in order: each entry is clamped to [largest entry before it, total], and a sequence
// longer than max_seqlen is cut to it.
class Sequences {
 public:
  // Bytes of scratch that a run needs for them (0 unless varlen), a multiple of the alignment.
  static std::size_t workspace_bytes(const AttentionSizes& sizes);

  Sequences(const AttentionProblem& problem, const AttentionSizes& sizes,
            const AttentionTensors& tensors, void* scratch);

  Sequence operator[](std::int64_t b) const { return table_.empty() ? same_ : table_[index(b)]; }
  std::span<const Sequence> table() const { return table_; }  // empty unless varlen

 private:
  static std::size_t index(std::int64_t b) { return static_cast<std::size_t>(b); }
  Sequence same_;
  std::span<Sequence> table_;
};

// Varlen: writes what the outputs of `pass` hold in rows outside every sequence: zeros, lse -inf.
void clear_outside_rows(const AttentionProblem& problem, const AttentionTensors& tensors,
                        const Sequences& sequences, Pass pass);

// Checked mode: throws Error naming the first bad entry of cu_seqlens. Writes nothing.
void check_cu_seqlens(const AttentionProblem& problem, const AttentionTensors& tensors);

// --- Band mask ---

inline constexpr Band band_of(const BandMask& mask) {
  const auto reach = [](std::int64_t side) {
    return side == BandMask::kUnbounded ? kFar : std::min(side, kFar);
  };
  return {reach(mask.left), reach(mask.right), mask.corner == Corner::bottom_right};
}

inline constexpr Range visible_keys(const BandMask& mask, const Sequence& sequence,
                                    std::int64_t i) {
  return visible_keys(band_of(mask), sequence, i);
}
inline constexpr Range seeing_queries(const BandMask& mask, const Sequence& sequence,
                                      std::int64_t j) {
  return seeing_queries(band_of(mask), sequence, j);
}

// --- Block mask ---

// What the block mask of a problem lets heads see. Without one, everything.
class SeenBlocks {
 public:
  explicit SeenBlocks(const AttentionProblem& problem)
      : layout_(problem.blocks.layout.get()),
        block_(std::max<std::int64_t>(problem.blocks.block, 1)),
        batches_(problem.blocks.batches),
        heads_(layout_ && batches_ > 0 ? layout_->heads() / batches_ : 0) {}

  bool given() const { return layout_ != nullptr; }
  std::int64_t block() const { return block_; }
  bool sees(std::int64_t b, std::int64_t h, std::int64_t query, std::int64_t key) const {
    return layout_ == nullptr || layout_->present(plane(b, h), query / block_, key / block_);
  }
  // Of the query's row the blocks that end behind `key`, by column; only where a mask is given.
  std::span<const BlockLayout::Block> row(std::int64_t b, std::int64_t h, std::int64_t query,
                                          std::int64_t key = 0) const {
    const auto all = layout_->row(plane(b, h), query / block_);
    return {std::ranges::lower_bound(all, key / block_, {}, &BlockLayout::Block::column),
            all.end()};
  }
  // Whether any of the queries sees any of the keys; the ranges are not empty.
  bool any(std::int64_t b, std::int64_t h, const Range& queries, const Range& keys) const;

 private:
  std::int64_t plane(std::int64_t b, std::int64_t h) const {
    return (batches_ == 1 ? 0 : b) * heads_ + (heads_ == 1 ? 0 : h);
  }

  const BlockLayout* layout_;
  std::int64_t block_, batches_, heads_;
};

// --- Dropout ---

// The generator of a run on the CPU, which reads the seed where the problem has a tensor of it.
Dropout dropout_of(const AttentionProblem& problem, const AttentionTensors& tensors);

// --- Variants ---

using Body = std::unique_ptr<PlanBody<AttentionTensors>>;
Body make_cpu(const AttentionProblem& problem, const Device& device, Pass pass);
Body make_cpu_avx512_bf16(const AttentionProblem& problem, const Device& device, Pass pass);
Body make_cpu_amx_bf16(const AttentionProblem& problem, const Device& device, Pass pass);
Body make_cuda_forward(const AttentionProblem& problem, const Device& device, Pass pass);
Body make_cuda_sm90_forward(const AttentionProblem& problem, const Device& device, Pass pass);
Body make_reference(const AttentionProblem& problem, const Device& device, Pass pass);
Body make_cuda_sm90_backward(const AttentionProblem& problem, const Device& device, Pass pass);
Body make_cuda_backward(const AttentionProblem& problem, const Device& device, Pass pass);
Body make_textbook(const AttentionProblem& problem, const Device& device, Pass pass);

}  // namespace pullback::attention
