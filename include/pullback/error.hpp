// Errors: every failure of the C++ API is a pullback::Error.
#pragma once

#include <stdexcept>
#include <string>

#include "pullback/export.hpp"

namespace pullback {

// The values are those of the C ABI's status codes (pullback.h).
enum class ErrorCode : int {
  invalid_argument = 1,     // a tensor or an option breaks the op's contract
  unsupported = 2,          // a valid problem that no variant on this device serves
  workspace_too_small = 3,  // fewer bytes than plan.workspace_bytes()
  device = 4,               // driver, compiler or system failure
  internal = 5,             // a defect of the library
};

// The message names the op, the tensor or option, what was expected, what was given, and a remedy.
class PULLBACK_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace pullback
