// The commands of the tool. Each adds its options to the parser; parsing chooses what main() runs.
#pragma once

#include <functional>
#include <string>

#include "pullback/device.hpp"

namespace CLI {
class App;
}

namespace pullback::tool {

// Exit statuses: a contract with the programs that call us (docs/command-line.md).
enum ExitStatus : int { kDone = 0, kCheckFailed = 1, kBadUsage = 2, kSystemFailure = 3 };

struct Command {
  std::function<int()> run;
};

void add_doctor(CLI::App& app, Command& command);
void add_grad(CLI::App& app, Command& command);
void add_check(CLI::App& app, Command& command);
void add_bench(CLI::App& app, Command& command);
void add_compare(CLI::App& app, Command& command);
void add_demo(CLI::App& app, Command& command);
void add_compile(CLI::App& app, Command& command);
void add_cache(CLI::App& app, Command& command);

// --device and --threads, the same in every command.
struct DeviceOptions {
  std::string device = "cpu";
  int threads = 0;

  void add_to(CLI::App& app);
  // Throws Error when there is no such device.
  Device get() const;
};

// For CLI::Option::check(). CLI::Range lets NaN pass.
std::function<std::string(const std::string&)> number_between(double low, double high);
// The same. For unsigned options CLI takes -1 and what is too large for the largest number.
std::string whole_number(const std::string& text);
// The same, of a variable of a script that was not set for instance.
std::string some_path(const std::string& text);

// The options that choose the device: "--threads 4", "--device cuda:1".
std::string text_of(const Device& device);
// The same of a variant, with a space before it; nothing if none is chosen.
std::string variant_text(const std::string& variant);

}  // namespace pullback::tool
