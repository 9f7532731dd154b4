#include "driver/check.hpp"

#include <fmt/format.h>

#include <cmath>

#include "driver/judge.hpp"

namespace pullback::driver {
namespace {

// The output of that name, or null and a failure when it is missing or has another shape.
const HostTensor* comparable(const TensorMap& got, const std::string& name,
                             const HostTensor& expected, CheckReport& report) {
  const auto it = got.find(name);
  if (it == got.end()) {
    report.failures.push_back(fmt::format("{}: missing output", name));
    return nullptr;
  }
  if (it->second.spec().rank != expected.spec().rank ||
      it->second.spec().shape != expected.spec().shape) {
    report.failures.push_back(fmt::format("{}: expected {}, got {}", name,
                                          expected.spec().to_string(),
                                          it->second.spec().to_string()));
    return nullptr;
  }
  return &it->second;
}

CheckReport compare(const Request& request, const TensorMap& got, const Expected& all) {
  Judge judge(request, all);
  CheckReport report;
  for (const auto& [name, expected] : all.reference) {
    const HostTensor* value = comparable(got, name, expected, report);
    if (value == nullptr) continue;
    if (is_floating(expected.spec().dtype)) {
      judge.judge(name, *value, report);
    } else if (const std::string mismatch = value_mismatch(*value, expected); !mismatch.empty()) {
      report.failures.push_back(name + ": " + mismatch);
    }
  }
  return report;
}

std::vector<double> values_of(const HostTensor& tensor) {
  std::vector<double> values(static_cast<std::size_t>(tensor.numel()));
  tensor.load(0, values);
  return values;
}

// sum over outputs of <output, its incoming gradient>, skipping elements not finite at the inputs.
double objective(const OpDriver& driver, const Request& request, const TensorMap& at_inputs) {
  const TensorMap outputs = evaluate(request);
  double sum = 0;
  for (const NamePair& pair : driver.cotangents) {
    const auto cotangent = request.inputs.find(pair.second);
    const auto output = outputs.find(pair.first);
    if (cotangent == request.inputs.end() || output == outputs.end()) continue;
    const std::vector<double> base = values_of(at_inputs.find(pair.first)->second);
    const std::vector<double> values = values_of(output->second);
    const std::vector<double> weights = values_of(cotangent->second);
    for (std::size_t i = 0; i < base.size(); ++i) {
      if (std::isfinite(base[i])) sum += values[i] * weights[i];
    }
  }
  return sum;
}

void check_finite_differences(const OpDriver& driver, const Request& request,
                              const TensorMap& outputs, Random& random, CheckReport& report) {
  // Where the function has a kink within the step, a maximum that changes hands for example, the
  // difference says nothing: then a step that is as small as rounding allows decides.
  constexpr double kStep = 1e-5;
  constexpr double kStepPastKinks = 1e-7;
  constexpr double kTolerance = 2e-6;
  Request forward = request;
  forward.backward = false;
  for (const NamePair& pair : driver.gradients) {
    const auto input = request.inputs.find(pair.first);
    const auto gradient = outputs.find(pair.second);
    if (input == request.inputs.end() || gradient == outputs.end()) continue;
    const HostTensor moved = contiguous_copy(input->second);
    const std::vector<double> x = values_of(moved), gradients = values_of(gradient->second);
    std::vector<double> direction(x.size()), moved_values(x.size());
    double expected = 0, scale = 1e-3;
    for (std::size_t i = 0; i < x.size(); ++i) {
      direction[i] = random.uniform() * 2 - 1;
      expected += gradients[i] * direction[i];
      scale += std::abs(gradients[i] * direction[i]);
    }
    const auto value_at = [&](double h) {
      for (std::size_t i = 0; i < x.size(); ++i) moved_values[i] = x[i] + h * direction[i];
      moved.store(0, moved_values);
      forward.inputs[std::string(pair.first)] = moved;
      return objective(driver, forward, outputs);
    };
    double difference = 0;
    bool agrees = false;
    for (double step : {kStep, kStepPastKinks}) {
      difference = (value_at(step) - value_at(-step)) / (2 * step);
      agrees = std::abs(difference - expected) <= kTolerance * scale;
      if (agrees) break;
    }
    forward.inputs[std::string(pair.first)] = input->second;
    if (!agrees) {
      report.failures.push_back(fmt::format("{}: finite difference {:.10g}, gradient {:.10g}",
                                            pair.second, difference, expected));
    }
  }
}

void check_guards(const TensorMap& tensors, std::string_view kind, CheckReport& report) {
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.guards_intact()) {
      report.failures.push_back(fmt::format("{} {}: bytes outside the tensor changed", kind, name));
    }
  }
}

