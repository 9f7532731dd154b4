#pragma once

#include <functional>
#include <string>

#include "pullback/log.hpp"

namespace pullback {

// In place of set_log_callback's; empty: none.
void set_log_sink(std::function<void(LogLevel, const char*)> sink);

void log(LogLevel level, const std::string& message);

}  // namespace pullback
