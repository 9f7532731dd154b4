#include "cuda/compiler.hpp"

#include <fmt/format.h>

#include <chrono>
#include <fstream>
#include <future>
#include <map>
#include <mutex>
#include <regex>
#include <semaphore>

#include "core/cpu_info.hpp"
#include "core/log.hpp"
#include "cuda/device_sources.hpp"
#include "cuda/environment.hpp"
#include "cuda/nvrtc.hpp"
#include "pullback/error.hpp"

namespace pullback::cuda {
namespace {

// The source is to blame: the next attempt would fail, too.
class CompileError : public Error {
 public:
  using Error::Error;
};

[[noreturn]] void fail_compile(const KernelSource& kernel, const Compilation& compilation,
                               const std::vector<std::string>& options) {
  std::string flags;
  for (const std::string& option : options) flags += " " + option;
  const Nvrtc& nvrtc = Nvrtc::instance();
  throw CompileError(
      ErrorCode::device,
      fmt::format("CUDA: compiling {} for {} failed with NVRTC {} ({}), options{}:\n{}",
                  kernel.name, arch_name(kernel), nvrtc.version(), nvrtc.path(), flags,
                  compilation.log));
}

Compilation compile_now(const KernelSource& kernel, const std::vector<std::string>& options) {
  Compilation result = Nvrtc::instance().compile(kernel.source, (kernel.name + ".cu").c_str(),
                                                 device_sources(), options);
  if (!result.ok) fail_compile(kernel, result, options);
  return result;
}

void dump(const KernelSource& kernel, const Cubin& cubin) {
  const std::string folder = environment("PULLBACK_JIT_DUMP");
  if (folder.empty()) return;
  const std::string base = folder + "/" + kernel.name + "." + arch_name(kernel);
  std::ofstream source(base + ".cu"), code(base + ".cubin", std::ios::binary);
  source << kernel.source << std::flush;
  code.write(cubin.data(), static_cast<std::streamsize>(cubin.size())).flush();
  if (!source || !code) log(LogLevel::warning, "CUDA: PULLBACK_JIT_DUMP: cannot write " + base);
}

bool may_compile() { return environment_choice("PULLBACK_JIT", {"on", "off"}) == "on"; }

std::optional<Cubin> find(const std::string& key) {
  if (auto cubin = DiskCache::from_environment().read(key)) return cubin;
  return DiskCache::shipped().read(key);
}

// No more at a time than there are processors: a plan may want a dozen, and each takes memory.
Compilation compile_in_turn(const KernelSource& kernel) {
  static std::counting_semaphore<> free(available_cpus());
  free.acquire();
  struct Release {
    ~Release() { free.release(); }
  } release;
  return compile_now(kernel, compile_options(kernel));
}

Cubin find_or_compile(const KernelSource& kernel, bool anew) {
  const bool compiles = may_compile();  // also finds out whether it was misspelt
  const std::string key = key_text(kernel);
  if (!anew) {
    if (auto cubin = find(key)) return std::move(*cubin);
  }
  const DiskCache cache = DiskCache::from_environment();
  if (!compiles) {
    throw Error(ErrorCode::device,
                fmt::format("CUDA: {} for {} is not in the cache ({}), or damaged there, and "
                            "PULLBACK_JIT=off forbids compiling; fill the cache with 'pullback "
                            "compile'",
                            kernel.name, arch_name(kernel),
                            cache.folder().empty() ? "no folder" : cache.folder()));
  }
  const auto start = std::chrono::steady_clock::now();
  Compilation compilation = compile_in_turn(kernel);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  log(LogLevel::info, fmt::format("CUDA: compiled {} for {} in {:.2f} s", kernel.name,
                                  arch_name(kernel), seconds.count()));
  std::string reason;
  if (cache.mode() == DiskCache::Mode::read_write && !cache.write(key, compilation.cubin, reason)) {
    log(LogLevel::warning, "CUDA: kernel cache: " + reason);
  }
  dump(kernel, compilation.cubin);
  return std::move(compilation.cubin);
}

int number_after(const std::string& log, const char* pattern) {
  std::smatch match;
  return std::regex_search(log, match, std::regex(pattern)) ? std::stoi(match[1]) : 0;
}

}  // namespace

std::vector<std::string> compile_options(const KernelSource& kernel) {
  return {"--gpu-architecture=" + arch_name(kernel), "--std=c++20",
          "--device-as-default-execution-space",
          // Compiling must not change the stack limit of a host program's process.
          "--modify-stack-limit=false", "--extra-device-vectorization"};
}

std::shared_ptr<const Cubin> compiled(const KernelSource& kernel, bool anew) {
  // Never destroyed: other threads may plan while the process ends.
  static std::mutex mutex;
  static auto& known =
      *new std::map<std::string, std::shared_future<std::shared_ptr<const Cubin>>>();
  const std::string key = fmt::format("{}{}", key_text(kernel), anew ? "anew" : "");
  std::promise<std::shared_ptr<const Cubin>> promise;
  std::shared_future<std::shared_ptr<const Cubin>> future;
  bool mine = false;
  {
    const std::lock_guard lock(mutex);
    auto [it, inserted] = known.try_emplace(key);
    if (inserted) it->second = promise.get_future().share();
    future = it->second;
    mine = inserted;
  }
  if (mine) {
    try {
      promise.set_value(std::make_shared<const Cubin>(find_or_compile(kernel, anew)));
    } catch (const CompileError&) {
      promise.set_exception(std::current_exception());
    } catch (...) {
      {  // the caller may do something about it, such as setting a variable
        const std::lock_guard lock(mutex);
        known.erase(key);
      }
      promise.set_exception(std::current_exception());
    }
  }
  return future.get();
}

bool can_compile() { return may_compile() && nvrtc_problem().empty(); }

bool can_be_compiled(const KernelSource& kernel) {
  return find(key_text(kernel)).has_value() || can_compile();
}

bool precompile(const KernelSource& kernel, const DiskCache& cache) {
  const std::string key = key_text(kernel);
  if (cache.read(key)) return false;
  std::optional<Cubin> cubin = DiskCache::from_environment().read(key);
  const bool compiles = !cubin.has_value();
  if (compiles) {
    cubin = compile_now(kernel, compile_options(kernel)).cubin;
    dump(kernel, *cubin);
  }
  std::string reason;
  if (!cache.write(key, *cubin, reason)) {
    throw Error(ErrorCode::device, "CUDA: kernel cache: " + reason);
  }
  return compiles;
}

Report compile_with_report(const KernelSource& kernel) {
  std::vector<std::string> options = compile_options(kernel);
  options.push_back("--ptxas-options=-v");
  const auto start = std::chrono::steady_clock::now();
  Compilation compilation = compile_now(kernel, options);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  Report report;
  report.log = compilation.log;
  report.seconds = seconds.count();
  report.resources = {
      .registers = number_after(compilation.log, "Used ([0-9]+) registers"),
      .spill_store_bytes = number_after(compilation.log, "([0-9]+) bytes spill stores"),
      .spill_load_bytes = number_after(compilation.log, "([0-9]+) bytes spill loads"),
      .stack_bytes = number_after(compilation.log, "([0-9]+) bytes stack frame"),
      .static_shared_bytes = number_after(compilation.log, "([0-9]+) bytes smem"),
  };
  report.cubin = std::make_shared<const Cubin>(std::move(compilation.cubin));
  return report;
}

}  // namespace pullback::cuda
