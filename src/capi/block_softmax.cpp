#include "capi/common.hpp"
#include "pullback/block_sparse.hpp"

namespace pullback::capi {
namespace {

struct BlockSoftmaxOp {
  using CProblem = pullback_block_softmax_problem;
  using Problem = BlockSoftmaxProblem;
  using CTensors = pullback_block_softmax_tensors;
  using Tensors = BlockSoftmaxTensors;
  static constexpr std::string_view name = "block_softmax";
  static constexpr CProblem problem_defaults = PULLBACK_BLOCK_SOFTMAX_PROBLEM_INIT;
  static constexpr CTensors tensors_defaults = PULLBACK_BLOCK_SOFTMAX_TENSORS_INIT;

  template <class Visit>
  static void for_each_tensor(Visit visit) {
    PULLBACK_TENSOR(x);
    PULLBACK_TENSOR(rpe);
    PULLBACK_TENSOR(key_padding_mask);
    PULLBACK_TENSOR(attn_mask);
    PULLBACK_TENSOR(y);
    PULLBACK_TENSOR(d_y);
    PULLBACK_TENSOR(d_x);
    PULLBACK_TENSOR(d_rpe);
    PULLBACK_TENSOR(d_key_padding_mask);
    PULLBACK_TENSOR(d_attn_mask);
  }

  static void read_options(const CProblem& given, Problem& problem) {
    check_not_null(name, "layout", given.layout);
    problem.layout = given.layout->layout;
    problem.block = given.block;
    problem.key_padding_mode =
        choice(name, "key_padding_mode", given.key_padding_mode, MaskMode::keep);
    problem.attn_mask_mode = choice(name, "attn_mask_mode", given.attn_mask_mode, MaskMode::keep);
    problem.scale = given.scale;
  }
};

}  // namespace
}  // namespace pullback::capi

using namespace pullback::capi;

PULLBACK_C_OP(block_softmax, BlockSoftmaxOp)
