// What every kernel may cost: for sm_80 and sm_90 none may need more registers, stack and shared
// memory than budgets.json says, and none may spill but those of attention, which take every
// register there is: within their budgets of stack. Compiled are all for these two that differ in
// their sources, options or compiler from what was recorded, since the same text gives the same
// code, and one of 128 of the rest and for the other architectures, for each architecture others;
// with PULLBACK_ALL_BUDGETS=1 all for all. To record anew, in an hour of CPU time:
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
#include "cuda/hash.hpp"
#include "cuda/kernel_key.hpp"
#include "cuda/nvrtc.hpp"
#include "cuda/op_kernel.hpp"
#include "driver/kernel_list.hpp"
#include "pullback/error.hpp"

namespace pullback {
namespace {

using nlohmann::json;
struct Budget {
  int registers = 0, stack = 0, shared = 0;
  std::string sources;  // a hash of all that was compiled
};
using Budgets = std::map<std::string, std::map<std::string, Budget>>;  // by kernel, architecture

void to_json(json& to, const Budget& budget) {
  to = {budget.registers, budget.stack, budget.shared, budget.sources};
}
void from_json(const json& from, Budget& budget) {
  budget = {from.at(0), from.at(1), from.at(2), from.at(3)};
}

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

std::string sources_of(const cuda::KernelSource& kernel) {
  return cuda::hash_text(cuda::key_text(kernel)).substr(0, 12);
}

Budget budget_of(const cuda::KernelSource& kernel, const cuda::Resources& resources) {
  return {resources.registers, resources.stack_bytes, resources.static_shared_bytes,
          sources_of(kernel)};
}

bool is_recorded(const Budgets& budgets, const cuda::KernelSource& kernel) {
  const auto archs = budgets.find(kernel.name);
  if (archs == budgets.end()) return false;
  const auto budget = archs->second.find(cuda::arch_name(kernel));
  return budget != archs->second.end() && budget->second.sources == sources_of(kernel);
}

// Leaves those to compile.
void choose(std::vector<cuda::KernelSource>& kernels, const Recorded& recorded, bool record) {
  if (std::getenv("PULLBACK_ALL_BUDGETS") != nullptr) return;
  const bool known_compiler = recorded.nvrtc == cuda::Nvrtc::instance().version();
  constexpr std::size_t kSample = 128;
  std::map<int, std::size_t> seen;  // by architecture
  for (std::size_t i = 0; i < std::size(cuda::kArchs); ++i) {
    seen[cuda::kArchs[i]] = i * kSample / std::size(cuda::kArchs);
  }
  std::erase_if(kernels, [&](const auto& kernel) {
    if (has_budget(kernel.arch)) {
      if (record || !known_compiler || !is_recorded(recorded.budgets, kernel)) return false;
    }
    return seen[kernel.arch]++ % kSample != 0;
  });
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
  const Recorded recorded = read_budgets();
  choose(all, recorded, record);
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

  Recorded now{cuda::Nvrtc::instance().version(), {}};
  for (std::size_t k = 0; k < all.size(); ++k) {
    const std::string arch = cuda::arch_name(all[k]);
    SCOPED_TRACE(all[k].name + " for " + arch);
    EXPECT_EQ(failures[k], "");
    if (has_budget(all[k].arch) && !all[k].name.starts_with("attention_")) {
      EXPECT_EQ(resources[k].spill_store_bytes + resources[k].spill_load_bytes, 0) << "spills";
    }
    if (has_budget(all[k].arch)) now.budgets[all[k].name][arch] = budget_of(all[k], resources[k]);
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
        ADD_FAILURE() << "no budget is recorded: " << used.registers << " registers, " << used.stack
                      << " bytes of stack, " << used.shared << " of shared memory";
        continue;
      }
      const Budget& budget = kernel->second.at(arch);
      if (now.nvrtc == recorded.nvrtc) {
        EXPECT_LE(used.registers, budget.registers) << "registers";
        EXPECT_LE(used.stack, budget.stack) << "bytes of stack";
      }
      EXPECT_LE(used.shared, budget.shared) << "bytes of shared memory";
    }
  }
  for (const auto& [name, archs] : recorded.budgets) {
    EXPECT_TRUE(names.contains(name) || !asked_for(name))
        << name << " has a budget but is no kernel";
  }
}

}  // namespace
}  // namespace pullback
