#include "pullback/attention.hpp"

#include "capi/common.hpp"
#include "core/check.hpp"

namespace pullback::capi {
namespace {

struct AttentionOp {
  using CProblem = pullback_attention_problem;
  using Problem = AttentionProblem;
  using CTensors = pullback_attention_tensors;
  using Tensors = AttentionTensors;
  static constexpr std::string_view name = "attention";
  static constexpr CProblem problem_defaults = PULLBACK_ATTENTION_PROBLEM_INIT;
  static constexpr CTensors tensors_defaults = PULLBACK_ATTENTION_TENSORS_INIT;

  template <class Visit>
  static void for_each_tensor(Visit visit) {
    PULLBACK_TENSOR(q);
    PULLBACK_TENSOR(k);
    PULLBACK_TENSOR(v);
    PULLBACK_TENSOR(bias);
    PULLBACK_TENSOR(cu_seqlens_q);
    PULLBACK_TENSOR(cu_seqlens_k);
    PULLBACK_TENSOR(out);
    PULLBACK_TENSOR(lse);
    PULLBACK_TENSOR(d_out);
    PULLBACK_TENSOR(d_lse);
    PULLBACK_TENSOR(d_q);
    PULLBACK_TENSOR(d_k);
    PULLBACK_TENSOR(d_v);
    PULLBACK_TENSOR(d_bias);
    PULLBACK_TENSOR(seed);
  }

  static void read_options(const CProblem& given, Problem& problem) {
    check_flags(name, given.flags, PULLBACK_NONDETERMINISTIC | PULLBACK_CHECK_INDICES);
    problem.max_seqlen_q = given.max_seqlen_q;
    problem.max_seqlen_k = given.max_seqlen_k;
    if (given.scale) problem.scale = *given.scale;
    problem.softcap = given.softcap;
    problem.mask.left = given.mask_left;
    problem.mask.right = given.mask_right;
    problem.mask.corner = choice(name, "mask_corner", given.mask_corner, Corner::bottom_right);
    if (given.layout) problem.blocks.layout = given.layout->layout;
    problem.blocks.batches = given.layout_batches == 0 ? 1 : given.layout_batches;
    problem.blocks.block = given.block;
    problem.dropout = given.dropout;
    problem.dropout_seed = given.dropout_seed;
    problem.deterministic = !(given.flags & PULLBACK_NONDETERMINISTIC);
    problem.check_indices = given.flags & PULLBACK_CHECK_INDICES;
  }
};

}  // namespace
}  // namespace pullback::capi

using namespace pullback::capi;

PULLBACK_C_OP(attention, AttentionOp)

pullback_status pullback_write_dropout_mask(const DLTensor* mask, double dropout,
                                            uint64_t dropout_seed) {
  return guarded([&] {
    constexpr std::string_view op = "write_dropout_mask";
    check_not_null(op, "mask", mask);
    const pullback::TensorSpec spec = spec_of(op, "mask", mask, DLDevice{kDLCPU, 0});
    pullback::Checker(op).sane("mask", spec);
    if (spec.numel() > 0) check_not_null(op, "mask data", mask->data);
    pullback::write_dropout_mask(spec, pullback_tensor_data(mask), dropout, dropout_seed);
  });
}
