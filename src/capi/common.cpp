#include "capi/common.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <new>
#include <span>

#include "core/check.hpp"
#include "core/cpu_info.hpp"
#include "core/log.hpp"
#include "cuda/report.hpp"

namespace pullback::capi {
namespace {

// Codes that DLPack 0.6 does not name yet.
constexpr int kBool = 6;

struct DTypeCode {
  DType dtype;
  int code, bits;
};
constexpr DTypeCode kDTypeCodes[] = {
    {DType::f64, kDLFloat, 64}, {DType::f32, kDLFloat, 32}, {DType::bf16, kDLBfloat, 16},
    {DType::f16, kDLFloat, 16}, {DType::i64, kDLInt, 64},   {DType::i32, kDLInt, 32},
    {DType::u8, kDLUInt, 8},    {DType::boolean, kBool, 8},
};

// The caller's enum may hold any bits; an int may be read whatever they are.
int type_of(const DLDevice& device) {
  static_assert(sizeof(device.device_type) == sizeof(int));
  int type = 0;
  std::memcpy(&type, &device.device_type, sizeof(type));
  return type;
}

// Whether the plan's device reads the memory of the other one as its own.
bool reaches(const DLDevice& plan, const DLDevice& memory) {
  const int type = type_of(memory);
  if (type_of(plan) == kDLCPU) return type == kDLCPU || type == kDLCUDAHost;
  return (type == kDLCUDA && memory.device_id == plan.device_id) || type == kDLCUDAManaged;
}

std::string text_of(const DLDevice& device) {
  switch (type_of(device)) {
    case kDLCPU:
      return "the CPU";
    case kDLCUDA:
      return fmt::format("CUDA device {}", device.device_id);
    default:
      return fmt::format("device type {}", type_of(device));
  }
}

thread_local std::string last_message;

pullback_status keep(ErrorCode code, const char* message) noexcept {
  try {
    last_message = message;
  } catch (...) {
    last_message.clear();
  }
  return static_cast<pullback_status>(code);
}

}  // namespace

pullback_status current_failure() noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return keep(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return keep(ErrorCode::device, "out of memory");
  } catch (const std::exception& error) {
    return keep(ErrorCode::internal, error.what());
  } catch (...) {
    return keep(ErrorCode::internal, "an exception of unknown type");
  }
}

// These three are on the way of every run: without texts unless they fail.
void check_not_null(std::string_view op, std::string_view argument, const void* pointer) {
  if (pointer == nullptr) {
    fail(ErrorCode::invalid_argument, op, argument, "a pointer", "NULL");
  }
}

void check_plan_of(std::string_view op, const pullback_plan* plan) {
  check_not_null(op, "plan", plan);
  if (plan->op != op) {
    fail(ErrorCode::invalid_argument, op, "plan", fmt::format("a plan of {}", op),
         fmt::format("a plan of {}", plan->op));
  }
}

void overlay_struct(std::string_view op, std::string_view argument, const void* given,
                    std::size_t size, void* ours, std::size_t known) {
  // No version will be this much larger; a size beyond it was never set, and is not to be read.
  constexpr std::size_t kPlausibleGrowth = 4096;
  if (size < sizeof(size) || size % sizeof(size) != 0 || size > known + kPlausibleGrowth) {
    fail(ErrorCode::invalid_argument, op, fmt::format("{}: struct_size", argument),
         "the sizeof of the struct", fmt::format("{}", size),
         "initialise the struct with its _INIT macro");
  }
  if (size > known) {
    const std::span tail(static_cast<const std::byte*>(given) + known, size - known);
    const auto set = std::ranges::find_if(tail, [](std::byte b) { return b != std::byte{0}; });
    if (set != tail.end()) {
      fail(ErrorCode::unsupported, op, argument,
           fmt::format("zeros beyond byte {}, all that this version knows", known),
           fmt::format("a field set at byte {} of {}", known + (set - tail.begin()), size),
           "use the library that the header came with, or a newer one");
    }
  }
  std::memcpy(ours, given, std::min(size, known));
}

TensorSpec spec_of(std::string_view op, std::string_view name, const DLTensor* tensor,
                   const DLDevice& device) {
  if (tensor == nullptr) return {};
  const Checker check(op);
  check.that(tensor->ndim >= 0 && tensor->ndim <= kMaxRank, name,
             fmt::format("ndim from 0 to {}", kMaxRank), fmt::format("{}", tensor->ndim));
  const auto rank = static_cast<std::size_t>(tensor->ndim);
  check.that(rank == 0 || tensor->shape != nullptr, name, "a shape array", "NULL");
  check.that(reaches(device, tensor->device), name, "memory of " + text_of(device),
             text_of(tensor->device), "move the tensor, or plan for its device");

  const DLDataType type = tensor->dtype;
  const auto found = std::ranges::find_if(kDTypeCodes, [&](const DTypeCode& known) {
    return known.code == type.code && known.bits == type.bits && type.lanes == 1;
  });
  check.that(found != std::end(kDTypeCodes), name,
             "dtype f64, f32, bf16, f16, i64, i32, u8 or bool",
             fmt::format("code {}, {} bits, {} lanes", type.code, type.bits, type.lanes));

  TensorSpec spec = TensorSpec::contiguous(found->dtype, std::span(tensor->shape, rank));
  if (tensor->strides != nullptr) std::copy_n(tensor->strides, rank, spec.strides.begin());
  return spec;
}

