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

  static Plan<Tensors> plan(const Device& device, const Problem& problem, Pass pass,
                            const PlanOptions& options) {
    return make_plan(device, problem, pass, options);
  }
};

}  // namespace
}  // namespace pullback::capi

using namespace pullback::capi;

pullback_status pullback_block_matmul_plan(const pullback_block_matmul_problem* problem,
                                           pullback_pass pass, const pullback_plan_options* options,
                                           pullback_plan** plan) {
  return guarded([&] { make_plan_of<BlockMatmulOp>(problem, pass, options, plan); });
}

pullback_status pullback_block_matmul_run(const pullback_plan* plan, void* stream,
                                          const pullback_block_matmul_tensors* tensors,
                                          void* workspace, size_t workspace_bytes) {
  return guarded(
      [&] { run_plan_of<BlockMatmulOp>(plan, stream, tensors, workspace, workspace_bytes); });
}
