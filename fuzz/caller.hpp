// A caller of the C ABI whose every choice comes from the fuzzer's bytes: mostly what would fit,
// now and then something hostile.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "pullback/pullback.h"

namespace pullback::fuzz {

// Tensors of at most this many elements are run; larger ones are planned only.
inline constexpr std::int64_t kMaxElements = 1 << 14;
inline constexpr std::int64_t kMaxElementsOfReference = 1 << 10;  // it takes some µs for each
inline constexpr std::int64_t kMaxWorkspace = 1 << 26;

[[noreturn]] inline void defect(const char* what) {
  std::fprintf(stderr, "%s: %s\n", what, pullback_last_error());
  std::abort();
}

// True on success.
inline bool succeeded(pullback_status status) {
  if (status == PULLBACK_OK) return true;
  if (*pullback_last_error() == '\0') defect("a failure without a message");
  if (status == PULLBACK_INTERNAL_ERROR) defect("an internal error");
  return false;
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

class Caller {
 public:
  explicit Caller(FuzzedDataProvider& bytes) : bytes_(bytes) {}

  std::int64_t size() {
    switch (bytes_.ConsumeIntegralInRange(0, 15)) {
      case 14:
        return 0;
      case 15:
        return bytes_.ConsumeIntegral<std::int64_t>();
      default:
        return bytes_.ConsumeIntegralInRange<std::int64_t>(1, 20);
    }
  }
  std::int64_t block_size() {
    return chance(10) ? size() : 16 * bytes_.ConsumeIntegralInRange(1, 2);
  }
  // One in `n`; false once the bytes are used up.
  bool chance(int n) { return bytes_.ConsumeIntegralInRange(1, n) == n; }
  double number() {
    if (chance(4)) return bytes_.ConsumeFloatingPoint<double>();
    return bytes_.ConsumeIntegralInRange(-8, 32) / 8.0;
  }
  std::int32_t choice(std::int32_t last) {
    return chance(50) ? bytes_.ConsumeIntegral<std::int32_t>()
                      : bytes_.ConsumeIntegralInRange<std::int32_t>(0, last);
  }
  std::uint32_t flags(std::uint32_t known) {
    return bytes_.ConsumeIntegral<std::uint32_t>() & (chance(50) ? ~0u : known);
  }

  // A tensor of the shape that fits, or now and then of one that does not.
  const DLTensor* tensor(std::vector<std::int64_t> shape, DLDataType type) {
    if (chance(40)) return nullptr;
    if (chance(30)) shape.push_back(size());
    if (chance(30) && !shape.empty()) shape.pop_back();
    if (chance(20) && !shape.empty()) shape[pick(shape.size())] = size();
    if (chance(30)) type = any_type();
    auto& described = *described_.emplace_back(std::make_unique<Described>());
    described.shape = shape;
    described.shape.resize(8);
    described.tensor.device = {kDLCPU, 0};
    described.tensor.ndim = static_cast<int>(shape.size());
    described.tensor.dtype = type;
    described.tensor.shape = described.shape.data();
    if (!chance(3)) return &described.tensor;
    described.strides = strides_of(shape);
    described.strides.resize(8);
    described.tensor.strides = described.strides.data();
    return &described.tensor;
  }
  // Left to the library more often than not.
  const DLTensor* output(const std::vector<std::int64_t>& shape, DLDataType type) {
    return chance(3) ? tensor(shape, type) : nullptr;
  }

  DLDataType floating() {
    constexpr DLDataType types[] = {
        {kDLFloat, 64, 1}, {kDLFloat, 32, 1}, {kDLFloat, 16, 1}, {kDLBfloat, 16, 1}};
    return types[pick(4)];
  }
  DLDataType index() { return {kDLInt, static_cast<std::uint8_t>(chance(2) ? 32 : 64), 1}; }
  static DLDataType statistics(DLDataType of) {
    return {kDLFloat, static_cast<std::uint8_t>(of.bits == 64 ? 64 : 32), 1};
  }
  std::size_t pick(std::size_t count) {
    return bytes_.ConsumeIntegralInRange<std::size_t>(0, count - 1);
  }

  pullback_plan_options options() {
    pullback_plan_options options = PULLBACK_PLAN_OPTIONS_INIT;
    options.threads = chance(20) ? bytes_.ConsumeIntegral<std::int32_t>()
                                 : bytes_.ConsumeIntegralInRange<std::int32_t>(1, 2);
    if (chance(4)) {
      options.variant = chance(2) ? "reference" : "textbook";
      max_elements_ = kMaxElementsOfReference;
    }
    return options;
  }

  // Memory for the tensor of that name; null when it is absent, too large to run, or left out.
  void* memory(const pullback_plan* plan, const char* name) {
    DLTensor layout{};
    if (!succeeded(pullback_plan_tensor(plan, name, &layout))) defect("plan_tensor");
    if (layout.ndim < 0 || chance(10)) return nullptr;
    std::int64_t low = 0, high = 0;
    for (int dim = 0; dim < layout.ndim; ++dim) {
      if (layout.shape[dim] == 0) {
        low = 0;
        high = -1;
        break;
      }
      // The plan was made, so that none of this overflows.
      (layout.strides[dim] > 0 ? high : low) += layout.strides[dim] * (layout.shape[dim] - 1);
    }
    if (high - low > max_elements_) {
      too_large_ = true;
      return nullptr;
    }
    const std::int64_t element = layout.dtype.bits / 8;
    const auto size = static_cast<std::size_t>((high - low + 1) * element);
    memory_.emplace_back(std::malloc(size));
    char* data = static_cast<char*>(memory_.back().get());
    fill(data, size, layout.dtype);
    return data - low * element;
  }

  template <class Run, class Tensors>
  void run(Run run_op, const pullback_plan* plan, const Tensors& tensors) {
    std::size_t needed = 0;
    const char* text = nullptr;
    if (!succeeded(pullback_plan_workspace_bytes(plan, &needed)) ||
        !succeeded(pullback_plan_describe(plan, &text)) || *text == '\0') {
      defect("queries");
    }
    if (too_large_ || needed > kMaxWorkspace) return;
    void* workspace = nullptr;
    if (::posix_memalign(&workspace, PULLBACK_WORKSPACE_ALIGNMENT, needed) != 0) return;
    const std::unique_ptr<void, Free> owned(workspace);
    std::memset(workspace, 0xff, needed);
    const bool first = succeeded(run_op(plan, nullptr, &tensors, workspace, needed));
    if (needed > 0 && first &&
        run_op(plan, nullptr, &tensors, workspace, needed - 1) != PULLBACK_WORKSPACE_TOO_SMALL) {
      defect("a workspace that is too small was accepted");
    }
  }

 private:
  struct Described {
    DLTensor tensor{};
    std::vector<std::int64_t> shape, strides;
  };

  DLDataType any_type() {
    constexpr DLDataType types[] = {{kDLFloat, 64, 1},  {kDLFloat, 32, 1}, {kDLFloat, 16, 1},
                                    {kDLBfloat, 16, 1}, {kDLInt, 32, 1},   {kDLInt, 64, 1},
                                    {kDLUInt, 8, 1},    {6, 8, 1},         {kDLComplex, 64, 1}};
    return types[pick(std::size(types))];
  }

  std::vector<std::int64_t> strides_of(const std::vector<std::int64_t>& shape) {
    std::vector<std::int64_t> strides(shape.size());
    const int kind = bytes_.ConsumeIntegralInRange(0, 3);
    std::uint64_t next = 1;
    for (std::size_t dim = shape.size(); dim-- > 0;) {
      strides[dim] = static_cast<std::int64_t>(next);
      next *= static_cast<std::uint64_t>(shape[dim] > 0 ? shape[dim] : 1);
      next += kind == 1;  // gaps
      if (kind == 2 && chance(2)) strides[dim] = static_cast<std::int64_t>(0 - next);
      if (kind == 3) strides[dim] = chance(8) ? size() : bytes_.ConsumeIntegralInRange(-3, 9);
    }
    return strides;
  }

  void fill(char* data, std::size_t size, DLDataType type) {
    if (type.code == kDLInt && type.bits == 64) {
      for (std::size_t i = 0; i < size; i += 8) put(data + i, index_value());
    } else if (type.code == kDLInt) {
      for (std::size_t i = 0; i < size; i += 4) {
        put(data + i, static_cast<std::int32_t>(index_value()));
      }
    } else {
      // A short pattern of any bits, repeated: NaN, infinity, subnormal and ordinary numbers.
      const std::string pattern = bytes_.ConsumeBytesAsString(1 + pick(24));
      for (std::size_t i = 0; i < size; ++i) {
        data[i] = pattern.empty() ? '\x3c' : pattern[i % pattern.size()];
      }
    }
  }
  std::int64_t index_value() {
    if (chance(12)) return bytes_.ConsumeIntegral<std::int64_t>();
    last_index_ += bytes_.ConsumeIntegralInRange(0, 3) - (chance(9) ? 5 : 0);
    return last_index_;
  }
  template <class T>
  static void put(char* to, T value) {
    std::memcpy(to, &value, sizeof(value));
  }

  FuzzedDataProvider& bytes_;
  std::vector<std::unique_ptr<Described>> described_;
  std::vector<std::unique_ptr<void, Free>> memory_;
  std::int64_t last_index_ = 0;
  bool too_large_ = false;
  std::int64_t max_elements_ = kMaxElements;
};

}  // namespace pullback::fuzz
