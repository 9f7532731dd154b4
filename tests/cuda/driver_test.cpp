// What the process may do with the driver at odd times.
#include "cuda/driver.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

namespace pullback::cuda {
namespace {

// A plan in a static object goes after all that was made later than it.
TEST(DriverDeathTest, serves_what_ends_with_the_process) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        static auto& first = *new std::string;
        std::atexit([] { ::_exit(driver_problem() == first ? 0 : 1); });
        first = driver_problem();
        std::exit(2);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace pullback::cuda
