#include "driver/comparison.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <mutex>
#include <span>

#include "driver/case.hpp"

namespace pullback::driver {
namespace {

// body(position, value) for all elements.
template <class Body>
void for_values(const HostTensor& tensor, const Body& body) {
  std::array<double, kStretch> buffer;
  for (std::int64_t first = 0; first < tensor.numel(); first += kStretch) {
    const auto count = static_cast<std::size_t>(std::min(kStretch, tensor.numel() - first));
    tensor.load(first, std::span(buffer).first(count));
    for (std::size_t i = 0; i < count; ++i) body(first + static_cast<std::int64_t>(i), buffer[i]);
  }
}

bool same_special(double a, double b) { return (std::isnan(a) && std::isnan(b)) || a == b; }

}  // namespace

double epsilon_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 0x1p-52;
    case DType::f32:
      return 0x1p-23;
    case DType::bf16:
      return 0x1p-7;
    case DType::f16:
      return 0x1p-10;
    default:
      return 0;
  }
}

double largest_finite(const HostTensor& tensor) {
  double largest = 0;
  for_values(tensor, [&](std::int64_t, double value) {
    if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
  });
  return largest;
}

std::string special_mismatch(const HostTensor& got, const HostTensor& expected) {
  std::string first;
  for_values(expected, [&](std::int64_t i, double want) {
    if (std::isfinite(want) || !first.empty() || same_special(got.get(i), want)) return;
    first = fmt::format("element {}: expected {}, got {}", i, want, got.get(i));
  });
  return first;
}

// Where plain arithmetic of the dtype overflows, although the reference does not, a result may,
// too: but a number has to be right.
std::string overflow_mismatch(const HostTensor& got, const HostTensor& expected,
                              const HostTensor& textbook, double allowed) {
  std::string first;
  const double most = -lowest_finite(got.spec().dtype);
  for_values(textbook, [&](std::int64_t i, double plain) {
    if (std::isfinite(plain) || !first.empty()) return;
    const double want = expected.get(i), value = got.get(i);
    if (!(std::abs(want) <= most)) return;
    // There is no yardstick here: what nearly overflows has lost some digits.
    const double bound = allowed + 16 * epsilon_of(got.spec().dtype) * std::abs(want);
    if (!std::isfinite(value) || std::abs(value - want) <= bound) return;
    first = fmt::format("element {}: expected {} or, as plain arithmetic, {}, got {}", i, want,
                        plain, value);
  });
  return first;
}

std::string value_mismatch(const HostTensor& got, const HostTensor& expected) {
  for (std::int64_t i = 0; i < got.numel(); ++i) {
    if (!same_special(got.get(i), expected.get(i))) {
      return fmt::format("element {}: expected {}, got {}", i, expected.get(i), got.get(i));
    }
  }
  return {};
}

MeanErrors mean_errors(const HostTensor& got, const HostTensor& expected,
                       const HostTensor* finite) {
  std::mutex mutex;
  MeanErrors all;
  std::int64_t judged = 0;
  for_stretches(got.numel(), [&](std::int64_t first, std::int64_t count) {
    std::array<double, kStretch> values[3];
    const auto size = static_cast<std::size_t>(count);
    got.load(first, std::span(values[0]).first(size));
    expected.load(first, std::span(values[1]).first(size));
    if (finite != nullptr) finite->load(first, std::span(values[2]).first(size));
    MeanErrors here;
    std::int64_t own = 0;
    for (std::size_t i = 0; i < size; ++i) {
      const double want = values[1][i];
      if (!std::isfinite(want) || (finite != nullptr && !std::isfinite(values[2][i]))) continue;
      const double off = std::abs(values[0][i] - want);
      here.difference += std::isfinite(off) ? off : std::numeric_limits<double>::infinity();
      here.size += std::abs(want);
      ++own;
    }
    const std::lock_guard lock(mutex);
    all.difference += here.difference;
    all.size += here.size;
    judged += own;
  });
  if (judged > 0) {
    all.difference /= static_cast<double>(judged);
    all.size /= static_cast<double>(judged);
  }
  return all;
}

LargestErrors largest_errors(const HostTensor& got, const HostTensor& expected,
                             const HostTensor* finite, const Sizes& sizes) {
  std::mutex mutex;
  LargestErrors all;
  for_stretches(got.numel(), [&](std::int64_t first, std::int64_t count) {
    std::array<double, kStretch> values[3];
    const auto size = static_cast<std::size_t>(count);
    got.load(first, std::span(values[0]).first(size));
    expected.load(first, std::span(values[1]).first(size));
    if (finite != nullptr) finite->load(first, std::span(values[2]).first(size));
    LargestErrors here;
    for (std::size_t i = 0; i < size; ++i) {
      const double want = values[1][i];
      const double magnitude = std::abs(want);
      // NaN is of no size.
      if (!(magnitude > sizes.above && magnitude <= sizes.most)) continue;
      if (finite != nullptr && !std::isfinite(values[2][i])) continue;
      here.largest = std::max(here.largest, magnitude);
      const double off = std::abs(values[0][i] - want);
      here.difference = std::isfinite(off) ? std::max(here.difference, off)
                                           : std::numeric_limits<double>::infinity();
    }
    const std::lock_guard lock(mutex);
    all.difference = std::max(all.difference, here.difference);
    all.largest = std::max(all.largest, here.largest);
  });
  return all;
}

}  // namespace pullback::driver
