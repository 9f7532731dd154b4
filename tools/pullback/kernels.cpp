// The CUDA kernels as files: compiling them ahead of time, and looking after their cache.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <regex>
#include <system_error>
#include <thread>

#include "commands.hpp"
#include "core/cpu_info.hpp"
#include "cuda/compiler.hpp"
#include "cuda/disk_cache.hpp"
#include "cuda/nvrtc.hpp"
#include "cuda/op_kernel.hpp"
#include "driver/kernel_list.hpp"
#include "print.hpp"
#include "pullback/error.hpp"

namespace pullback::tool {
namespace {

using cuda::DiskCache;
using cuda::KernelSource;

struct CompileOptions {
  std::vector<std::string> archs;
  std::string output;
  std::string match;
  bool times = false;
  int threads = 0;
};

// "sm_90" or "90".
int arch_of(const std::string& text) {
  for (int arch : cuda::kArchs) {
    if (text == fmt::format("sm_{}", arch) || text == fmt::format("{}", arch)) return arch;
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("compile: --arch: expected of sm_{}, got '{}'",
                          fmt::join(cuda::kArchs, ", sm_"), text));
}

DiskCache chosen_cache(const std::string& folder) {
  // A folder that was named may be for others.
  DiskCache cache = folder.empty()
                        ? DiskCache::from_environment()
                        : DiskCache(folder, DiskCache::Mode::read_write, DiskCache::Readers::all);
  if (cache.folder().empty()) {
    throw Error(ErrorCode::device,
                "there is no folder for the cache: set PULLBACK_CACHE_DIR, XDG_CACHE_HOME or HOME");
  }
  return cache;
}

std::regex pattern_of(const std::string& text) {
  try {
    return std::regex(text);
  } catch (const std::regex_error&) {
    throw Error(ErrorCode::invalid_argument,
                "compile: --match: expected a regular expression, got '" + text + "'");
  }
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// What took longest first.
void print_times(const std::vector<KernelSource>& kernels, const std::vector<double>& seconds) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    if (seconds[i] > 0) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return seconds[a] > seconds[b]; });
  Table table({{"kernel"}, {"arch"}, {"time", true}});
  for (std::size_t i : order) {
    table.add({kernels[i].name, cuda::arch_name(kernels[i]), time_text(seconds[i])});
  }
  fmt::print("{}", table.text());
}

int run_compile(const CompileOptions& options) {
  std::vector<KernelSource> kernels;
  std::vector<int> archs;
  for (const std::string& text : options.archs) archs.push_back(arch_of(text));
  if (archs.empty()) archs.assign(std::begin(cuda::kArchs), std::end(cuda::kArchs));
  const DiskCache cache = chosen_cache(options.output);
  const std::regex match = pattern_of(options.match);
  for (int arch : archs) {
    for (KernelSource& kernel : driver::all_kernels(arch)) {
      if (std::regex_search(kernel.name, match)) kernels.push_back(std::move(kernel));
    }
  }
  if (kernels.empty()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("compile: --match: no kernel for sm_{} has '{}' in its name, as "
                            "attention_forward_bf16_64 would have bf16",
                            fmt::join(archs, ", sm_"), options.match));
  }
  for (int arch : archs) {
    if (!cuda::Nvrtc::instance().supports(arch)) {
      throw Error(ErrorCode::device,
                  fmt::format("compile: NVRTC {} does not know sm_{}; leave it out of "
                              "--arch, or install a newer NVRTC",
                              cuda::Nvrtc::instance().version(), arch));
    }
  }

  std::vector<double> seconds(kernels.size());  // 0 where nothing was compiled
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr failure;
  {
    Progress progress(kernels.size());
    const auto work = [&] {
      for (std::size_t i = next++; i < kernels.size(); i = next++) {
        {
          const std::lock_guard lock(mutex);
          if (failure) return;
          progress.next(fmt::format("{} {}", cuda::arch_name(kernels[i]), kernels[i].name));
        }
        try {
          const auto start = std::chrono::steady_clock::now();
          if (cuda::precompile(kernels[i], cache)) seconds[i] = seconds_since(start);
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!failure) failure = std::current_exception();
        }
      }
    };
    const int count = options.threads > 0 ? options.threads : available_cpus();
    const std::size_t most = std::min(static_cast<std::size_t>(count), kernels.size());
    std::vector<std::thread> threads;  // beside this one
    threads.reserve(most);
    try {
      while (threads.size() + 1 < most) threads.emplace_back(work);
    } catch (const std::system_error&) {  // fewer will do
    }
    work();
    for (auto& thread : threads) thread.join();
  }
  if (failure) std::rethrow_exception(failure);
  if (options.times) print_times(kernels, seconds);
  fmt::print(
      "{}: {} kernels for sm_{}, {} of them compiled now\n", cache.folder(), kernels.size(),
      fmt::join(archs, ", sm_"),
      kernels.size() - static_cast<std::size_t>(std::count(seconds.begin(), seconds.end(), 0.0)));
  return kDone;
}

