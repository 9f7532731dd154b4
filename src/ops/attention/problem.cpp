#include "ops/attention/problem.hpp"

#include <fmt/format.h>

#include <cstring>
#include <limits>

#include "core/check.hpp"
#include "core/view.hpp"
#include "core/workspace.hpp"

namespace pullback::attention {

FeatureSet needs(const AttentionProblem& problem, Pass pass) {
  const AttentionSizes sizes = sizes_of(problem);
  FeatureSet set = 0;
  const auto add = [&](bool needed, Feature feature) {
    if (needed) set |= features(feature);
  };
  const DType dtype = problem.q.dtype;
  add(dtype == DType::f64, Feature::f64);
  add(dtype == DType::f32, Feature::f32);
  add(dtype == DType::bf16, Feature::bf16);
  add(dtype == DType::f16, Feature::f16);
  add(problem.bias.given(), Feature::bias);
  add(pass == Pass::backward && problem.d_bias.given(), Feature::bias_gradient);
  add(sizes.varlen, Feature::varlen);
  add(sizes.group > 1, Feature::grouped_heads);
  add(problem.dropout > 0, Feature::dropout);
  add(problem.softcap > 0, Feature::softcap);
  add(problem.mask.left != BandMask::kUnbounded || problem.mask.right != BandMask::kUnbounded,
      Feature::band_mask);
  add(problem.blocks.given(), Feature::block_layout);
  add(pass == Pass::backward && problem.d_lse.given(), Feature::d_lse);
  add(sizes.head_dim % 8 != 0 || sizes.value_dim % 8 != 0, Feature::odd_head_dim);
  add(sizes.head_dim != sizes.value_dim, Feature::value_dim);
  const TensorSpec* const forward[] = {&problem.q, &problem.k, &problem.v, &problem.out};
  const TensorSpec* const backward[] = {&problem.d_out, &problem.d_q, &problem.d_k, &problem.d_v};
  const auto strided = [](const TensorSpec* spec) {
    return spec->given() && spec->shape[spec->rank - 1] > 1 && spec->strides[spec->rank - 1] != 1;
  };
  add(std::ranges::any_of(forward, strided) ||
          (pass == Pass::backward && std::ranges::any_of(backward, strided)),
      Feature::strided_elements);
  return set;
}

Dropout dropout_of(const AttentionProblem& problem, const AttentionTensors& tensors) {
  std::uint64_t seed = problem.dropout_seed;
  if (problem.seed.given()) std::memcpy(&seed, tensors.seed, sizeof(seed));
  return {problem.dropout, seed};
}

AttentionSizes sizes_of(const AttentionProblem& problem) {
  AttentionSizes sizes;
  sizes.varlen = problem.cu_seqlens_q.given();
  const int rows = sizes.varlen ? 0 : 1;  // the dimension that counts rows
  sizes.total_query = problem.q.shape[rows];
  sizes.total_key = problem.k.shape[rows];
  sizes.heads = problem.q.shape[rows + 1];
  sizes.kv_heads = problem.k.shape[rows + 1];
  sizes.group = sizes.kv_heads > 0 ? sizes.heads / sizes.kv_heads : 1;
  sizes.head_dim = problem.q.shape[rows + 2];
  sizes.value_dim = problem.v.shape[rows + 2];
  if (sizes.varlen) {
    sizes.batch = problem.cu_seqlens_q.shape[0] - 1;
    sizes.max_query = std::min(problem.max_seqlen_q, sizes.total_query);
    sizes.max_key = std::min(problem.max_seqlen_k, sizes.total_key);
  } else {
    sizes.batch = problem.q.shape[0];
    sizes.max_query = sizes.total_query;
    sizes.max_key = sizes.total_key;
  }
  return sizes;
}

namespace {

std::int64_t stride(const TensorSpec& spec, int dim) {
  return spec.shape[dim] == 1 ? 0 : spec.strides[dim];
}

}  // namespace

RowStrides row_strides(const TensorSpec& spec) {
  if (!spec.given()) return {};
  const int rows = spec.rank - 3;
  return {rows == 1 ? stride(spec, 0) : 0, stride(spec, rows), stride(spec, rows + 1),
          stride(spec, rows + 2)};
}

RowStrides lse_strides(const TensorSpec& spec) {
  if (!spec.given()) return {};
  const int heads = spec.rank - 2;
  return {heads == 1 ? stride(spec, 0) : 0, stride(spec, heads + 1), stride(spec, heads), 0};
}

BiasStrides bias_strides(const TensorSpec& spec) {
  if (!spec.given()) return {};
  return {stride(spec, 0), stride(spec, 1), stride(spec, 2), stride(spec, 3)};
}

bool SeenBlocks::any(std::int64_t b, std::int64_t h, const Range& queries,
                     const Range& keys) const {
  if (layout_ == nullptr) return true;
  const std::int64_t last_row = (queries.end - 1) / block_;
  for (std::int64_t query_row = queries.begin / block_; query_row <= last_row; ++query_row) {
    const auto blocks = row(b, h, query_row * block_, keys.begin);
    if (!blocks.empty() && blocks.front().column <= (keys.end - 1) / block_) return true;
  }
  return false;
}

std::size_t Sequences::workspace_bytes(const AttentionSizes& sizes) {
  if (!sizes.varlen) return 0;
  return workspace_aligned(static_cast<std::size_t>(sizes.batch) * sizeof(Sequence));
}

Sequences::Sequences(const AttentionProblem& problem, const AttentionSizes& sizes,
                     const AttentionTensors& tensors, void* scratch)
    : same_{0, sizes.total_query, 0, sizes.total_key} {
  if (!sizes.varlen || sizes.batch == 0) return;
  table_ = {static_cast<Sequence*>(scratch), static_cast<std::size_t>(sizes.batch)};
  const View cu_q(problem.cu_seqlens_q, tensors.cu_seqlens_q);
  const View cu_k(problem.cu_seqlens_k, tensors.cu_seqlens_k);
  // max(before, min(entry, total)): also right for entries below zero, as `before` begins at 0.
  const auto clamped = [](std::int64_t entry, std::int64_t before, std::int64_t total) {
    return std::max(before, std::min(entry, total));
  };
  std::int64_t q_end = clamped(cu_q.get_index(0), 0, sizes.total_query);
  std::int64_t k_end = clamped(cu_k.get_index(0), 0, sizes.total_key);
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    Sequence& sequence = table_[index(b)];
    sequence.q_begin = q_end;
    sequence.k_begin = k_end;
    q_end = clamped(cu_q.get_index(b + 1), q_end, sizes.total_query);
    k_end = clamped(cu_k.get_index(b + 1), k_end, sizes.total_key);
    sequence.q_length = std::min(q_end - sequence.q_begin, sizes.max_query);
    sequence.k_length = std::min(k_end - sequence.k_begin, sizes.max_key);
  }
}

