// Environment variables that steer compiling and its cache.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <string_view>

#include "core/check.hpp"

namespace pullback::cuda {

// Empty where it is not set.
inline std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// One of `known`, the first where it is not set. Throws Error(invalid_argument) for anything else:
// a variable that was misspelt must not do the opposite of what it was set for.
inline std::string_view environment_choice(const char* name,
                                           std::initializer_list<std::string_view> known) {
  const std::string value = environment(name);
  if (value.empty()) return *known.begin();
  const auto* found = std::find(known.begin(), known.end(), value);
  if (found == known.end()) {
    fail(ErrorCode::invalid_argument, "CUDA", name, fmt::format("{}", fmt::join(known, " or ")),
         fmt::format("'{}'", value));
  }
  return *found;
}

}  // namespace pullback::cuda
