// Turns an op's case list into tests. Each op's tests/ops/<op>/cases_test.cpp is
//   PULLBACK_CASE_TESTS(entmax)
#pragma once

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "cuda/driver.hpp"
#include "driver/case.hpp"
#include "driver/check.hpp"
#include "driver/kernel_list.hpp"
#include "support/other_variants.hpp"

namespace pullback::testing {

struct CaseParameter {
  driver::Case test;
  DType dtype;
};

// Set by CMake. Finite differences test the reference: once, in a build without sanitizers.
#ifdef PULLBACK_SANITIZED
inline constexpr bool kFiniteDifferences = false;
#else
inline constexpr bool kFiniteDifferences = true;
#endif

inline std::vector<CaseParameter> parameters(const std::vector<driver::Case>& cases, bool full) {
  std::vector<CaseParameter> result;
  for (const auto& test : cases) {
    if (test.full_only && !full) continue;
    for (DType dtype : test.dtypes) {
      result.push_back({test, dtype});
      result.back().test.finite_differences &= kFiniteDifferences;
    }
  }
  return result;
}

// Why the cases of an op cannot run on a GPU here; empty: they can.
inline std::string cuda_problem(std::string_view op) {
  return driver::has_cuda(op) ? cuda::driver_problem() : "no CUDA variants";
}

// All of them: many of those that take long are there for a kernel. None where there is no GPU: the
// fuzz test says so, once.
inline std::vector<CaseParameter> cuda_parameters(std::string_view op,
                                                  const std::vector<driver::Case>& cases) {
  return cuda_problem(op).empty() ? parameters(cases, true) : std::vector<CaseParameter>{};
}

// Those that another variant has to pass, too.
inline std::vector<CaseParameter> other_cuda_parameters(std::string_view op,
                                                        const std::vector<driver::Case>& cases) {
  std::vector<CaseParameter> all = cuda_parameters(op, cases);
  std::erase_if(all, [](const CaseParameter& parameter) {
    return other_variant(parameter.test, parameter.dtype).empty();
  });
  return all;
}

inline std::string parameter_name(const ::testing::TestParamInfo<CaseParameter>& info) {
  std::string name = info.param.test.name + "_" + std::string(name_of(info.param.dtype));
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
}

// PULLBACK_TEST_SEED repeats a run; by default every run is the same.
inline std::uint64_t seed() {
  const char* text = std::getenv("PULLBACK_TEST_SEED");
  return text ? std::strtoull(text, nullptr, 10) : 1;
}

inline void expect_passed(const driver::CheckReport& report) {
  for (const auto& failure : report.failures) ADD_FAILURE() << failure;
}

// Random problems: PULLBACK_FUZZ_COUNT of them (default `count`), from PULLBACK_TEST_SEED on.
inline void run_fuzz(driver::Case (*fuzz)(std::uint64_t), int count, const Device& device) {
  if (const char* text = std::getenv("PULLBACK_FUZZ_COUNT")) count = std::atoi(text);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t case_seed = seed() * 1000003 + static_cast<std::uint64_t>(i);
    driver::Case test = fuzz(case_seed);
    test.finite_differences &= kFiniteDifferences;
    const DType dtype = test.dtypes[case_seed % test.dtypes.size()];
    expect_passed(driver::check_case(test, dtype, device, case_seed));
    if (::testing::Test::HasFailure()) {
      FAIL() << "repeat with PULLBACK_TEST_SEED=" << seed() << " (fuzz case " << i << ")";
    }
  }
}

// While one lives, kernels run as on a CPU of that instruction set.
class CpuTarget {
 public:
  explicit CpuTarget(std::int64_t target) { set(target); }
  ~CpuTarget() { set(0); }
  CpuTarget(const CpuTarget&) = delete;
  CpuTarget& operator=(const CpuTarget&) = delete;