namespace {

// Sets rows [begin, end) of a [total,H,D] or, with lse's order of dimensions, [H,total] tensor.
void fill_rows(const View& tensor, bool is_lse, Range rows, double value) {
  if (!tensor) return;
  const TensorSpec& spec = *tensor.spec;
  for (std::int64_t row = rows.begin; row < rows.end; ++row) {
    if (is_lse) {
      for (std::int64_t h = 0; h < spec.shape[0]; ++h) tensor.set(value, h, row);
    } else {
      for (std::int64_t h = 0; h < spec.shape[1]; ++h) {
        for (std::int64_t d = 0; d < spec.shape[2]; ++d) tensor.set(value, row, h, d);
      }
    }
  }
}

template <class F>
void for_each_gap(std::span<const Sequence> table, std::int64_t Sequence::*begin,
                  std::int64_t Sequence::*length, std::int64_t total, const F& f) {
  std::int64_t covered = 0;
  for (const Sequence& sequence : table) {
    if (sequence.*begin > covered) f(Range{covered, sequence.*begin});
    covered = sequence.*begin + sequence.*length;
  }
  if (total > covered) f(Range{covered, total});
}

}  // namespace

void clear_outside_rows(const AttentionProblem& problem, const AttentionTensors& tensors,
                        const Sequences& sequences, Pass pass) {
  const AttentionSizes sizes = sizes_of(problem);
  if (!sizes.varlen) return;
  const bool forward = pass == Pass::forward;
  for_each_gap(sequences.table(), &Sequence::q_begin, &Sequence::q_length, sizes.total_query,
               [&](Range rows) {
                 if (forward) {
                   fill_rows(View(problem.out, tensors.out), false, rows, 0);
                   fill_rows(View(problem.lse, tensors.lse), true, rows,
                             -std::numeric_limits<double>::infinity());
                 } else {
                   fill_rows(View(problem.d_q, tensors.d_q), false, rows, 0);
                 }
               });
  if (forward) return;
  for_each_gap(sequences.table(), &Sequence::k_begin, &Sequence::k_length, sizes.total_key,
               [&](Range rows) {
                 fill_rows(View(problem.d_k, tensors.d_k), false, rows, 0);
                 fill_rows(View(problem.d_v, tensors.d_v), false, rows, 0);
               });
}

namespace {

void check_offsets(std::string_view name, const View& offsets, std::int64_t total,
                   std::int64_t longest, std::string_view longest_name) {
  const auto bad = [&](std::int64_t entry, std::string_view expected) {
    fail(ErrorCode::invalid_argument, "attention", fmt::format("{}[{}]", name, entry), expected,
         fmt::format("{}", offsets.get_index(entry)));
  };
  std::int64_t before = 0;
  for (std::int64_t entry = 0; entry < offsets.spec->shape[0]; ++entry) {
    const std::int64_t value = offsets.get_index(entry);
    if (value < 0 || value > total) bad(entry, fmt::format("a row between 0 and {}", total));
    if (value < before) bad(entry, fmt::format("at least the entry before it, {}", before));
    if (entry > 0 && value - before > longest) {
      bad(entry, fmt::format("at most {} = the entry before it + {} {}", before + longest,
                             longest_name, longest));
    }
    before = value;
  }
}

}  // namespace

void check_cu_seqlens(const AttentionProblem& problem, const AttentionTensors& tensors) {
  const AttentionSizes sizes = sizes_of(problem);
  if (!sizes.varlen) return;
  check_offsets("cu_seqlens_q", View(problem.cu_seqlens_q, tensors.cu_seqlens_q), sizes.total_query,
                sizes.max_query, "max_seqlen_q");
  check_offsets("cu_seqlens_k", View(problem.cu_seqlens_k, tensors.cu_seqlens_k), sizes.total_key,
                sizes.max_key, "max_seqlen_k");
}

}  // namespace pullback::attention
