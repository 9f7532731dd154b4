// Hostile callers of the C ABI: bytes become problems with any dtypes, shapes, strides and options,
// tensors with any content (index tensors among them), and runs. Sanitizers watch; besides, no
// status but those of bad input may come back, and a failure has to have a message.
//
// Memory is exactly what pullback_plan_tensor and pullback_plan_workspace_bytes ask for.
#include <algorithm>

#include "caller.hpp"

using namespace pullback::fuzz;

namespace {

using Plan = std::unique_ptr<pullback_plan, decltype(&pullback_plan_destroy)>;
using Layout = std::unique_ptr<pullback_block_layout, decltype(&pullback_block_layout_destroy)>;

template <class Make, class Problem>
Plan plan_for(Make make, const Problem& problem, Caller& caller) {
  const pullback_plan_options options = caller.options();
  pullback_plan* made = nullptr;
  const bool ok = succeeded(make(&problem, caller.choice(1), &options, &made));
  if (ok != (made != nullptr)) defect("status and plan disagree");
  return Plan(made, pullback_plan_destroy);
}

// A layout and its size; `nnz` is its number of blocks.
struct Blocks {
  Layout layout{nullptr, pullback_block_layout_destroy};
  std::int64_t heads = 0, rows = 0, columns = 0, nnz = 0;
};

Blocks layout_of(Caller& c, std::int64_t heads, std::int64_t rows, std::int64_t columns) {
  Blocks blocks;
  pullback_block_layout* made = nullptr;
  std::vector<std::uint8_t> present(static_cast<std::size_t>(heads * rows * columns));
  for (auto& block : present) block = static_cast<std::uint8_t>(c.choice(1));
  const bool ok = succeeded(
      c.chance(50) ? pullback_block_layout_create(c.size(), c.size(), -1, present.data(), &made)
                   : pullback_block_layout_create(heads, rows, columns, present.data(), &made));
  if (!ok) return blocks;
  blocks.layout.reset(made);
  if (!succeeded(pullback_block_layout_size(made, &blocks.heads, &blocks.rows, &blocks.columns,
                                            &blocks.nnz))) {
    defect("layout_size");
  }
  return blocks;
}

Blocks some_layout(Caller& c) {
  const std::int64_t heads = c.size() & 3, rows = c.size() & 7;
  return layout_of(c, heads, rows, c.size() & 7);
}

void attention(Caller& c) {
  const bool varlen = c.chance(3);
  const std::int64_t batch = c.size(), queries = c.size(), keys = c.size(), kv_heads = c.size(),
                     heads = c.chance(2) ? kv_heads : 2 * (kv_heads & 0xff), dim = c.size(),
                     value_dim = c.chance(2) ? dim : c.size();
  const DLDataType type = c.floating(), statistics = Caller::statistics(type);
  const auto rows = [&](std::int64_t length, std::int64_t count, std::int64_t width) {
    return varlen ? std::vector{length, count, width} : std::vector{batch, length, count, width};
  };
  const auto lse = varlen ? std::vector{heads, queries} : std::vector{batch, heads, queries};
  pullback_attention_problem p = PULLBACK_ATTENTION_PROBLEM_INIT;
  p.q = c.tensor(rows(queries, heads, dim), type);
  p.k = c.tensor(rows(keys, kv_heads, dim), type);
  p.v = c.tensor(rows(keys, kv_heads, value_dim), type);
  const std::vector bias = {c.chance(2) ? 1 : batch, c.chance(2) ? 1 : heads,
                            c.chance(2) ? 1 : queries, c.chance(2) ? 1 : keys};
  if (c.chance(varlen ? 20 : 2)) p.bias = c.tensor(bias, type);
  if (varlen) {
    const std::int64_t sequences = 1 + (batch & 7);
    p.cu_seqlens_q = c.tensor({sequences}, c.index());
    p.cu_seqlens_k = c.tensor({sequences}, c.index());
    if (c.chance(3)) p.max_seqlen_q = c.size();
    if (c.chance(3)) p.max_seqlen_k = c.size();
  }
  p.out = c.output(rows(queries, heads, value_dim), type);
  p.lse = c.output(lse, statistics);
  p.d_out = c.tensor(rows(queries, heads, value_dim), type);
  if (c.chance(3)) p.d_lse = c.tensor(lse, statistics);
  p.d_q = c.output(rows(queries, heads, dim), type);
  p.d_k = c.output(rows(keys, kv_heads, dim), type);
  p.d_v = c.output(rows(keys, kv_heads, value_dim), type);
  if (p.bias) p.d_bias = c.output(bias, type);
  const double scale = c.number();
  if (c.chance(4)) p.scale = &scale;
  if (c.chance(4)) p.softcap = c.number();
  // From -2 on, so that no bound and what is below it come up too.
  const auto bound = [&] { return std::max<std::int64_t>(c.size(), 0) - 2; };
  if (c.chance(2)) p.mask_left = bound();
  if (c.chance(2)) p.mask_right = bound();
  p.mask_corner = c.choice(1);
  if (c.chance(4)) p.dropout = c.number();
  if (c.chance(4)) p.seed = c.tensor({c.chance(9) ? c.size() : 1}, c.index());
  p.flags = c.flags(3);
  Blocks blocks;
  if (c.chance(varlen ? 20 : 4)) {
    p.block = c.block_size();
    p.layout_batches = c.chance(2) ? 1 : batch;
    const auto count = [&](std::int64_t length) {
      const bool sensible = p.block > 0 && p.block < 1000 && length >= 0 && length < 1000;
      return sensible ? (length + p.block - 1) / p.block : c.size() & 7;
    };
    const std::int64_t layouts = (p.layout_batches & 31) * (c.chance(2) ? 1 : heads & 31);
    blocks = layout_of(c, layouts, count(queries), count(keys));
    p.layout = blocks.layout.get();
  }

  const Plan plan = plan_for(pullback_attention_plan, p, c);
  if (!plan) return;
  pullback_attention_tensors t = PULLBACK_ATTENTION_TENSORS_INIT;
  const auto memory = [&](const char* name) { return c.memory(plan.get(), name); };
  t.q = memory("q");
  t.k = memory("k");
  t.v = memory("v");
  t.bias = memory("bias");
  t.cu_seqlens_q = memory("cu_seqlens_q");
  t.cu_seqlens_k = memory("cu_seqlens_k");
  t.out = memory("out");
  t.lse = memory("lse");
  t.d_out = memory("d_out");
  t.d_lse = memory("d_lse");
  t.d_q = memory("d_q");
  t.d_k = memory("d_k");
  t.d_v = memory("d_v");
  t.d_bias = memory("d_bias");
  t.seed = memory("seed");
  c.run(pullback_attention_run, plan.get(), t);
}

void block_softmax(Caller& c) {
  const Blocks blocks = some_layout(c);
  if (!blocks.layout) return;
  const std::int64_t b = c.block_size(), batch = c.size() & 3;
  const std::int64_t height = blocks.rows * (b & 0xff), width = blocks.columns * (b & 0xff);
  const DLDataType type = c.floating();
  const std::vector sparse = {batch, blocks.nnz, b, b};
  const std::vector rpe = {c.chance(2) ? 1 : batch, c.chance(2) ? 1 : blocks.heads, height, width};
  pullback_block_softmax_problem p = PULLBACK_BLOCK_SOFTMAX_PROBLEM_INIT;
  p.layout = blocks.layout.get();
  p.block = b;
  p.x = c.tensor(sparse, type);
  if (c.chance(2)) p.rpe = c.tensor(rpe, type);
  if (c.chance(2)) p.key_padding_mask = c.tensor({batch, width}, type);
  if (c.chance(2)) p.attn_mask = c.tensor({height, width}, type);
  p.y = c.output(sparse, type);
  p.d_y = c.tensor(sparse, type);
  p.d_x = c.output(sparse, type);
  p.key_padding_mode = c.choice(1);
  p.attn_mask_mode = c.choice(1);
  p.scale = c.number();
  const Plan plan = plan_for(pullback_block_softmax_plan, p, c);
  if (!plan) return;
  pullback_block_softmax_tensors t = PULLBACK_BLOCK_SOFTMAX_TENSORS_INIT;
  const auto memory = [&](const char* name) { return c.memory(plan.get(), name); };
  t.x = memory("x");
  t.rpe = memory("rpe");
  t.key_padding_mask = memory("key_padding_mask");
  t.attn_mask = memory("attn_mask");
  t.y = memory("y");
  t.d_y = memory("d_y");
  t.d_x = memory("d_x");
  t.d_rpe = memory("d_rpe");
  t.d_key_padding_mask = memory("d_key_padding_mask");
  t.d_attn_mask = memory("d_attn_mask");
  c.run(pullback_block_softmax_run, plan.get(), t);
}

void block_matmul(Caller& c) {
  const Blocks blocks = some_layout(c);
  if (!blocks.layout) return;
  const std::int64_t b = c.block_size(), batch = c.size() & 3, inner = c.size();
  const std::int64_t height = blocks.rows * (b & 0xff), width = blocks.columns * (b & 0xff);
  const DLDataType type = c.floating();
  pullback_block_matmul_problem p = PULLBACK_BLOCK_MATMUL_PROBLEM_INIT;
  p.layout = blocks.layout.get();
  p.block = b;
  p.mode = c.choice(2);
  p.flags = c.flags(7);
  const bool ta = p.flags & PULLBACK_TRANSPOSE_A, tb = p.flags & PULLBACK_TRANSPOSE_B,
             tc = p.flags & PULLBACK_TRANSPOSE_C;
  const auto dense = [&](std::int64_t rows, std::int64_t columns, bool transposed) {
    return transposed ? std::vector{batch, blocks.heads, columns, rows}
                      : std::vector{batch, blocks.heads, rows, columns};
  };
  std::vector a = {batch, blocks.nnz, b, b};
  std::vector<std::int64_t> other = a, result = a;
  if (p.mode == PULLBACK_SDD) {
    a = dense(height, inner, ta);
    other = dense(inner, width, tb);
  } else if (p.mode == PULLBACK_DSD) {
    other = dense(ta ? height : width, inner, tb);
    result = dense(ta ? width : height, inner, tc);
  } else {
    a = dense(inner, tb ? width : height, ta);
    result = dense(inner, tb ? height : width, tc);
  }
  p.a = c.tensor(a, type);
  p.b = c.tensor(other, type);
  p.c = c.output(result, type);
  p.d_c = c.tensor(result, type);
  p.d_a = c.output(a, type);
  p.d_b = c.output(other, type);
  const Plan plan = plan_for(pullback_block_matmul_plan, p, c);
  if (!plan) return;
  pullback_block_matmul_tensors t = PULLBACK_BLOCK_MATMUL_TENSORS_INIT;
  const auto memory = [&](const char* name) { return c.memory(plan.get(), name); };
  t.a = memory("a");
  t.b = memory("b");
  t.c = memory("c");
  t.d_c = memory("d_c");
  t.d_a = memory("d_a");
  t.d_b = memory("d_b");
  c.run(pullback_block_matmul_run, plan.get(), t);
}

void entmax(Caller& c) {
  std::vector<std::int64_t> shape;
  for (std::size_t rank = 1 + c.pick(3); rank > 0; --rank) shape.push_back(c.size());
  const std::size_t axis = c.pick(shape.size());
  const bool ragged = c.chance(4);
  const std::int64_t groups = c.size() & 15;
  std::vector<std::int64_t> rows = shape;
  if (ragged) {
    rows[axis] = groups;
  } else {
    rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(axis));
  }
  std::vector<std::int64_t> support = rows;
  support.push_back(shape[axis] / 8 + (shape[axis] % 8 != 0));
  const DLDataType type = c.floating(), statistics = Caller::statistics(type);
  constexpr DLDataType u8{kDLUInt, 8, 1}, i32{kDLInt, 32, 1};
  pullback_entmax_problem p = PULLBACK_ENTMAX_PROBLEM_INIT;
  p.x = c.tensor(shape, type);
  if (c.chance(4)) p.alpha_per_row = c.tensor(rows, statistics);
  if (c.chance(4)) p.mask = c.tensor(shape, u8);
  if (ragged) p.offsets = c.tensor({groups + 1}, c.index());
  p.y = c.output(shape, type);
  p.tau = c.output(rows, statistics);
  if (c.chance(3)) p.support = c.tensor(support, u8);
  if (c.chance(3)) p.support_size = c.tensor(rows, i32);
  p.d_y = c.tensor(shape, type);
  p.d_x = c.output(shape, type);
  if (c.chance(3)) p.d_alpha = c.tensor(rows, statistics);
  constexpr double usual[] = {1, 1.5, 2};
  p.alpha = c.chance(3) ? c.number() : usual[c.pick(3)];
  p.axis = c.chance(20) ? c.choice(9) : static_cast<std::int32_t>(axis);
  p.flags = c.flags(PULLBACK_CHECK_INDICES);
  const Plan plan = plan_for(pullback_entmax_plan, p, c);
  if (!plan) return;
  pullback_entmax_tensors t = PULLBACK_ENTMAX_TENSORS_INIT;
  const auto memory = [&](const char* name) { return c.memory(plan.get(), name); };
  t.x = memory("x");
  t.alpha_per_row = memory("alpha_per_row");
  t.mask = memory("mask");
  t.offsets = memory("offsets");
  t.y = memory("y");
  t.tau = memory("tau");
  t.support = memory("support");
  t.support_size = memory("support_size");
  t.d_y = memory("d_y");
  t.d_x = memory("d_x");
  t.d_alpha = memory("d_alpha");
  c.run(pullback_entmax_run, plan.get(), t);
}

