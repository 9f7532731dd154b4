// What the tests of single ops through the C ABI share.
#pragma once

#include <gtest/gtest.h>

#include "capi/c_tensors.hpp"
#include "driver/case.hpp"

namespace pullback::testing {

using driver::HostTensor;
using driver::normal_tensor;
using driver::Random;
using driver::same_bits;
using driver::tensor_of;

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

inline bool differs(const HostTensor& a, const HostTensor& b) { return !same_bits(a, b); }

}  // namespace pullback::testing
