// What the sessions of all ops share: tensors where the device of the request can reach them, the
// plans of both passes, and their workspace.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <string_view>

#include "driver/driver.hpp"
#include "driver/tensor_memory.hpp"

namespace pullback::driver {

// A derived class fills in tensors_ with input() and output() and calls make_plans().
template <class Problem, class Tensors>
class OpSession : public Session {
 public:
  void forward() final { forward_->run(stream(), tensors_, memory_.workspace()); }
  void backward() final {
    if (backward_) backward_->run(stream(), backward_tensors_, memory_.workspace());
  }
  void fetch(Fetch what) final { memory_.fetch(what); }
  Stream stream() const final { return memory_.stream(); }

 protected:
  explicit OpSession(const Request& request)
      : request_(request), memory_(request.device, request.placement) {}

  // Null when the request has no such input.
  const void* input(std::string_view name) {
    const auto it = request_.inputs.find(name);
    return it == request_.inputs.end() ? nullptr : memory_.input(it->second);
  }
  // Lays the tensor out as the request asks (in `spec` too), and puts it among the outputs.
  void* output(std::string_view name, TensorSpec& spec) {
    const HostTensor tensor = make_output(spec, request_, name);
    outputs.emplace(name, tensor);
    return memory_.output(tensor);
  }

  void make_plans(const Problem& problem) {
    const PlanOptions options{.variant = request_.variant};
    const auto begin = std::chrono::steady_clock::now();
    forward_ = make_plan(request_.device, problem, Pass::forward, options);
    const auto middle = std::chrono::steady_clock::now();
    forward_plan_seconds = std::chrono::duration<double>(middle - begin).count();
    forward_description = forward_->describe();
    forward_workspace_bytes = forward_->workspace_bytes();
    if (request_.backward) {
      backward_ = make_plan(request_.device, problem, Pass::backward, options);
      backward_plan_seconds =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - middle).count();
      backward_description = backward_->describe();
      backward_workspace_bytes = backward_->workspace_bytes();
    }
    memory_.reserve_workspace(std::max(forward_workspace_bytes, backward_workspace_bytes));
    backward_tensors_ = tensors_;
  }

  Request request_;  // keeps the inputs alive
  TensorMemory memory_;
  Tensors tensors_, backward_tensors_;  // the latter set by make_plans()

 private:
  std::optional<Plan<Tensors>> forward_, backward_;
};

}  // namespace pullback::driver
