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
#include <regex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "driver/case.hpp"
#include "driver/check.hpp"
#include "driver/kernel_list.hpp"
#include "pullback/error.hpp"
#include "support/other_variants.hpp"

namespace pullback::driver {
namespace {

using Kernels = std::set<std::size_t>;  // by their places in the list

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

std::unordered_map<std::string, std::size_t> listed;  // by source
Kernels launched;                                     // since it was cleared
std::string unlisted;                                 // the first source that is not in the list

void on_launch(const char* source) {
  const auto found = listed.find(source);
  if (found != listed.end()) {
    launched.insert(found->second);
  } else if (unlisted.empty()) {
    unlisted = source;
  }
}

// As check_case() does: as it is, and with other strides.
void run(const Case& test, DType dtype, std::uint64_t seed, const std::string& variant) {
  Random random = Random::filling_nothing(seed);
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
std::vector<std::string> cover(std::vector<std::pair<std::string, Kernels>> cases) {
  std::vector<std::string> chosen;
  while (true) {
    const auto best =
        std::ranges::max_element(cases, {}, [](const auto& test) { return test.second.size(); });
    if (best == cases.end() || best->second.empty()) return chosen;
    chosen.push_back(best->first);
    const Kernels had = std::move(best->second);
    for (auto& [test, kernels] : cases) {
      std::erase_if(kernels, [&](std::size_t kernel) { return had.contains(kernel); });
    }
    std::erase_if(cases, [](const auto& test) { return test.second.empty(); });
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
  const std::vector<cuda::KernelSource> kernels = all_kernels(arch);
  Kernels missed;
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    listed[kernels[i].source] = i;
    if (arch == 90 && !is_exempt(kernels[i].name)) missed.insert(i);
  }
  std::vector<std::pair<std::string, Kernels>> cases;
  for (const CaseLists& lists : all_case_lists()) {
    for (const Case& test : lists.cases()) {
      for (const DType dtype : test.dtypes) {
        const auto take = [&](std::string_view suite, const std::string& variant) {
          launched.clear();
          run(test, dtype, 1, variant);
          for (const std::size_t kernel : launched) missed.erase(kernel);
          cases.emplace_back(test_name(test, dtype, suite), launched);
        };
        take("cuda", {});
        const std::string other = testing::other_variant(test, dtype);
        if (!other.empty()) take("other_cuda", other);
      }
    }
  }
  for (const std::string& name : cover(std::move(cases))) fmt::print("{}\n", name);
  for (const std::size_t kernel : missed) {
    fmt::print(stderr, "no case launches {}\n", kernels[kernel].name);
  }
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
