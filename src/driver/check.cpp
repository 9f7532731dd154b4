#include "driver/check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>

#include "core/element.hpp"

namespace pullback::driver {
namespace {

Request reference_request(const Request& request) {
  Request reference = request;
  reference.inputs = in_double(request.inputs);
  reference.device = Device::cpu(1);
  reference.variant = "reference";
  reference.layout_seed = 0;
  return reference;
}

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

// Gradients are differences of products with the incoming gradients: where those cancel, what is
// left carries the rounding of sums over values as large as they were, which grows as a random
// walk.
double cancellation_error(const OpDriver& driver, const Request& request, std::string_view gradient,
                          DType dtype) {
  double largest = 0;
  for (const NamePair& pair : driver.cotangents) {
    const auto cotangent = request.inputs.find(pair.second);
    if (cotangent == request.inputs.end()) continue;
    largest = std::max(largest, largest_finite(cotangent->second));
  }
  const double summands = driver.summands ? driver.summands(request, gradient) : 1;
  return 2 * epsilon_of(accumulation_dtype(dtype)) * largest * std::sqrt(summands);
}

// Of a floating output: its largest errors by the sizes of what is expected, and its mean error.
struct Errors {
  std::array<double, std::size(kJudgedSizes)> largest{};
  double mean = 0;

