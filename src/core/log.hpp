#pragma once

#include <string>

#include "pullback/log.hpp"

namespace pullback {

void log(LogLevel level, const std::string& message);

}  // namespace pullback
