// The library prints nothing. What it has to say goes to this callback, which is unset at first.
#pragma once

#include "pullback/export.hpp"

namespace pullback {

enum class LogLevel : int { debug = 0, info = 1, warning = 2 };

// `message` is valid during the call only. May be called from any thread, several at a time.
using LogCallback = void (*)(LogLevel level, const char* message, void* user_data);

// Replaces the callback; null turns logging off.
PULLBACK_API void set_log_callback(LogCallback callback, void* user_data = nullptr);

}  // namespace pullback
