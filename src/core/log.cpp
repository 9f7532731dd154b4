#include "core/log.hpp"

#include <mutex>

namespace pullback {
namespace {

struct Sink {
  LogCallback callback = nullptr;
  void* user_data = nullptr;
};

std::mutex sink_mutex;
Sink sink;

}  // namespace

void set_log_callback(LogCallback callback, void* user_data) {
  const std::lock_guard lock(sink_mutex);
  sink = {callback, user_data};
}

void log(LogLevel level, const std::string& message) {
  Sink current;
  {
    const std::lock_guard lock(sink_mutex);
    current = sink;
  }
  if (current.callback) current.callback(level, message.c_str(), current.user_data);
}

}  // namespace pullback
