// toy: y = scale · x², d_x = 2 · scale · x · d_y, and a fault on demand (--fault or TOY_FAULT).
// Linked in place of the real ops, it shows what the checker notices and drives the command line.
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "core/arithmetic.hpp"
#include "core/check.hpp"
#include "driver/case.hpp"
#include "driver/driver.hpp"

namespace pullback::driver {
namespace {

constexpr std::array<std::string_view, 13> kFaults = {
    "none",        "wrong-output",   "wrong-in-f32",       "wrong-gradient", "stray-write",
    "thread-bits", "missing-output", "lost-nan",           "wrong-shape",    "changed-input",
    "refused",     "system",         "lost-small-elements"};

class ToySession final : public Session {
 public:
  explicit ToySession(const Request& request);

  void forward() override {
    for (std::int64_t i = 0; i < x_.numel(); ++i) {
      const double x = x_.get(i);
      double y = scale_ * x * x;
      if (has("wrong-output") && i == 0) y += 1;
      if (has("lost-small-elements") && std::abs(y) < 0.1) y = 0;
      if (has("wrong-in-f32") && x_.spec().dtype == DType::f32) y *= 1.1;
      if (has("lost-nan") && std::isnan(y)) y = 0;
      if (has("thread-bits") && threads_ > 1) y = std::nextafter(y, 1e30);
      y_.set(i, y);
    }
    if (has("stray-write")) *(static_cast<char*>(y_.data()) - 1) = 0;
    if (has("changed-input")) x_.set(0, 3);
  }
  void backward() override {
    const double factor = has("wrong-gradient") ? 1.01 : 1;
    for (std::int64_t i = 0; i < x_.numel(); ++i) {
      d_x_.set(i, 2 * factor * scale_ * x_.get(i) * d_y_.get(i));
    }
  }

 private:
  bool has(std::string_view fault) const { return fault == fault_; }

  std::string fault_;
  HostTensor x_, d_y_, y_, d_x_;
  double scale_;
  int threads_;
};

const OpDriver& toy_driver();

ToySession::ToySession(const Request& request) : threads_(request.device.threads) {
  check_inputs(toy_driver(), request);
  OptionReader options("toy", request.options);
  scale_ = options.number("scale", 1);
  const auto window = options.integers("window", 2);
  const int fault = options.choice(
      "fault", {kFaults[0], kFaults[1], kFaults[2], kFaults[3], kFaults[4], kFaults[5], kFaults[6],
                kFaults[7], kFaults[8], kFaults[9], kFaults[10], kFaults[11], kFaults[12]});
  options.finish();
  const Checker check("toy");
  check.that(window.empty() || window[0] == -1, "--window", "-1 first", "another number");
  const bool honest = request.variant == "reference" || request.variant == "textbook";
  check.that(honest || request.variant.empty() || request.variant == "cpu", "variant",
             "cpu, reference, textbook", request.variant);
  if (!honest) {
    const char* from_environment = std::getenv("TOY_FAULT");
    fault_ = fault >= 0         ? kFaults[static_cast<std::size_t>(fault)]
             : from_environment ? from_environment
                                : "none";
  }
  if (has("refused")) throw Error(ErrorCode::unsupported, "toy: no variant serves\n  cpu: never");
  if (has("system")) throw Error(ErrorCode::device, "toy: no such device");

  x_ = request.inputs.find("x")->second;
  d_y_ = request.inputs.find("d_y")->second;
  check.dtype("x", x_.spec(), {DType::f64, DType::f32, DType::bf16, DType::f16});
  check.shape("d_y", d_y_.spec(), std::span(x_.spec().shape).first(std::size_t(x_.spec().rank)));
  auto spec = TensorSpec::contiguous(x_.spec().dtype,
                                     std::span(x_.spec().shape).first(std::size_t(x_.spec().rank)));
  TensorSpec d_spec = spec;
  y_ = make_output(spec, request, "y");
  d_x_ = make_output(d_spec, request, "d_x");
  if (!has("missing-output")) outputs["y"] = y_;
  outputs["d_x"] = has("wrong-shape") ? filled_tensor(DType::f32, {1, 1, 1}, 0) : d_x_;
  forward_description = "toy forward: cpu\nplain loops";
  backward_description = "toy backward: cpu\nplain loops";
}

Cost toy_cost(const Request& request, Pass pass) {
  const TensorSpec x = spec_of(request.inputs, "x");
  const double factor = pass == Pass::forward ? 1 : 1.5;
  return {.flops = 4 * factor * static_cast<double>(x.numel()),
          .bytes = factor * compulsory_bytes({&x, &x})};
}

const OpDriver& toy_driver() {
  static const OpDriver driver{.name = "toy",
                               .summary = "scale times the square",
                               .inputs = {{"x", "[…]", true}, {"d_y", "like x", true}},
                               .outputs = "y",
                               .options = {{"scale", "X", "factor (1)"},
                                           {"window", "L,R", "unused; L is -1"},
                                           {"fault", "NAME", "what goes wrong"}},
                               .cotangents = {{"y", "d_y"}},
                               .gradients = {{"x", "d_x"}},
                               .prepare = [](const Request& request) -> std::unique_ptr<Session> {
                                 return std::make_unique<ToySession>(request);
                               },
                               .cost = toy_cost};
  return driver;
}

TensorMap toy_inputs(DType dtype, Random& random) {
  return {{"x", normal_tensor(dtype, {5, 7}, random)},
          {"d_y", normal_tensor(dtype, {5, 7}, random)}};
}

Case toy_case(std::string name, OptionMap options) {
  return {
      .op = "toy", .name = std::move(name), .options = std::move(options), .inputs = toy_inputs};
}

std::vector<Case> toy_cases() {
  return {toy_case("plain", {}), toy_case("scaled", {{"scale", "-3"}})};
}
Case toy_fuzz(std::uint64_t seed) {
  return toy_case("fuzz", {{"scale", std::to_string(seed % 5)}});
}
// "large" is, in f32, more than bench compares with the reference.
std::vector<Case> toy_bench() {
  std::vector<Case> cases = {toy_case("small", {}), toy_case("large", {})};
  cases.back().inputs = [](DType dtype, Random& random) -> TensorMap {
    return {{"x", normal_tensor(dtype, {1 << 18}, random)},
            {"d_y", normal_tensor(dtype, {1 << 18}, random)}};
  };
  return cases;
}

}  // namespace

std::span<const OpDriver* const> all_drivers() {
  static const OpDriver* const drivers[] = {&toy_driver()};
  return drivers;
}

std::vector<Case> all_cuda_benches() { return {}; }

std::span<const CaseLists> all_case_lists() {
  static const CaseLists lists[] = {{"toy", toy_cases, toy_fuzz, toy_bench}};
  return lists;
}

}  // namespace pullback::driver
