// What the tests of single ops through the C ABI share.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <vector>

#include "capi/c_tensors.hpp"
#include "driver/case.hpp"

namespace pullback::testing {

using driver::HostTensor;
using driver::normal_tensor;
using driver::Random;
using driver::same_bits;
using driver::tensor_of;
using driver::TensorMap;

#define ASSERT_OK(call) ASSERT_EQ(call, PULLBACK_OK) << pullback_last_error()

template <class Tensors>
void run(const Plan<Tensors>& plan, const Tensors& tensors) {
  const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
  plan.run({}, tensors, workspace.get());
}

template <class Run, class CTensors>
void run(Run run_op, const CPlan& plan, const CTensors& tensors) {
  const driver::WorkspaceBuffer workspace = workspace_of(plan);
  ASSERT_OK(run_op(plan.get(), nullptr, &tensors, workspace.get().data, workspace.get().bytes));
}

// What fills in the problems of both APIs calls one of these on its tensors.
struct AsSpec {
  TensorSpec operator()(const HostTensor& tensor) const { return tensor.spec(); }
};
class AsDLTensor {
 public:
  const DLTensor* operator()(const HostTensor& tensor) {
    return &kept_.emplace_back(describe(tensor));
  }

 private:
  std::deque<DLTensor> kept_;  // addresses stay valid
};

template <class CProblem>
using PlanFunction = pullback_status (*)(const CProblem*, pullback_pass,
                                         const pullback_plan_options*, pullback_plan**);
template <class CTensors>
using RunFunction = pullback_status (*)(const pullback_plan*, void*, const CTensors*, void*,
                                        std::size_t);

// One plan a pass. On failure, which is reported, an empty one.
template <class CProblem>
std::vector<CPlan> plan_passes(PlanFunction<CProblem> plan_op, const CProblem& problem,
                               std::initializer_list<pullback_pass> passes) {
  std::vector<CPlan> plans;
  for (const pullback_pass pass : passes) {
    pullback_plan* made = nullptr;
    EXPECT_EQ(plan_op(&problem, pass, nullptr, &made), PULLBACK_OK) << pullback_last_error();
    plans.emplace_back(made);
  }
  return plans;
}

// Runs the plans, forward or forward and backward, and the same problem by the C++ API, into
// outputs of their own, and compares the bits. `point(tensors, pass, outputs)` fills in the
// pointers of either API, whose tensors have the same names. Returns what C wrote.
template <class Problem, class CTensors, class Point>
TensorMap expect_bits_of_cpp(const Problem& problem, const std::vector<CPlan>& plans,
                             RunFunction<CTensors> run_op,
                             std::initializer_list<const char*> outputs, const Point& point) {
  TensorMap from_cpp, from_c;
  for (const char* name : outputs) {
    from_cpp.emplace(name, allocate(plans.front(), name));
    from_c.emplace(name, allocate(plans.front(), name));
  }
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const Pass pass = i == 0 ? Pass::forward : Pass::backward;
    const auto plan = make_plan(Device::cpu(2), problem, pass);
    const auto run_cpp = [&]<class Tensors>(const Plan<Tensors>& made) {
      Tensors tensors;
      point(tensors, pass, from_cpp);
      run(made, tensors);
    };
    run_cpp(plan);
    CTensors tensors{};
    tensors.struct_size = sizeof(tensors);
    point(tensors, pass, from_c);
    run(run_op, plans[i], tensors);
  }
  for (const char* name : outputs) {
    EXPECT_TRUE(same_bits(from_c.at(name), from_cpp.at(name))) << name;
  }
  return from_c;
}

inline bool differs(const HostTensor& a, const HostTensor& b) { return !same_bits(a, b); }

}  // namespace pullback::testing
