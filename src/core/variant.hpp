// Variants as data: each implementation of an op is one row that says what it needs and serves.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/cpu_info.hpp"
#include "pullback/device.hpp"
#include "pullback/plan.hpp"

namespace pullback {

// A set of an op's features, one bit each. Every op has an enum of them and a table of names.
using FeatureSet = std::uint64_t;

template <class... Feature>
constexpr FeatureSet features(Feature... feature) {
  return (FeatureSet{0} | ... | (FeatureSet{1} << static_cast<int>(feature)));
}

enum class Passes { both, forward, backward };

struct VariantInfo {
  std::string_view name;
  DeviceKind backend;
  CpuIsa isa;
  FeatureSet supports;
  // The highest one that can serve wins. Negative: only when asked for by name.
  int priority;
  int arch = 0;  // CUDA: the least compute capability, 90 for sm_90
  // Rows of one name may serve a pass each.
  Passes passes = Passes::both;
  bool arch_only = false;  // no newer architecture either
};

template <class Problem, class Tensors>
struct Variant {
  VariantInfo info;
  std::unique_ptr<PlanBody<Tensors>> (*make)(const Problem& problem, const Device& device,
                                             Pass pass);
};

struct Choice {
  std::size_t index;
  std::string why;  // for describe(): why this one, and what ruled the others out
};

// Throws Error(unsupported) listing needed, supported and missing features of every candidate, and
// Error(device) when the op has variants for CUDA devices and there is none.
Choice choose_variant(std::string_view op, std::span<const VariantInfo> variants, FeatureSet needs,
                      std::span<const std::string_view> feature_names, const Device& device,
                      Pass pass, std::string_view forced);

// Kernels that would serve a plan faster, but are not there and cannot be compiled: those that its
// thread names while one of these lives.
class MissedKernels {
 public:
  MissedKernels();
  ~MissedKernels();
  MissedKernels(const MissedKernels&) = delete;
  MissedKernels& operator=(const MissedKernels&) = delete;

  // Nothing where no plan is being made.
  static void add(const std::string& name);
  // For describe(): a line with the remedy, if there are any.
  std::string told() const;

 private:
  std::vector<std::string> names_;
};

// What run() does before any variant sees the pointers.
template <class Problem, class Tensors>
class CheckedBody final : public PlanBody<Tensors> {
 public:
  using UsesOf = TensorUses (*)(const Problem& problem, const Tensors& tensors, Pass pass);

  CheckedBody(std::string_view op, const Problem& problem, Pass pass, UsesOf uses_of,
              std::unique_ptr<PlanBody<Tensors>> variant)
      : op_(op), problem_(problem), pass_(pass), uses_of_(uses_of), variant_(std::move(variant)) {
    this->workspace_bytes = variant_->workspace_bytes;
  }

  void describe(std::string_view variant, const std::string& why) {
    this->description = op_ + (pass_ == Pass::forward ? " forward: " : " backward: ") +
                        std::string(variant) + "\n" + variant_->description + "\n" + why;
  }

  void run(Stream stream, const Tensors& tensors, Workspace workspace) const override {
    check_run(op_, uses_of_(problem_, tensors, pass_).all(), this->workspace_bytes, workspace);
    variant_->run(stream, tensors, workspace);
  }

 private:
  std::string op_;
  Problem problem_;
  Pass pass_;
  UsesOf uses_of_;
  std::unique_ptr<PlanBody<Tensors>> variant_;
};

// An op's make_plan(), once the problem is complete and checked.
template <class Problem, class Tensors>
Plan<Tensors> plan_with_variants(std::string_view op,
                                 std::span<const Variant<Problem, Tensors>> variants,
                                 FeatureSet needs, std::span<const std::string_view> feature_names,
                                 typename CheckedBody<Problem, Tensors>::UsesOf uses_of,
                                 const Device& device, const Problem& problem, Pass pass,
                                 const PlanOptions& options) {
  std::vector<VariantInfo> infos;
  for (const auto& variant : variants) infos.push_back(variant.info);
  const Choice choice =
      choose_variant(op, infos, needs, feature_names, device, pass, options.variant);
  const Variant<Problem, Tensors>& variant = variants[choice.index];
  return with_memory(op, [&] {
    MissedKernels missed;
    auto body = std::make_unique<CheckedBody<Problem, Tensors>>(
        op, problem, pass, uses_of, variant.make(problem, device, pass));
    body->describe(variant.info.name, choice.why + missed.told());
    return Plan<Tensors>(std::move(body));
  });
}

}  // namespace pullback
