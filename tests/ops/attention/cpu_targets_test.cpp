// The "cpu" variant, compiled for each instruction set that this build has and this machine can
// run, and for bf16 also where AMX would be chosen.
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cstdint>
#include <string>

#include "driver/case.hpp"
#include "driver/check.hpp"
#include "support/case_test.hpp"

namespace pullback {
namespace {

class Target {
 public:
  explicit Target(std::int64_t target) { set(target); }
  ~Target() { set(0); }

 private:
  static void set(std::int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

TEST(attention_cpu, every_instruction_set) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    const Target chosen(target);
    std::uint64_t number = 0;
    for (const driver::Case& test : driver::attention_cases()) {
      if (test.full_only) continue;
      const DType dtype = test.dtypes[number++ % test.dtypes.size()];
      testing::expect_passed(
          driver::check_case(test, dtype, Device::cpu(2), testing::seed(), "cpu"));
    }
  }
}

}  // namespace
}  // namespace pullback
