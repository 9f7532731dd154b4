// Whether every kernel is launched by a case. The cases run on a device that computes nothing
// (fake_cuda.c), so that none is needed. What they launch has to be in the list of kernels
// (`pullback compile`), and on sm_90, whose case lists these are, all of the list has to be
// launched. Standard output is a short list of cases that launches all of it, as names of tests,
// for checks that have no time for more.
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "driver/case.hpp"
#include "driver/check.hpp"
#include "driver/kernel_list.hpp"
#include "pullback/error.hpp"
#include "support/other_variants.hpp"

namespace pullback::driver {
namespace {

using Names = std::set<std::string>;

// What only problems launch that no machine makes in passing.
struct Exempt {
  const char *pattern, *needs;
};
constexpr Exempt kExempt[] = {
    {"^entmax_forward_stream_.*_[124](_edges)?$", "hundreds of rows of more than 32768 elements"},
    {"^segment_sort_.*_wide$", "2^32 rows or segments"},
};
bool is_exempt(const std::string& kernel) {
  return std::ranges::any_of(kExempt, [&](const Exempt& exempt) {
    return std::regex_search(kernel, std::regex(exempt.pattern));
  });
}

std::map<std::string, std::string> names_by_source;  // of the list
Names launched;                                      // since it was cleared
std::string unlisted;                                // the first source that is not in the list

void on_launch(const char* source) {
  const auto found = names_by_source.find(source);
  if (found != names_by_source.end()) {
    launched.insert(found->second);
  } else if (unlisted.empty()) {
    unlisted = source;
  }
}

// As check_case() does: as it is, and with other strides.
void run(const Case& test, DType dtype, std::uint64_t seed, const std::string& variant) {
  Random random = Random::rough(seed);
  Request request{.op = test.op,
                  .inputs = test.inputs(dtype, random),
                  .options = test.options,
                  .device = Device::cuda(),
                  .variant = variant};
  evaluate(request);
  request.layout_seed = seed | 1;
  for (auto& [name, tensor] : request.inputs) {
    tensor = relaid(tensor, random_layout(tensor.spec(), random));
  }
  evaluate(request);
}

std::string test_name(const Case& test, DType dtype, std::string_view suite) {
  std::string name = test.name + "_" + std::string(pullback::name_of(dtype));
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return fmt::format("{0}/{0}_{1}_cases.agrees_with_reference/{2}", test.op, suite, name);
}

// The next case is always the one with the most kernels that none before it had.
std::vector<std::string> cover(const std::vector<std::pair<std::string, Names>>& cases) {
  std::vector<std::string> chosen;
  Names had;
  while (true) {
    const std::string* best = nullptr;
    const Names* best_names = nullptr;
    std::ptrdiff_t most = 0;
    for (const auto& [test, names] : cases) {
      const auto more = std::ranges::count_if(
          names, [&](const std::string& name) { return !had.contains(name); });
      if (more > most) best = &test, best_names = &names, most = more;
    }
    if (best == nullptr) return chosen;
    chosen.push_back(*best);
    had.insert(best_names->begin(), best_names->end());
  }
}

int main_of() {
  using SetCallback = void (*)(void (*)(const char*));
  void* fake = dlopen("libcuda.so.1", RTLD_NOW);
  const auto set =
      fake ? reinterpret_cast<SetCallback>(dlsym(fake, "fake_cuda_on_launch")) : nullptr;
  if (set == nullptr) {
    fmt::print(stderr, "LD_LIBRARY_PATH has no fake libcuda.so.1\n");
    return 2;
  }
  set(on_launch);
  const char* text = std::getenv("FAKE_CUDA_ARCH");
  const int arch = text ? std::atoi(text) : 90;
  Names missed;
  for (const cuda::KernelSource& kernel : all_kernels(arch)) {
    names_by_source[kernel.source] = kernel.name;
    if (arch == 90 && !is_exempt(kernel.name)) missed.insert(kernel.name);
  }
  std::vector<std::pair<std::string, Names>> cases;
  for (const CaseLists& lists : all_case_lists()) {
    for (const Case& test : lists.cases()) {
      for (const DType dtype : test.dtypes) {
        const auto take = [&](std::string_view suite, const std::string& variant) {
          launched.clear();
          run(test, dtype, 1, variant);
          for (const std::string& name : launched) missed.erase(name);
          cases.emplace_back(test_name(test, dtype, suite), launched);
        };
        take("cuda", {});
        const std::string other = testing::other_variant(test, dtype);
        if (!other.empty()) take("other_cuda", other);
      }
    }
  }
  for (const std::string& name : cover(cases)) fmt::print("{}\n", name);
  for (const std::string& name : missed) fmt::print(stderr, "no case launches {}\n", name);
  if (!unlisted.empty()) fmt::print(stderr, "not in the list of kernels:\n{}", unlisted);
  return missed.empty() && unlisted.empty() ? 0 : 1;
}

}  // namespace
}  // namespace pullback::driver

int main() {
  try {
    return pullback::driver::main_of();
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
