#include "pullback/entmax.hpp"

#include "capi/common.hpp"

namespace pullback::capi {
namespace {

struct EntmaxOp {
  using CProblem = pullback_entmax_problem;
  using Problem = EntmaxProblem;
  using CTensors = pullback_entmax_tensors;
  using Tensors = EntmaxTensors;
  static constexpr std::string_view name = "entmax";
  static constexpr CProblem problem_defaults = PULLBACK_ENTMAX_PROBLEM_INIT;
  static constexpr CTensors tensors_defaults = PULLBACK_ENTMAX_TENSORS_INIT;

  template <class Visit>
  static void for_each_tensor(Visit visit) {
    PULLBACK_TENSOR(x);
    PULLBACK_TENSOR(alpha_per_row);
    PULLBACK_TENSOR(mask);
    PULLBACK_TENSOR(offsets);
    PULLBACK_TENSOR(y);
    PULLBACK_TENSOR(tau);
    PULLBACK_TENSOR(support);
    PULLBACK_TENSOR(support_size);
    PULLBACK_TENSOR(d_y);
    PULLBACK_TENSOR(d_x);
    PULLBACK_TENSOR(d_alpha);
  }

  static void read_options(const CProblem& given, Problem& problem) {
    check_flags(name, given.flags, PULLBACK_CHECK_INDICES);
    problem.axis = given.axis;
    problem.alpha = given.alpha;
    problem.check_indices = given.flags & PULLBACK_CHECK_INDICES;
  }
};

}  // namespace
}  // namespace pullback::capi

using namespace pullback::capi;

PULLBACK_C_OP(entmax, EntmaxOp)