// The value of a line "name value" in a key's text.
std::string line_of(const std::string& key_text, const std::string& name) {
  const std::size_t at = key_text.find("\n" + name + " ");
  if (at == std::string::npos) return "?";
  const std::size_t begin = at + name.size() + 2;
  return key_text.substr(begin, key_text.find('\n', begin) - begin);
}

int list_cache(const DiskCache& cache) {
  Table table({{"kernel"}, {"arch"}, {"size", true}});
  std::size_t damaged = 0;
  double bytes = 0;
  for (const DiskCache::Entry& entry : cache.list()) {
    bytes += static_cast<double>(entry.bytes);
    if (entry.key_text.empty()) {
      ++damaged;
      continue;
    }
    table.add({line_of(entry.key_text, "name"), line_of(entry.key_text, "arch"),
               bytes_text(static_cast<double>(entry.bytes))});
  }
  fmt::print("{}{}: {}, {} damaged\n", table.text(), cache.folder(), bytes_text(bytes), damaged);
  return kDone;
}

int verify_cache(const DiskCache& cache) {
  std::size_t damaged = 0, sound = 0;
  for (const DiskCache::Entry& entry : cache.list()) {
    if (entry.key_text.empty()) fmt::print("damaged: {}\n", entry.path);
    ++(entry.key_text.empty() ? damaged : sound);
  }
  const int removed = cache.mode() == DiskCache::Mode::read_write ? cache.purge(true) : 0;
  fmt::print("{}: {} sound, {} damaged, {} files removed\n", cache.folder(), sound, damaged,
             removed);
  return damaged == 0 ? kDone : kCheckFailed;
}

int clear_cache(const DiskCache& cache) {
  if (cache.mode() != DiskCache::Mode::read_write) {
    throw Error(ErrorCode::invalid_argument,
                "cache clear: the cache is not written to; unset PULLBACK_CACHE first");
  }
  fmt::print("{}: {} files removed\n", cache.folder(), cache.purge(false));
  return kDone;
}

}  // namespace

void add_compile(CLI::App& app, Command& command) {
  CLI::App* compile = app.add_subcommand(
      "compile", "Compiles all CUDA kernels ahead of time into the cache, or into a folder");
  auto options = std::make_shared<CompileOptions>();
  compile->add_option("--arch", options->archs, "sm_90,sm_100,…; all when not given")
      ->delimiter(',')
      ->type_name("ARCHS");
  compile->add_option("--output", options->output, "folder, to be used as PULLBACK_CACHE_DIR")
      ->check(some_path)
      ->type_name("DIR");
  compile->add_option("--match", options->match, "only kernels whose name contains this pattern")
      ->type_name("REGEX");
  compile->add_flag("--times", options->times, "what each kernel took, the longest first");
  compile->add_option("--threads", options->threads, "compilations at a time; all usable cores")
      ->check(CLI::Range(1, 4096))
      ->type_name("N");
  compile->callback(
      [options, &command] { command.run = [options] { return run_compile(*options); }; });
}

void add_cache(CLI::App& app, Command& command) {
  CLI::App* cache = app.add_subcommand("cache", "Shows and cleans the cache of compiled kernels");
  auto action = std::make_shared<std::string>("list");
  cache->add_option("action", *action, "list, verify (removes what is damaged) or clear")
      ->check(CLI::IsMember({"list", "verify", "clear"}))
      ->type_name("ACTION");
  cache->callback([action, &command] {
    command.run = [action] {
      const DiskCache chosen = chosen_cache({});
      return *action == "list"     ? list_cache(chosen)
             : *action == "verify" ? verify_cache(chosen)
                                   : clear_cache(chosen);
    };
  });
}

}  // namespace pullback::tool
