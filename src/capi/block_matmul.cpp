#include "capi/common.hpp"
#include "pullback/block_sparse.hpp"

namespace pullback::capi {
namespace {

struct BlockMatmulOp {
  using CProblem = pullback_block_matmul_problem;
  using Problem = BlockMatmulProblem;
  using CTensors = pullback_block_matmul_tensors;
  using Tensors = BlockMatmulTensors;
  static constexpr std::string_view name = "block_matmul";
  static constexpr CProblem problem_defaults = PULLBACK_BLOCK_MATMUL_PROBLEM_INIT;
  static constexpr CTensors tensors_defaults = PULLBACK_BLOCK_MATMUL_TENSORS_INIT;

  template <class Visit>
  static void for_each_tensor(Visit visit) {
    PULLBACK_TENSOR(a);
    PULLBACK_TENSOR(b);
    PULLBACK_TENSOR(c);
    PULLBACK_TENSOR(d_c);
    PULLBACK_TENSOR(d_a);
    PULLBACK_TENSOR(d_b);
  }

  static void read_options(const CProblem& given, Problem& problem) {
    check_not_null(name, "layout", given.layout);
    check_flags(name, given.flags,
                PULLBACK_TRANSPOSE_A | PULLBACK_TRANSPOSE_B | PULLBACK_TRANSPOSE_C);
    problem.mode = choice(name, "mode", given.mode, BlockMatmulMode::dds);
    problem.transpose_a = given.flags & PULLBACK_TRANSPOSE_A;
    problem.transpose_b = given.flags & PULLBACK_TRANSPOSE_B;
    problem.transpose_c = given.flags & PULLBACK_TRANSPOSE_C;
    problem.layout = given.layout->layout;
    problem.block = given.block;
  }
};

}  // namespace
}  // namespace pullback::capi

using namespace pullback::capi;

PULLBACK_C_OP(block_matmul, BlockMatmulOp)
