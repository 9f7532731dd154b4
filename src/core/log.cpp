#include "core/log.hpp"

#include <mutex>
#include <utility>

namespace pullback {
namespace {

std::mutex sink_mutex;
// Never destroyed: other threads may log while the process ends.
auto& log_sink = *new std::function<void(LogLevel, const char*)>();

}  // namespace

void set_log_sink(std::function<void(LogLevel, const char*)> sink) {
  const std::lock_guard lock(sink_mutex);
  log_sink = std::move(sink);
}

void set_log_callback(LogCallback callback, void* user_data) {
  if (callback == nullptr) return set_log_sink({});
  set_log_sink([=](LogLevel level, const char* message) { callback(level, message, user_data); });
}

void log(LogLevel level, const std::string& message) {
  std::function<void(LogLevel, const char*)> sink;
  {
    const std::lock_guard lock(sink_mutex);
    sink = log_sink;
  }
  if (sink) sink(level, message.c_str());
}

}  // namespace pullback
