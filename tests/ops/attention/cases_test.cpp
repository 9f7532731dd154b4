#include <string>

#include "core/cpu_info.hpp"
#include "support/case_test.hpp"

PULLBACK_CASE_TESTS(attention)
PULLBACK_OTHER_VARIANT_TESTS(attention)

namespace pullback::testing {
namespace {

// By default bf16 runs on the best that the CPU has, which the tests above hold to the reference.
TEST(attention_variants, each_of_bf16_agrees_with_the_reference) {
  const std::pair<CpuIsa, std::string> variants[] = {{CpuIsa::any, "cpu"},
                                                     {CpuIsa::avx512_bf16, "cpu_avx512_bf16"},
                                                     {CpuIsa::amx_bf16, "cpu_amx_bf16"}};
  const auto run = [&](driver::Case test, std::uint64_t case_seed) {
    test.finite_differences = false;  // they test the reference
    const driver::CaseCheck check(test, DType::bf16, case_seed);
    for (const auto& [isa, variant] : variants) {
      if (!cpu_has(isa)) continue;
      SCOPED_TRACE(variant);
      expect_passed(check.run(Device::cpu(2), variant));
    }
  };
  for (const driver::Case& test : driver::attention_cases()) {
    if (test.exact) run(test, seed());
  }
  for (std::uint64_t i = 0; i < 20; ++i) {
    run(driver::attention_fuzz(seed() * 1000039 + i), seed() + i);
  }
}

// Scores of a thousand, and one number for the gradient of all scores: f64 cannot be closer to the
// definition than its own rounding lets it.
TEST(attention_verification, allows_what_rounding_makes_of_any_inputs) {
  for (const driver::Case& test : driver::attention_cases()) {
    if (test.name != "large logits" && test.name != "bias [1,1,1,1]") continue;
    for (std::uint64_t case_seed = 1; case_seed <= 20; ++case_seed) {
      SCOPED_TRACE(case_seed);
      expect_passed(driver::check_case(test, DType::f64, Device::cpu(2), case_seed));
    }
  }
}

}  // namespace
}  // namespace pullback::testing