void segment(Caller& c) {
  const std::int64_t rows = c.size(), columns = c.size(), segments = c.size();
  const DLDataType type = c.floating();
  pullback_segment_problem p = PULLBACK_SEGMENT_PROBLEM_INIT;
  p.reduce = c.choice(6);
  p.ties = c.choice(2);
  p.empty = c.choice(2);
  p.flags = c.flags(PULLBACK_CHECK_INDICES);
  const std::vector out = {p.reduce == PULLBACK_SEGMENT_SOFTMAX ? rows : segments, columns};
  p.x = c.tensor({rows, columns}, type);
  if (c.chance(2)) {
    p.ids = c.tensor({rows}, c.index());
    p.num_segments = segments;
  } else {
    p.offsets = c.tensor({(segments & 0xffff) + 1}, c.index());
    if (c.chance(2)) p.permutation = c.tensor({rows}, c.index());
  }
  p.out = c.output(out, type);
  if (c.chance(3)) {
    const DLDataType type_of_arg = c.chance(3) ? DLDataType{kDLUInt, 8, 1} : c.index();
    p.arg = c.tensor({segments, columns}, type_of_arg);
  }
  if (c.chance(4)) p.lse = c.tensor({segments, columns}, {kDLFloat, 32, 1});
  if (c.chance(4)) p.arg_mask = c.tensor({rows, (columns & 0xffff) / 8 + 1}, {kDLUInt, 8, 1});
  p.d_out = c.tensor(out, type);
  p.d_x = c.output({rows, columns}, type);
  const Plan plan = plan_for(pullback_segment_plan, p, c);
  if (!plan) return;
  pullback_segment_tensors t = PULLBACK_SEGMENT_TENSORS_INIT;
  const auto memory = [&](const char* name) { return c.memory(plan.get(), name); };
  t.x = memory("x");
  t.offsets = memory("offsets");
  t.ids = memory("ids");
  t.permutation = memory("permutation");
  t.out = memory("out");
  t.arg = memory("arg");
  t.arg_mask = memory("arg_mask");
  t.lse = memory("lse");
  t.d_out = memory("d_out");
  t.d_x = memory("d_x");
  c.run(pullback_segment_run, plan.get(), t);
}

