// What the C functions of every op share: failures as status codes, size-versioned structs,
// DLTensor, and plans whose type C does not see.
//
// An op's file defines a struct Op with the four struct types CProblem, Problem, CTensors, Tensors,
// their defaults, `for_each_tensor` and `read_options`, and ends in PULLBACK_C_OP; the templates
// here do the rest.
//
// Growing a struct of pullback.h: append fields (never into padding) whose default is all zero
// bytes, so that an older library can tell that a newer caller did not use them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "pullback/block_sparse.hpp"
#include "pullback/plan.hpp"
#include "pullback/pullback.h"
#include "pullback/tensor.hpp"

// The opaque types of pullback.h.
struct pullback_plan {
  struct Named {
    std::string_view name;
    pullback::TensorSpec spec;
  };

  virtual ~pullback_plan() = default;
  virtual std::size_t workspace_bytes() const = 0;
  virtual const std::string& describe() const = 0;

  std::string_view op;
  DLDevice device{};
  std::vector<Named> tensors;  // of the completed problem
};

struct pullback_block_layout {
  std::shared_ptr<const pullback::BlockLayout> layout;
};

namespace pullback::capi {

// To be called in a catch block: the exception's status, its message kept for the thread.
pullback_status current_failure() noexcept;

template <class F>
pullback_status guarded(F&& body) noexcept {
  try {
    body();
    return PULLBACK_OK;
  } catch (...) {
    return current_failure();
  }
}

void check_not_null(std::string_view op, std::string_view argument, const void* pointer);

// The caller's struct of `size` bytes over one of ours, `known` bytes of defaults.
void overlay_struct(std::string_view op, std::string_view argument, const void* given,
                    std::size_t size, void* ours, std::size_t known);

template <class T>
T read_struct(std::string_view op, std::string_view argument, const T* given, const T& defaults) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(std::size_t) == 0);
  check_not_null(op, argument, given);
  T ours = defaults;
  std::size_t size = 0;
  std::memcpy(&size, given, sizeof(size));
  overlay_struct(op, argument, given, size, &ours, sizeof(T));
  ours.struct_size = sizeof(T);
  return ours;
}

// Not given when null.
TensorSpec spec_of(std::string_view op, std::string_view name, const DLTensor* tensor,
                   const DLDevice& device);

struct PlanArguments {
  DLDevice dl_device;
  Device device;
  PlanOptions options;
};
PlanArguments read_plan_options(std::string_view op, const pullback_plan_options* options);

// The enumerator with this value, of `count` that start at 0.
int choice(std::string_view op, std::string_view option, std::int32_t value, int count);
template <class Enum>
Enum choice(std::string_view op, std::string_view option, std::int32_t value, Enum last) {
  return static_cast<Enum>(choice(op, option, value, static_cast<int>(last) + 1));
}

// Refuses bits that are not in `known`.
void check_flags(std::string_view op, std::uint64_t flags, std::uint64_t known);

void check_plan_of(std::string_view op, const pullback_plan* plan);

template <class Op>
struct OpPlan final : pullback_plan {
  explicit OpPlan(Plan<typename Op::Tensors> made) : plan(std::move(made)) {}
  std::size_t workspace_bytes() const override { return plan.workspace_bytes(); }
  const std::string& describe() const override { return plan.describe(); }

  Plan<typename Op::Tensors> plan;
};

// By the op's make_plan(), unless it has a `plan` of its own.
template <class Op>
Plan<typename Op::Tensors> plan_of(const Device& device, const typename Op::Problem& problem,
                                   Pass pass, const PlanOptions& options) {
  if constexpr (requires { Op::plan(device, problem, options); }) {
    return Op::plan(device, problem, options);
  } else {
    return make_plan(device, problem, pass, options);
  }
}

template <class Op>
void make_plan_of(const typename Op::CProblem* problem, pullback_pass pass,
                  const pullback_plan_options* options, pullback_plan** plan) {
  check_not_null(Op::name, "plan", plan);
  const auto given = read_struct(Op::name, "problem", problem, Op::problem_defaults);
  const PlanArguments arguments = read_plan_options(Op::name, options);
  const Pass direction = choice(Op::name, "pass", pass, Pass::backward);

  typename Op::Problem ours;
  Op::for_each_tensor([&](const char* name, auto described, auto spec, auto, auto) {
    ours.*spec = spec_of(Op::name, name, given.*described, arguments.dl_device);
  });
  Op::read_options(given, ours);

  auto made = std::make_unique<OpPlan<Op>>(
      plan_of<Op>(arguments.device, ours, direction, arguments.options));
  made->op = Op::name;
  made->device = arguments.dl_device;
  const typename Op::Problem completed = complete(ours);
  Op::for_each_tensor([&](const char* name, auto, auto spec, auto, auto) {
    made->tensors.push_back({name, completed.*spec});
  });
  *plan = made.release();
}

template <class Op>
void run_plan_of(const pullback_plan* plan, void* stream, const typename Op::CTensors* tensors,
                 void* workspace, std::size_t workspace_bytes) {
  check_plan_of(Op::name, plan);
  const auto given = read_struct(Op::name, "tensors", tensors, Op::tensors_defaults);
  typename Op::Tensors ours;
  Op::for_each_tensor([&](const char*, auto, auto, auto c_pointer, auto pointer) {
    ours.*pointer = given.*c_pointer;
  });
  static_cast<const OpPlan<Op>*>(plan)->plan.run(Stream{stream}, ours,
                                                 Workspace{workspace, workspace_bytes});
}

// In for_each_tensor(visit): a tensor, which has one name in all four structs.
#define PULLBACK_TENSOR(field) \
  visit(#field, &CProblem::field, &Problem::field, &CTensors::field, &Tensors::field)

}  // namespace pullback::capi

// The functions of an op of two passes: pullback_<op>_plan and pullback_<op>_run.
#define PULLBACK_C_OP(op, Op)                                                             \
  pullback_status pullback_##op##_plan(const Op::CProblem* problem, pullback_pass pass,   \
                                       const pullback_plan_options* options,              \
                                       pullback_plan** plan) {                            \
    return pullback::capi::guarded(                                                       \
        [&] { pullback::capi::make_plan_of<Op>(problem, pass, options, plan); });         \
  }                                                                                       \
  pullback_status pullback_##op##_run(const pullback_plan* plan, void* stream,            \
                                      const Op::CTensors* tensors, void* workspace,       \
                                      size_t workspace_bytes) {                           \
    return pullback::capi::guarded([&] {                                                  \
      pullback::capi::run_plan_of<Op>(plan, stream, tensors, workspace, workspace_bytes); \
    });                                                                                   \
  }