void check_same_bits(const TensorMap& a, const TensorMap& b, std::string_view what,
                     CheckReport& report) {
  for (const auto& [name, tensor] : a) {
    if (!same_bits(tensor, b.find(name)->second)) {
      report.failures.push_back(fmt::format("{}: other bits {}", name, what));
    }
  }
}

}  // namespace

Request reference_request(const Request& request) {
  Request reference = request;
  reference.inputs = in_double(request.inputs);
  reference.device = Device::cpu(1);
  reference.variant = "reference";
  reference.layout_seed = 0;
  return reference;
}

Expected expected_outputs(const Request& request) {
  Request textbook = request;
  textbook.device = Device::cpu(1);
  textbook.variant = "textbook";
  textbook.layout_seed = 0;
  return {evaluate(textbook), evaluate(reference_request(request))};
}

CheckReport verify_outputs(const Request& request, const TensorMap& outputs) {
  return compare(request, outputs, expected_outputs(request));
}

CheckReport verify(const Request& request) { return verify_outputs(request, evaluate(request)); }

CaseCheck::CaseCheck(const Case& test, DType dtype, std::uint64_t seed)
    : test_(test), dtype_(dtype), seed_(seed), random_(seed) {
  request_.op = test.op;
  request_.inputs = test.inputs(dtype, random_);
  request_.options = test.options;
  for (const auto& [name, tensor] : request_.inputs) inputs_before_[name] = contiguous_copy(tensor);
  expected_ = expected_outputs(request_);
}

CheckReport CaseCheck::compared(const Request& request, const TensorMap& outputs) const {
  if (!test_.exact) return compare(request, outputs, expected_);
  CheckReport report;
  for (const auto& [name, expected] : expected_.reference) {
    const HostTensor* value = comparable(outputs, name, expected, report);
    if (value == nullptr) continue;
    const std::string mismatch = value_mismatch(*value, expected);
    if (!mismatch.empty()) report.failures.push_back(name + ": not exact: " + mismatch);
  }
  return report;
}

CheckReport CaseCheck::run(const Device& device, const std::string& variant) const {
  Random random = random_;
  Request request = request_;
  request.device = device;
  request.variant = variant;

  const TensorMap outputs = evaluate(request);
  CheckReport report = compared(request, outputs);

  // The same bits again, on the CPU with other thread counts.
  const bool cpu = device.kind == DeviceKind::cpu;
  Request again = request;
  if (cpu) again.device.threads = device.threads == 1 ? 2 : 1;
  check_same_bits(outputs, evaluate(again),
                  cpu ? "with another number of threads" : "in another run", report);
  if (cpu) again.device.threads = 3;
  check_same_bits(outputs, evaluate(again), "in another run", report);

  // Other layouts of inputs and outputs, with guard bytes in every gap.
  Request strided = request;
  strided.layout_seed = seed_ | 1;
  for (auto& [name, tensor] : strided.inputs) {
    tensor = relaid(tensor, random_layout(tensor.spec(), random));
  }
  const TensorMap strided_outputs = evaluate(strided);
  const CheckReport strided_report = compared(strided, strided_outputs);
  for (const auto& failure : strided_report.failures) {
    report.failures.push_back("with other strides: " + failure);
  }
  check_guards(strided.inputs, "input", report);
  check_guards(strided_outputs, "output", report);

  check_guards(request.inputs, "input", report);
  check_guards(outputs, "output", report);
  for (const auto& [name, before] : inputs_before_) {
    if (!same_bits(before, request.inputs.find(name)->second)) {
      report.failures.push_back(fmt::format("input {}: changed", name));
    }
  }
  // The reference knows what it is the gradient of from the runs on the CPU.
  if (cpu && dtype_ == DType::f64 && test_.finite_differences) {
    check_finite_differences(find_driver(test_.op), request, outputs, random, report);
  }
  for (auto& failure : report.failures) {
    failure = fmt::format("{} '{}' {} seed {}: {}", test_.op, test_.name, pullback::name_of(dtype_),
                          seed_, failure);
  }
  return report;
}

CheckReport check_case(const Case& test, DType dtype, const Device& device, std::uint64_t seed,
                       const std::string& variant) {
  return CaseCheck(test, dtype, seed).run(device, variant);
}

}  // namespace pullback::driver
