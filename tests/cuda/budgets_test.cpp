// What every kernel may cost. Each is compiled for sm_90, one of 4 for sm_80, one of 16 for the
// other architectures, or all for all with PULLBACK_ALL_BUDGETS=1. On the first two none may need
// more registers, stack and shared memory than budgets.json says, and none may spill but those of
// attention, which take every register there is: within their budgets of stack. To record anew, in
// a quarter of an hour of CPU time:
//   PULLBACK_RECORD_BUDGETS=1 build/tests/cuda_test --gtest_filter='budgets.*'
// and look at what changed before committing it. PULLBACK_BUDGETS_FILE names another file;
// PULLBACK_BUDGETS_OF keeps to the kernels whose names begin so, "block_matmul_" for instance.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "core/cpu_info.hpp"
#include "cuda/compiler.hpp"
#include "cuda/nvrtc.hpp"
#include "cuda/op_kernel.hpp"
#include "driver/kernel_list.hpp"
#include "pullback/error.hpp"

namespace pullback {
namespace {

using nlohmann::json;
using Budget = std::array<int, 3>;                                     // registers, stack, shared
using Budgets = std::map<std::string, std::map<std::string, Budget>>;  // by kernel, architecture

// Registers depend on the compiler's release: those of another one than recorded are not compared.
struct Recorded {
  int nvrtc = 0;
  Budgets budgets;
};

std::string budgets_file() {
  const char* other = std::getenv("PULLBACK_BUDGETS_FILE");
  return other != nullptr ? other : BUDGETS_FILE;
}

bool asked_for(const std::string& name) {
  const char* prefix = std::getenv("PULLBACK_BUDGETS_OF");
  return prefix == nullptr || name.starts_with(prefix);
}

bool has_budget(int arch) { return arch == 80 || arch == 90; }

Recorded read_budgets() {
  std::ifstream file(budgets_file());
  Recorded recorded;
  if (!file) return recorded;
  const json document = json::parse(file);
  recorded.nvrtc = document["nvrtc"];
  recorded.budgets = document["kernels"].get<Budgets>();
  return recorded;
}

// A line a kernel, so that a change of one reads as one.
void write_budgets(const Recorded& recorded) {
  std::ofstream file(budgets_file());
  file << "{\"nvrtc\": " << recorded.nvrtc << ",\n \"kernels\": {";
  const char* separator = "\n";
  for (const auto& [name, archs] : recorded.budgets) {
    file << separator << "  " << json(name) << ": " << json(archs);
    separator = ",\n";
  }
  file << "\n}}\n";
}

Budget budget_of(const cuda::Resources& resources) {
  return {resources.registers, resources.stack_bytes, resources.static_shared_bytes};
}

std::vector<cuda::KernelSource> kernels() {
  std::vector<cuda::KernelSource> all;
  for (int arch : cuda::kArchs) {
    for (auto& kernel : driver::all_kernels(arch)) all.push_back(std::move(kernel));
  }
  return all;
}

TEST(budgets, names_are_unique) {
  std::set<std::string> names;
  for (const cuda::KernelSource& kernel : kernels()) {
    EXPECT_TRUE(names.insert(kernel.name + " " + cuda::arch_name(kernel)).second) << kernel.name;
  }
}

TEST(budgets, every_kernel_keeps_to_its_own) {
  if (const std::string problem = cuda::nvrtc_problem(); !problem.empty()) {
    if (std::getenv("PULLBACK_REQUIRE_NVRTC")) FAIL() << problem;
    GTEST_SKIP() << problem;
  }
  std::vector<cuda::KernelSource> all = kernels();
  std::erase_if(all, [](const auto& kernel) { return !asked_for(kernel.name); });
  std::set<std::string> names;
  for (const auto& kernel : all) names.insert(kernel.name);
  const bool record = std::getenv("PULLBACK_RECORD_BUDGETS") != nullptr;
  if (std::getenv("PULLBACK_ALL_BUDGETS") == nullptr) {
    std::map<int, std::size_t> seen;  // by architecture
    std::erase_if(all, [&](const auto& kernel) {
      if (kernel.arch == 90 || (record && has_budget(kernel.arch))) return false;
      return seen[kernel.arch]++ % (kernel.arch == 80 ? 4 : 16) != 0;
    });
  }
  std::vector<cuda::Resources> resources(all.size());
  std::vector<std::string> failures(all.size());
  std::atomic<std::size_t> next = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < available_cpus(); ++i) {
    threads.emplace_back([&] {
      for (std::size_t k = next++; k < all.size(); k = next++) {
        try {
          resources[k] = cuda::compile_with_report(all[k]).resources;
        } catch (const Error& error) {
          failures[k] = error.what();
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();

  const Recorded recorded = read_budgets();
  Recorded now{cuda::Nvrtc::instance().version(), {}};
  for (std::size_t k = 0; k < all.size(); ++k) {
    const std::string arch = cuda::arch_name(all[k]);
    SCOPED_TRACE(all[k].name + " for " + arch);
    EXPECT_EQ(failures[k], "");
    if (has_budget(all[k].arch) && !all[k].name.starts_with("attention_")) {
      EXPECT_EQ(resources[k].spill_store_bytes + resources[k].spill_load_bytes, 0) << "spills";
    }
    if (has_budget(all[k].arch)) now.budgets[all[k].name][arch] = budget_of(resources[k]);
  }
  if (record) {
    for (const auto& [name, archs] : recorded.budgets) {
      if (!asked_for(name)) now.budgets[name] = archs;
    }
    return write_budgets(now);
  }

  for (const auto& [name, archs] : now.budgets) {
    for (const auto& [arch, used] : archs) {
      SCOPED_TRACE(name + " for " + arch);
      const auto kernel = recorded.budgets.find(name);
      if (kernel == recorded.budgets.end() || !kernel->second.contains(arch)) {
        ADD_FAILURE() << "no budget is recorded: " << used[0] << " registers, " << used[1]
                      << " bytes of stack, " << used[2] << " of shared memory";
        continue;
      }
      const Budget& budget = kernel->second.at(arch);
      if (now.nvrtc == recorded.nvrtc) {
        EXPECT_LE(used[0], budget[0]) << "registers";
        EXPECT_LE(used[1], budget[1]) << "bytes of stack";
      }
      EXPECT_LE(used[2], budget[2]) << "bytes of shared memory";
    }
  }
  for (const auto& [name, archs] : recorded.budgets) {
    EXPECT_TRUE(names.contains(name) || !asked_for(name))
        << name << " has a budget but is no kernel";
  }
}

}  // namespace
}  // namespace pullback
