#include "core/variant.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstdlib>

#include "core/check.hpp"
#include "core/cpu_info.hpp"
#include "cuda/driver.hpp"

namespace pullback {
namespace {

std::string text_of(FeatureSet set, std::span<const std::string_view> names) {
  std::string text;
  for (; set != 0; set &= set - 1) {
    const auto bit = static_cast<std::size_t>(std::countr_zero(set));
    text += (text.empty() ? "" : ", ") + std::string(names[bit]);
  }
  return text.empty() ? "nothing" : text;
}

std::string_view name_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::any:
      return "any CPU";
    case CpuIsa::avx512_bf16:
      return "AVX-512 BF16";
    case CpuIsa::amx_bf16:
      return "AMX BF16";
  }
  return "?";
}

bool serves(const VariantInfo& variant, Pass pass) {
  if (variant.passes == Passes::both) return true;
  return (variant.passes == Passes::forward) == (pass == Pass::forward);
}

// Empty when the variant can serve; else the reason why not.
std::string refusal(const VariantInfo& variant, FeatureSet needs,
                    std::span<const std::string_view> names, const Device& device) {
  if (variant.backend != device.kind) return "runs on another kind of device";
  if (device.kind == DeviceKind::cuda) {
    const int arch = cuda::device_info(device.index).arch();
    if (arch < variant.arch) {
      return fmt::format("needs sm_{} or newer, the device is sm_{}", variant.arch, arch);
    }
    if (variant.arch_only && arch != variant.arch) {
      return fmt::format("needs sm_{}, the device is sm_{}", variant.arch, arch);
    }
  }
  if (!cpu_has(variant.isa)) return fmt::format("needs {}", name_of(variant.isa));
  const FeatureSet missing = needs & ~variant.supports;
  if (missing == 0) return {};
  return fmt::format("needed: {}; supported: {}; missing: {}", text_of(needs, names),
                     text_of(variant.supports, names), text_of(missing, names));
}

thread_local MissedKernels* missed_kernels = nullptr;

}  // namespace

MissedKernels::MissedKernels() { missed_kernels = this; }
MissedKernels::~MissedKernels() { missed_kernels = nullptr; }

void MissedKernels::add(const std::string& name) {
  if (missed_kernels == nullptr) return;
  std::vector<std::string>& names = missed_kernels->names_;
  if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
}

std::string MissedKernels::told() const {
  if (names_.empty()) return {};
  return fmt::format(
      "\nslower than it might be: there is no compiler for {}, which would serve better; NVRTC is "
      "one (pip install nvidia-cuda-nvrtc)",
      fmt::join(names_, ", "));
}

Choice choose_variant(std::string_view op, std::span<const VariantInfo> variants, FeatureSet needs,
                      std::span<const std::string_view> feature_names, const Device& device,
                      Pass pass, std::string_view forced) {
  check_device(op, device);
  const char* from_environment = std::getenv("PULLBACK_FORCE_VARIANT");
  std::string_view remedy;
  if (forced.empty() && from_environment && *from_environment) {
    forced = from_environment;
    remedy = "unset PULLBACK_FORCE_VARIANT";
  }

  std::size_t best = variants.size();
  std::string report;
  std::string known;
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const VariantInfo& variant = variants[i];
    if (!serves(variant, pass)) continue;
    known += (known.empty() ? "" : ", ") + std::string(variant.name);
    if (!forced.empty() && variant.name != forced) continue;
    if (forced.empty() && variant.priority < 0) continue;
    const std::string reason = refusal(variant, needs, feature_names, device);
    if (!reason.empty()) {
      report += fmt::format("\n  {}: {}", variant.name, reason);
    } else if (best == variants.size() || variant.priority > variants[best].priority) {
      best = i;
    }
  }
  if (best < variants.size()) {
    std::string why = forced.empty() ? "chosen: the first in priority that serves the problem"
                                     : "chosen: asked for by name";
    if (!report.empty()) why += "; ruled out:" + report;
    return {best, why};
  }
  if (!forced.empty() && report.empty()) {
    fail(ErrorCode::invalid_argument, op, "variant", known, forced, remedy);
  }
  if (!remedy.empty()) report += fmt::format("\n  {}", remedy);
  throw Error(ErrorCode::unsupported,
              fmt::format("{}: no variant for {} serves this problem{}", op,
                          device.kind == DeviceKind::cpu ? "the CPU" : "CUDA devices", report));
}

}  // namespace pullback
