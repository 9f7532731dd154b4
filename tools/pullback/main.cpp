#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <new>
#include <string>
#include <vector>

#include "commands.hpp"
#include "core/cpu_info.hpp"
#include "cuda/driver.hpp"
#include "driver/safetensors.hpp"
#include "print.hpp"
#include "pullback/error.hpp"
#include "pullback/log.hpp"

namespace pullback::tool {
namespace {

// What callers may rely on: one line, whatever a message or a file name holds.
void report(std::string_view message) {
  std::string line;
  for (std::size_t i = 0; i < message.size(); ++i) {
    if (message[i] != '\n') {
      line += message[i];
    } else if (i + 1 < message.size()) {
      line += "; ";
      while (i + 1 < message.size() && message[i + 1] == ' ') ++i;
    }
  }
  if (!line.starts_with("pullback: ")) line = "pullback: " + line;
  tell(driver::printable(line, line.size() * 4) + "\n");
}

// What the library has to say that is no failure: a kernel cache that cannot be written, say.
void report_warning(LogLevel level, const char* message, void*) {
  if (level == LogLevel::warning) report(fmt::format("pullback: warning: {}", message));
}

int status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
    case ErrorCode::unsupported:
      return kBadUsage;
    default:
      return kSystemFailure;
  }
}

// For CLI11, which wants the last one first, and for which an option's value after `--name=` is the
// next argument where nothing else follows.
std::vector<std::string> reversed_arguments(int argc, char** argv) {
  std::vector<std::string> arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("--") && argument.find('=') == argument.size() - 1) {
      arguments.push_back(argument.substr(0, argument.size() - 1));
      arguments.emplace_back();
    } else {
      arguments.push_back(argument);
    }
  }
  std::ranges::reverse(arguments);
  return arguments;
}

int run(int argc, char** argv) {
  CLI::App app(
      "Gradients of attention, block-sparse softmax, entmax and segment reductions.\n"
      "Exit status: 0 done, 1 a check failed, 2 bad usage or input, 3 device or system "
      "failure.");
  app.name("pullback");
  app.set_version_flag("--version", "pullback " PULLBACK_VERSION);
  app.require_subcommand(0, 1);
  Command command;
  add_doctor(app, command);
  add_grad(app, command);
  add_check(app, command);
  add_bench(app, command);
  add_compare(app, command);
  add_demo(app, command);
  add_compile(app, command);
  add_cache(app, command);
  std::string unknown;
  try {
    app.parse(reversed_arguments(argc, argv));
  } catch (const CLI::ExtrasError&) {
    unknown = app.remaining(true).front();
    if (!app.get_subcommands().empty()) {
      report(fmt::format("unknown option or argument '{}' (see --help)", unknown));
      return kBadUsage;
    }
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    report(fmt::format("{} (see --help)", error.what()));
    return kBadUsage;
  }
  if (!command.run) {
    std::string known;
    for (const CLI::App* subcommand : app.get_subcommands({})) {
      known += (known.empty() ? "" : ", ") + subcommand->get_name();
    }
    if (!unknown.empty()) known += fmt::format("; got '{}'", unknown);
    report(fmt::format("expected a command: {} (see --help)", known));
    return kBadUsage;
  }
  const int status = command.run();
  flush_output();
  return status;
}

}  // namespace

void DeviceOptions::add_to(CLI::App& app) {
  app.add_option("--device", device, "cpu, cuda or cuda:N")->type_name("DEVICE");
  app.add_option("--threads", threads, "CPU threads; all usable cores when not given")
      ->check(CLI::Range(1, 4096))
      ->type_name("N");
}

Device DeviceOptions::get() const {
  if (device == "cpu") return Device::cpu(threads > 0 ? threads : available_cpus());
  const bool digits = device.size() > 5 && device.size() < 10 &&
                      device.find_first_not_of("0123456789", 5) == std::string::npos;
  if (device == "cuda" || (device.starts_with("cuda:") && digits)) {
    const int index = digits ? std::stoi(device.substr(5)) : 0;
    const std::string problem = cuda::driver_problem();
    if (!problem.empty()) throw Error(ErrorCode::device, "no CUDA device: " + problem);
    if (index >= cuda::device_count()) {
      throw Error(ErrorCode::device,
                  fmt::format("no CUDA device: expected an index below {}, got {}",
                              cuda::device_count(), index));
    }
    return Device::cuda(index);
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("--device: expected cpu, cuda or cuda:N, got '{}'", device));
}

std::function<std::string(const std::string&)> number_between(double low, double high) {
  return [=](const std::string& text) -> std::string {
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool number = error == std::errc() && end == text.data() + text.size();
    if (number && value >= low && value <= high) return {};
    return fmt::format("expected a number from {} to {}, got '{}'", low, high, text);
  };
}

std::string whole_number(const std::string& text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) return {};
  return fmt::format("expected a whole number of at most 64 bits, got '{}'", text);
}

std::string some_path(const std::string& text) { return text.empty() ? "expected a path" : ""; }

std::string variant_text(const std::string& variant) {
  return variant.empty() ? "" : " --variant " + shell_quoted(variant);
}

std::string text_of(const Device& device) {
  return device.kind == DeviceKind::cpu ? fmt::format("--threads {}", device.threads)
                                        : fmt::format("--device cuda:{}", device.index);
}

}  // namespace pullback::tool

int main(int argc, char** argv) {
  using namespace pullback;
  using namespace pullback::tool;
  // A write past the file size limit then fails like one to a full disk, and is cleaned up.
  std::signal(SIGXFSZ, SIG_IGN);
  set_log_callback(report_warning);
  try {
    return run(argc, argv);
  } catch (const Error& error) {
    report(error.what());
    return status_of(error.code());
  } catch (const std::bad_alloc&) {
    report("out of memory");
  } catch (const std::exception& error) {
    report(error.what());
  }
  return kSystemFailure;
}
