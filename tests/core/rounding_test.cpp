// Floats to 16 bits by vectors, for every instruction set that this machine has.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/rounding_test.cpp"
#include <hwy/foreach_target.h>

#include "cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// `count` is a multiple of 16.
template <class T>
void Round(const float* from, T* to, std::size_t count) {
  const hn::CappedTag<float, 16> d;
  for (std::size_t i = 0; i < count; i += hn::Lanes(d)) Store(d, hn::LoadU(d, from + i), to + i);
}
void RoundToBf16(const float* from, bfloat16* to, std::size_t count) { Round(from, to, count); }
void RoundToF16(const float* from, float16* to, std::size_t count) { Round(from, to, count); }

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <bit>
#include <vector>

namespace pullback {
HWY_EXPORT(RoundToBf16);
HWY_EXPORT(RoundToF16);

namespace {

// Numbers of every sign and exponent: the bits of the significand at the ends of the range and on
// both sides of what is rounded either way; and some of all the others. Neighbours in memory have
// the same exponent, so that some vectors hold subnormal numbers or NaN and others none.
std::vector<float> all_kinds() {
  std::vector<std::uint32_t> significands;
  for (const std::uint32_t cut : {13u, 16u}) {
    const std::uint32_t half = 1u << (cut - 1);
    for (const std::uint32_t base : {0u, 1u << cut, 3u << cut, 0x7fffffu & ~((1u << cut) - 1)}) {
      for (const std::uint32_t rest : {0u, 1u, half - 1, half, half + 1, 2 * half - 1}) {
        significands.push_back(base + rest);
      }
    }
  }
  for (std::uint32_t i = 0; i < 0x800000u; i += 99991u) significands.push_back(i);
  while (significands.size() % 16 != 0) significands.push_back(0x400000u);
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 512; ++high) {
    for (const std::uint32_t low : significands) {
      values.push_back(std::bit_cast<float>(high << 23 | low));
    }
  }
  return values;
}

template <class T, class Round>
void expect_rounded(const Round& round) {
  const std::vector<float> values = all_kinds();
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    std::vector<T> results(values.size());
    round(values.data(), results.data(), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (values[i] != values[i]) {
        ASSERT_NE(static_cast<float>(results[i]), static_cast<float>(results[i])) << values[i];
      } else {
        ASSERT_EQ(results[i].bits, T(values[i]).bits) << values[i];
      }
    }
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

TEST(rounding, vectors_of_bf16_are_rounded_as_single_ones) {
  expect_rounded<bfloat16>([](auto... a) { HWY_DYNAMIC_DISPATCH(RoundToBf16)(a...); });
}
TEST(rounding, vectors_of_f16_are_rounded_as_single_ones) {
  expect_rounded<float16>([](auto... a) { HWY_DYNAMIC_DISPATCH(RoundToF16)(a...); });
}

}  // namespace
}  // namespace pullback
#endif