PlanArguments read_plan_options(std::string_view op, const pullback_plan_options* options) {
  static constexpr pullback_plan_options defaults = PULLBACK_PLAN_OPTIONS_INIT;
  const auto given = options ? read_struct(op, "options", options, defaults) : defaults;
  check_flags(op, given.flags, 0);
  PlanArguments arguments{given.device, {}, {}};
  switch (type_of(given.device)) {
    case kDLCPU:
      arguments.device = Device::cpu(given.threads);
      break;
    case kDLCUDA:
      arguments.device = Device::cuda(given.device.device_id);
      break;
    default:
      fail(ErrorCode::invalid_argument, op, "options: device", "kDLCPU or kDLCUDA",
           text_of(given.device));
  }
  check_device(op, arguments.device);
  if (given.variant) arguments.options.variant = given.variant;
  return arguments;
}

int choice(std::string_view op, std::string_view option, std::int32_t value, int count) {
  Checker(op).that(value >= 0 && value < count, option, fmt::format("0 to {}", count - 1),
                   fmt::format("{}", value));
  return value;
}

void check_flags(std::string_view op, std::uint64_t flags, std::uint64_t known) {
  Checker(op).that((flags & ~known) == 0, "flags", fmt::format("bits of {:#x}", known),
                   fmt::format("{:#x}", flags));
}

}  // namespace pullback::capi

using namespace pullback::capi;

const char* pullback_last_error(void) { return last_message.c_str(); }

int32_t pullback_version(void) {
  return 10000 * PULLBACK_VERSION_MAJOR + 100 * PULLBACK_VERSION_MINOR + PULLBACK_VERSION_PATCH;
}

pullback_status pullback_describe_system(const char** text) {
  return guarded([&] {
    check_not_null("describe_system", "text", text);
    thread_local std::string report;
    report =
        fmt::format("{:<18}{}.{}.{}\n{:<18}{}, {} usable cores\n{}", "pullback",
                    PULLBACK_VERSION_MAJOR, PULLBACK_VERSION_MINOR, PULLBACK_VERSION_PATCH, "CPU",
                    pullback::cpu_name(), pullback::available_cpus(), pullback::cuda::report());
    *text = report.c_str();
  });
}

pullback_status pullback_set_log_callback(pullback_log_callback callback, void* user_data) {
  return guarded([&] {
    if (callback == nullptr) return pullback::set_log_sink({});
    pullback::set_log_sink([=](pullback::LogLevel level, const char* message) {
      callback(static_cast<std::int32_t>(level), message, user_data);
    });
  });
}

void pullback_plan_destroy(pullback_plan* plan) { delete plan; }

pullback_status pullback_plan_workspace_bytes(const pullback_plan* plan, size_t* bytes) {
  return guarded([&] {
    check_not_null("plan_workspace_bytes", "plan", plan);
    check_not_null("plan_workspace_bytes", "bytes", bytes);
    *bytes = plan->workspace_bytes();
  });
}

pullback_status pullback_plan_describe(const pullback_plan* plan, const char** text) {
  return guarded([&] {
    check_not_null("plan_describe", "plan", plan);
    check_not_null("plan_describe", "text", text);
    *text = plan->describe().c_str();
  });
}

pullback_status pullback_plan_tensor(const pullback_plan* plan, const char* name,
                                     DLTensor* tensor) {
  return guarded([&] {
    check_not_null("plan_tensor", "plan", plan);
    check_not_null("plan_tensor", "name", name);
    check_not_null("plan_tensor", "tensor", tensor);
    std::string known;
    for (const auto& [candidate, spec] : plan->tensors) {
      if (candidate != name) {
        known += (known.empty() ? "" : ", ") + std::string(candidate);
        continue;
      }
      const auto* type = std::ranges::find(kDTypeCodes, spec.dtype, &DTypeCode::dtype);
      tensor->data = nullptr;
      tensor->device = plan->device;
      tensor->ndim = spec.rank;
      tensor->dtype = {static_cast<std::uint8_t>(type->code), static_cast<std::uint8_t>(type->bits),
                       1};
      tensor->shape = const_cast<std::int64_t*>(spec.shape.data());
      tensor->strides = const_cast<std::int64_t*>(spec.strides.data());
      tensor->byte_offset = 0;
      return;
    }
    pullback::fail(pullback::ErrorCode::invalid_argument, plan->op, "tensor", known,
                   fmt::format("'{}'", name));
  });
}
