// The log callback of the C ABI.
#include <gtest/gtest.h>

#include <string>

#include "capi/c_tensors.hpp"
#include "core/log.hpp"

namespace pullback::testing {
namespace {

struct Seen {
  int level = -1;
  std::string message;
};

TEST(Log, reaches_the_c_callback_until_it_is_unset) {
  Seen seen;
  const auto remember = [](std::int32_t level, const char* message, void* user_data) {
    *static_cast<Seen*>(user_data) = {level, message};
  };
  ASSERT_EQ(pullback_set_log_callback(remember, &seen), PULLBACK_OK);
  pullback::log(LogLevel::warning, "hello");
  ASSERT_EQ(pullback_set_log_callback(nullptr, nullptr), PULLBACK_OK);
  pullback::log(LogLevel::warning, "unheard");
  EXPECT_EQ(seen.level, PULLBACK_LOG_WARNING);
  EXPECT_EQ(seen.message, "hello");
}

}  // namespace
}  // namespace pullback::testing