 private:
  static void set(std::int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

// The variant "cpu" for each instruction set that this build has and this machine can run. Cases
// take turns with dtypes.
inline void run_on_every_target(const std::vector<driver::Case>& cases,
                                driver::Case (*fuzz)(std::uint64_t), int fuzz_count) {
  const auto targets = hwy::SupportedAndGeneratedTargets();
  if (targets.size() == 1) GTEST_SKIP() << "one instruction set, which the other tests run on";
  if (const char* text = std::getenv("PULLBACK_FUZZ_COUNT")) fuzz_count = std::atoi(text);
  std::uint64_t turn = 0;
  const auto run = [&](driver::Case test, std::uint64_t case_seed) {
    test.finite_differences = false;  // they test the reference
    const DType dtype = test.dtypes[turn++ % test.dtypes.size()];
    const driver::CaseCheck check(test, dtype, case_seed);
    for (const std::int64_t target : targets) {
      SCOPED_TRACE(hwy::TargetName(target));
      const CpuTarget chosen(target);
      expect_passed(check.run(Device::cpu(2), "cpu"));
    }
  };
  for (const driver::Case& test : cases) {
    if (!test.full_only) run(test, seed());
  }
  for (int i = 0; i < fuzz_count; ++i) {
    const std::uint64_t case_seed = seed() * 1000033 + static_cast<std::uint64_t>(i);
    run(fuzz(case_seed), case_seed);
  }
}

}  // namespace pullback::testing

#define PULLBACK_CASE_TESTS(op)                                                                   \
  class op##_cases : public ::testing::TestWithParam<pullback::testing::CaseParameter> {};        \
  TEST_P(op##_cases, agrees_with_reference) {                                                     \
    pullback::testing::expect_passed(pullback::driver::check_case(                                \
        GetParam().test, GetParam().dtype, pullback::Device::cpu(2), pullback::testing::seed())); \
  }                                                                                               \
  INSTANTIATE_TEST_SUITE_P(                                                                       \
      op, op##_cases,                                                                             \
      ::testing::ValuesIn(pullback::testing::parameters(pullback::driver::op##_cases(), false)),  \
      pullback::testing::parameter_name);                                                         \
  TEST(op##_fuzz, agrees_with_reference) {                                                        \
    pullback::testing::run_fuzz(pullback::driver::op##_fuzz, 60, pullback::Device::cpu(2));       \
  }                                                                                               \
  TEST(op##_cpu, every_instruction_set) {                                                         \
    pullback::testing::run_on_every_target(pullback::driver::op##_cases(),                        \
                                           pullback::driver::op##_fuzz, 20);                      \
  }                                                                                               \
  class op##_cuda_cases : public ::testing::TestWithParam<pullback::testing::CaseParameter> {};   \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(op##_cuda_cases);                                 \
  TEST_P(op##_cuda_cases, agrees_with_reference) {                                                \
    pullback::testing::expect_passed(pullback::driver::check_case(                                \
        GetParam().test, GetParam().dtype, pullback::Device::cuda(), pullback::testing::seed())); \
  }                                                                                               \
  INSTANTIATE_TEST_SUITE_P(op, op##_cuda_cases,                                                   \
                           ::testing::ValuesIn(pullback::testing::cuda_parameters(                \
                               #op, pullback::driver::op##_cases())),                             \
                           pullback::testing::parameter_name);                                    \
  TEST(op##_cuda_fuzz, agrees_with_reference) {                                                   \
    const std::string problem = pullback::testing::cuda_problem(#op);                             \
    if (!problem.empty()) GTEST_SKIP() << "no case of " #op " ran on a GPU: " << problem;         \
    pullback::testing::run_fuzz(pullback::driver::op##_fuzz, 200, pullback::Device::cuda());      \
  }

#define PULLBACK_OTHER_VARIANT_TESTS(op)                                                 \
  class op##_other_cuda_cases                                                            \
      : public ::testing::TestWithParam<pullback::testing::CaseParameter> {};            \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(op##_other_cuda_cases);                  \
  TEST_P(op##_other_cuda_cases, agrees_with_reference) {                                 \
    const auto& [test, dtype] = GetParam();                                              \
    pullback::testing::expect_passed(pullback::driver::check_case(                       \
        test, dtype, pullback::Device::cuda(), pullback::testing::seed(),                \
        pullback::testing::other_variant(test, dtype)));                                 \
  }                                                                                      \
  INSTANTIATE_TEST_SUITE_P(op, op##_other_cuda_cases,                                    \
                           ::testing::ValuesIn(pullback::testing::other_cuda_parameters( \
                               #op, pullback::driver::op##_cases())),                    \
                           pullback::testing::parameter_name);
