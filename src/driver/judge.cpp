#include "driver/judge.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace pullback::driver {
namespace {

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

constexpr std::uint64_t kDraws = 8;  // of the directions: the worst element meets both

// moved(value, 1 or -1 at random) for all values that are finite and stay so.
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

}  // namespace

void Errors::add(const HostTensor& got, const HostTensor& exact, const HostTensor* finite) {
  for (std::size_t i = 0; i < largest.size(); ++i) {
    const LargestErrors errors = largest_errors(got, exact, finite, kJudgedSizes[i]);
    largest[i] = std::max(largest[i], errors.difference);
  }
  mean = std::max(mean, mean_errors(got, exact, finite).difference);
}

Judge::Judge(const Request& request, const Expected& expected)
    : request_(request), expected_(expected), driver_(find_driver(request.op)) {}

const Errors& Judge::moved(const std::string& name) {
  if (!moved_) moved_ = movements(driver_, request_, expected_.reference);
  return (*moved_)[name];
}
const Errors& Judge::worst_textbook(const std::string& name) {
  if (!textbook_) textbook_ = textbook_errors(request_);
  return (*textbook_)[name];
}

void Judge::judge(const std::string& name, const HostTensor& value, CheckReport& report) {
  const HostTensor& exact = expected_.reference.find(name)->second;
  const HostTensor& textbook = expected_.textbook.find(name)->second;
  const DType dtype = value.spec().dtype;
  const bool gradient = is_gradient(driver_, name);
  const DType input = request_.inputs.find(driver_.inputs.front().name)->second.spec().dtype;
  const bool split =
      driver_.splits_f32_on_cuda && input == DType::f32 && request_.device.kind == DeviceKind::cuda;
  const double ratio = gradient || split ? kGradientErrorRatio : kOutputErrorRatio;
  // The floor: a textbook result that is right by luck must not demand the impossible of us. And
  // the definition, computed in f64, is no more exact than f64 is.
  const double floor = dtype == DType::f64 ? 64 : 2;
  const bool unit_term = driver_.has_unit_term && driver_.has_unit_term(request_, name);
  double of_any_size = gradient ? cancellation_error(driver_, request_, name, dtype) : 0;
  if (dtype == DType::f16) of_any_size += 0x1p-24;    // its smallest step
  if (dtype == DType::bf16) of_any_size += 0x1p-126;  // AMX takes smaller numbers for 0
  if (unit_term) of_any_size += floor * epsilon_of(accumulation_dtype(dtype));
  // What elements of that size may be off beside what the textbook is.
  const auto slack_of = [&](double size) {
    return floor * epsilon_of(dtype) * size + of_any_size + 1e-300;
  };

  TensorError worst{.tensor = name};
  double most_allowed = 0;
  for (std::size_t i = 0; i < std::size(kJudgedSizes); ++i) {
    const LargestErrors errors = largest_errors(value, exact, &textbook, kJudgedSizes[i]);
    if (i > 0 && errors.largest == 0) continue;
    TensorError error{.tensor = name, .error = errors.difference, .scale = errors.largest};
    error.textbook = largest_errors(textbook, exact, &textbook, kJudgedSizes[i]).difference;
    double slack = slack_of(error.scale);
    error.allowed = ratio * error.textbook + slack;
    if (!(error.error <= error.allowed)) {
      slack += moved(name).largest[i];
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
  report.errors.push_back(worst);

  // Beside the largest elements small ones would pass whatever they are.
  const MeanErrors mean = mean_errors(value, exact, &textbook);
  double plain = mean_errors(textbook, exact, &textbook).difference, slack = slack_of(mean.size);
  if (!(mean.difference <= ratio * plain + slack)) {
    plain = std::max(plain, worst_textbook(name).mean);
    slack += moved(name).largest[0];
  }
  if (!(mean.difference <= ratio * plain + slack)) {
    report.failures.push_back(fmt::format(
        "{}: mean error {:.3g} exceeds {:.3g} (textbook computation {:.3g}, mean size {:.3g})",
        name, mean.difference, ratio * plain + slack, plain, mean.size));
  }
  for (const std::string& mismatch :
       {special_mismatch(value, exact), overflow_mismatch(value, exact, textbook, most_allowed)}) {
    if (!mismatch.empty()) report.failures.push_back(name + ": " + mismatch);
  }
}

}  // namespace pullback::driver