  void add(const HostTensor& got, const HostTensor& exact, const HostTensor* finite) {
    for (std::size_t i = 0; i < largest.size(); ++i) {
      const LargestErrors errors = largest_errors(got, exact, finite, kJudgedSizes[i]);
      largest[i] = std::max(largest[i], errors.difference);
    }
    mean = std::max(mean, mean_errors(got, exact, finite).difference);
  }
};
using AllErrors = std::map<std::string, Errors>;

constexpr std::uint64_t kDraws = 8;  // of the directions: the worst element meets both

// value moved(value, random) for all that are finite and stay so.
template <class Moved>
void move_values(const HostTensor& tensor, Random& random, const Moved& moved) {
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    const double value = tensor.get(i);
    if (!std::isfinite(value)) continue;
    tensor.set(i, moved(value, random.chance(0.5) ? 1 : -1));
    if (!std::isfinite(tensor.get(i))) tensor.set(i, value);
  }
}

// What a textbook computation gets wrong when the inputs differ in their last digits: that of the
// inputs themselves may be right by luck.
AllErrors textbook_errors(const Request& request) {
  AllErrors all;
  for (std::uint64_t draw = 1; draw <= kDraws; ++draw) {
    Random random(draw);
    Request moved = request;
    for (auto& [name, tensor] : moved.inputs) {
      if (!is_floating(tensor.spec().dtype)) continue;
      tensor = contiguous_copy(tensor);
      const double by = epsilon_of(tensor.spec().dtype);
      move_values(tensor, random, [&](double x, double sign) { return x + sign * by * x; });
    }
    const Expected expected = expected_outputs(moved);
    for (const auto& [name, exact] : expected.reference) {
      if (!is_floating(exact.spec().dtype)) continue;
      const HostTensor& textbook = expected.textbook.find(name)->second;
      all[name].add(textbook, exact, &textbook);
    }
  }
  return all;
}

// How far each exact output moves when the inputs move by what the op rounds off.
AllErrors movements(const OpDriver& driver, const Request& request, const TensorMap& reference) {
  AllErrors all;
  for (std::uint64_t draw = 1; draw <= kDraws && !driver.rounded.empty(); ++draw) {
    Random random(draw);
    Request moved = reference_request(request);
    for (const auto& [input, epsilons, relative] : driver.rounded) {
      const auto found = moved.inputs.find(input);
      if (found == moved.inputs.end()) continue;
      const DType dtype = request.inputs.find(input)->second.spec().dtype;
      const double by = epsilons * epsilon_of(accumulation_dtype(dtype));
      move_values(found->second, random, [&, relative = relative](double x, double sign) {
        return x + sign * by * (relative ? std::abs(x) : 1);
      });
    }
    for (const auto& [name, value] : evaluate(moved)) {
      const HostTensor& exact = reference.find(name)->second;
      if (is_floating(exact.spec().dtype)) all[name].add(value, exact, nullptr);
    }
  }
  return all;
}

CheckReport compare(const Request& request, const TensorMap& got, const Expected& all) {
  const OpDriver& driver = find_driver(request.op);
  CheckReport report;
  const DType input = request.inputs.find(driver.inputs.front().name)->second.spec().dtype;
  const bool split =
      driver.splits_f32_on_cuda && input == DType::f32 && request.device.kind == DeviceKind::cuda;
  // Computed where they matter: they take long.
  std::optional<AllErrors> moves, textbooks;
  const auto moved_by = [&](const std::string& name) -> const Errors& {
    if (!moves) moves = movements(driver, request, all.reference);
    return (*moves)[name];
  };
  const auto worst_textbook = [&](const std::string& name) -> const Errors& {
    if (!textbooks) textbooks = textbook_errors(request);
    return (*textbooks)[name];
  };
  for (const auto& [name, expected] : all.reference) {
    const HostTensor* found = comparable(got, name, expected, report);
    if (found == nullptr) continue;
    const HostTensor& value = *found;
    if (!is_floating(expected.spec().dtype)) {
      const std::string mismatch = value_mismatch(value, expected);
      if (!mismatch.empty()) report.failures.push_back(name + ": " + mismatch);
      continue;
    }
    const HostTensor& textbook = all.textbook.find(name)->second;
    const bool gradient = is_gradient(driver, name);
    const double ratio = gradient || split ? kGradientErrorRatio : kOutputErrorRatio;
    const DType dtype = value.spec().dtype;
    // The floor: a textbook result that is right by luck must not demand the impossible of us. And
    // the definition, computed in f64, is no more exact than f64 is.
    const double floor = dtype == DType::f64 ? 64 : 2;
    const bool unit_term = std::ranges::count(driver.with_unit_term, name) > 0;
    // What elements of that size may be off beside what the textbook is.
    const auto slack_of = [&, &name = name](double size) {
      double slack = floor * epsilon_of(dtype) * (unit_term ? size + 1 : size) + 1e-300;
      if (dtype == DType::f16) slack += 0x1p-24;    // its smallest step
      if (dtype == DType::bf16) slack += 0x1p-126;  // AMX takes smaller numbers for 0
      if (gradient) slack += cancellation_error(driver, request, name, dtype);
      return slack;
    };
    TensorError worst{.tensor = name};
    double most_allowed = 0;
    for (std::size_t i = 0; i < std::size(kJudgedSizes); ++i) {
      const LargestErrors errors = largest_errors(value, expected, &textbook, kJudgedSizes[i]);
      if (i > 0 && errors.largest == 0) continue;
      TensorError error{.tensor = name, .error = errors.difference, .scale = errors.largest};
      error.textbook = largest_errors(textbook, expected, &textbook, kJudgedSizes[i]).difference;
      double slack = slack_of(error.scale);
      error.allowed = ratio * error.textbook + slack;
      if (!(error.error <= error.allowed)) {
        slack += moved_by(name).largest[i];
        error.allowed = ratio * error.textbook + slack;
      }
      if (!(error.error <= error.allowed)) {
        error.textbook = std::max(error.textbook, worst_textbook(name).largest[i]);
        error.allowed = ratio * error.textbook + slack;
      }
      if (!(error.error <= error.allowed)) {
        report.failures.push_back(fmt::format(
            "{}: error {:.3g} exceeds {:.3g} (textbook computation {:.3g}, largest value {:.3g})",
            name, error.error, error.allowed, error.textbook, error.scale));
      }
      most_allowed = std::max(most_allowed, error.allowed);
      if (i == 0 || error.error / error.allowed > worst.error / worst.allowed) worst = error;
    }
    // Beside the largest elements small ones would pass whatever they are.
    const MeanErrors mean = mean_errors(value, expected, &textbook);
    double plain = mean_errors(textbook, expected, &textbook).difference;
    double slack = slack_of(mean.size);
    if (!(mean.difference <= ratio * plain + slack)) {
      plain = std::max(plain, worst_textbook(name).mean);
      slack += moved_by(name).largest[0];
    }
    if (!(mean.difference <= ratio * plain + slack)) {
      report.failures.push_back(fmt::format(
          "{}: mean error {:.3g} exceeds {:.3g} (textbook computation {:.3g}, mean size {:.3g})",
          name, mean.difference, ratio * plain + slack, plain, mean.size));
    }
    for (const std::string& mismatch :
         {special_mismatch(value, expected),
          overflow_mismatch(value, expected, textbook, most_allowed)}) {
      if (!mismatch.empty()) report.failures.push_back(name + ": " + mismatch);
    }
    report.errors.push_back(worst);
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