void segment_permutation(Caller& c) {
  const DLDataType type = c.index();
  pullback_segment_permutation_problem p = PULLBACK_SEGMENT_PERMUTATION_PROBLEM_INIT;
  const std::int64_t rows = c.size();
  p.num_segments = c.size();
  p.ids = c.tensor({rows}, c.index());
  p.permutation = c.output({rows}, type);
  p.offsets = c.output({(p.num_segments & 0xffff) + 1}, type);
  const auto make = [](const auto* problem, pullback_pass, const auto* options, auto** plan) {
    return pullback_segment_permutation_plan(problem, options, plan);
  };
  const Plan plan = plan_for(make, p, c);
  if (!plan) return;
  pullback_segment_permutation_tensors t = PULLBACK_SEGMENT_PERMUTATION_TENSORS_INIT;
  t.ids = c.memory(plan.get(), "ids");
  t.permutation = c.memory(plan.get(), "permutation");
  t.offsets = c.memory(plan.get(), "offsets");
  c.run(pullback_segment_permutation_run, plan.get(), t);
}

void sparsity(Caller& c) {
  pullback_variable_sparsity v = PULLBACK_VARIABLE_SPARSITY_INIT;
  const std::int64_t numbers[] = {c.size(), c.size(), c.size(), c.size(), c.size(), c.size()};
  v.num_heads = c.size();
  v.block = c.block_size();
  v.flags = c.flags(15);
  v.num_random_blocks = c.size();
  v.local_window_blocks = numbers;
  v.num_local_window_blocks = c.pick(7);
  v.global_block_indices = numbers;
  v.num_global_block_indices = c.pick(4);
  if (c.chance(2)) v.global_block_end_indices = numbers + 3;
  const std::int64_t blocks = c.size();
  const bool sensible = v.block > 0 && v.block < 1000 && blocks > -1000 && blocks < 1000;
  const std::int64_t seq_len = sensible ? v.block * blocks : blocks;
  pullback_block_layout* made = nullptr;
  // Sizes at which a layout would merely be slow to build are not the point here.
  if (v.num_heads > 100 || seq_len > 100000) return;
  succeeded(pullback_variable_layout(&v, seq_len, &made));
  pullback_block_layout_destroy(made);

  pullback_bigbird_sparsity b = PULLBACK_BIGBIRD_SPARSITY_INIT;
  b.num_heads = v.num_heads;
  b.block = v.block;
  b.flags = c.flags(3);
  b.num_random_blocks = c.size();
  b.num_sliding_window_blocks = c.size();
  b.num_global_blocks = c.size();
  made = nullptr;
  succeeded(pullback_bigbird_layout(&b, seq_len, &made));
  pullback_block_layout_destroy(made);

  pullback_fixed_sparsity f = PULLBACK_FIXED_SPARSITY_INIT;
  f.num_heads = v.num_heads;
  f.block = v.block;
  f.flags = c.flags(15);
  f.num_local_blocks = c.size();
  f.num_global_blocks = c.size();
  f.num_different_global_patterns = c.size();
  made = nullptr;
  succeeded(pullback_fixed_layout(&f, seq_len, &made));
  pullback_block_layout_destroy(made);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider bytes(data, size);
  constexpr void (*ops[])(Caller&) = {attention, block_softmax,       block_matmul, entmax,
                                      segment,   segment_permutation, sparsity};
  const auto op = bytes.ConsumeIntegralInRange<std::size_t>(0, std::size(ops) - 1);
  Caller caller(bytes);
  ops[op](caller);
  return 0;
}
