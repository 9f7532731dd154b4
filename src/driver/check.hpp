// Verification of one case: against the f64 reference, beside a textbook computation in the same
// dtype, by finite differences, for equal bits, for other strides, and for stray writes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "driver/case.hpp"
#include "driver/comparison.hpp"
#include "driver/random.hpp"

namespace pullback::driver {

// Bounds on our error as a multiple of the textbook's, which has the same dtype (design: FA tests).
inline constexpr double kOutputErrorRatio = 2;
inline constexpr double kGradientErrorRatio = 3;

struct TensorError {
  std::string tensor;
  double error = 0;     // largest |ours - reference|
  double textbook = 0;  // largest |textbook - reference|
  double allowed = 0;
  double scale = 0;  // largest finite |reference|
};

struct CheckReport {
  std::vector<std::string> failures;  // one line each; empty: passed
  std::vector<TensorError> errors;
  bool passed() const { return failures.empty(); }
};

// What the outputs of a request are held to: those of the textbook computation and the reference.
struct Expected {
  TensorMap textbook, reference;
};
Expected expected_outputs(const Request& request);
// The request to the reference alone.
Request reference_request(const Request& request);

// Compares the outputs of `request` (run as it is) with the reference.
CheckReport verify(const Request& request);
// The same for outputs computed already.
CheckReport verify_outputs(const Request& request, const TensorMap& outputs);

// Everything above for one case and dtype. Failures say the seed. What is expected is computed
// once, for any number of devices and variants.
class CaseCheck {
 public:
  CaseCheck(const Case& test, DType dtype, std::uint64_t seed);
  CheckReport run(const Device& device, const std::string& variant = {}) const;

 private:
  CheckReport compared(const Request& request, const TensorMap& outputs) const;

  Case test_;
  DType dtype_;
  std::uint64_t seed_;
  Random random_;  // has drawn the inputs
  Request request_;
  TensorMap inputs_before_;  // copies: nothing may change an input
  Expected expected_;
};

// One run of it.
CheckReport check_case(const Case& test, DType dtype, const Device& device, std::uint64_t seed,
                       const std::string& variant = {});

}  // namespace pullback::driver
