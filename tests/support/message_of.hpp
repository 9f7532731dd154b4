// What a refusal says.
#pragma once

#include <functional>
#include <string>

#include "pullback/error.hpp"

namespace pullback {

inline std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace pullback
