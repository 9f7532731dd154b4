// Contiguous rows of entmax on the CPU, for tests.
#pragma once

#include <type_traits>
#include <vector>

#include "core/element.hpp"
#include "driver/host_tensor.hpp"
#include "driver/random.hpp"
#include "pullback/entmax.hpp"

namespace pullback::testing {

// Contiguous rows of one length with all that can be computed of them.
template <class T>
struct Rows {
  using Statistic = std::conditional_t<std::is_same_v<T, double>, double, float>;

  Rows(std::vector<double> logits, std::int64_t length, double alpha) {
    const auto numel = static_cast<std::int64_t>(logits.size());
    const std::int64_t rows = numel / length;
    for (double logit : logits) x.push_back(from_double<T>(logit));
    problem.x = TensorSpec::contiguous(kDTypeOf<T>, {rows, length});
    problem.alpha = alpha;
    const auto count = static_cast<std::size_t>(numel), row_count = static_cast<std::size_t>(rows);
    y = d_y = d_x = std::vector<T>(count);
    tau = d_alpha = std::vector<Statistic>(row_count);
    size.resize(row_count);
    support.resize(row_count * static_cast<std::size_t>((length + 7) / 8));
    driver::Random random(3);
    for (T& g : d_y) g = from_double<T>(random.normal());
  }

  void forward() {
    run(Pass::forward, {.x = x.data(),
                        .mask = mask.empty() ? nullptr : mask.data(),
                        .y = y.data(),
                        .tau = tau.data(),
                        .support = problem.alpha == 2 ? support.data() : nullptr,
                        .support_size = size.data()});
  }
  void backward() {
    run(Pass::backward, {.y = const_cast<T*>(y.data()),
                         .d_y = d_y.data(),
                         .d_x = d_x.data(),
                         .d_alpha = d_alpha.data()});
  }
  void backward_from_support() {
    run(Pass::backward, {.support = support.data(),
                         .support_size = size.data(),
                         .d_y = d_y.data(),
                         .d_x = d_x.data()});
  }
  void run(Pass pass, const EntmaxTensors& tensors) {
    if (!mask.empty()) {
      problem.mask = TensorSpec::contiguous(DType::u8, {problem.x.shape[0], problem.x.shape[1]});
    }
    const auto plan = make_plan(Device::cpu(2), problem, pass);
    const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
    plan.run({}, tensors, workspace.get());
  }
  double sum(const std::vector<T>& values) const {
    double total = 0;
    for (T value : values) total += to_double(value);
    return total;
  }

  EntmaxProblem problem;
  std::vector<T> x, y, d_y, d_x;
  std::vector<Statistic> tau, d_alpha;
  std::vector<std::int32_t> size;
  std::vector<std::uint8_t> mask, support;
};

inline std::vector<double> normal_logits(std::size_t count, double sigma = 1, double offset = 0) {
  driver::Random random(11);
  std::vector<double> logits(count);
  for (double& logit : logits) logit = offset + sigma * random.normal();
  return logits;
}

}  // namespace pullback::testing
