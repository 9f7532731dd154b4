#include "core/element.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace pullback {
namespace {

TEST(Float16, every_value_survives_the_round_trip) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    float16 value;
    value.bits = static_cast<std::uint16_t>(bits);
    const float wide = static_cast<float>(value);
    if (std::isnan(wide)) continue;
    EXPECT_EQ(float16(wide).bits, value.bits);
  }
}

// Halfway points between neighbours go to the even one, points beside them to the nearer one.
TEST(Float16, rounds_to_nearest_even) {
  for (std::uint32_t bits = 0; bits < 0x7bff; ++bits) {
    float16 low, high;
    low.bits = static_cast<std::uint16_t>(bits);
    high.bits = static_cast<std::uint16_t>(bits + 1);
    const float middle = (static_cast<float>(low) + static_cast<float>(high)) / 2;
    EXPECT_EQ(float16(middle).bits, (bits & 1) ? high.bits : low.bits) << bits;
    EXPECT_EQ(float16(std::nextafter(middle, 0.0f)).bits, low.bits) << bits;
    EXPECT_EQ(float16(std::nextafter(middle, 1e9f)).bits, high.bits) << bits;
  }
  EXPECT_EQ(float16(65519.0f).bits, 0x7bff);
  EXPECT_EQ(float16(65520.0f).bits, 0x7c00);
}

TEST(BFloat16, rounds_to_nearest_even) {
  for (std::uint32_t bits = 0; bits < 0x7f7f; ++bits) {
    bfloat16 low, high;
    low.bits = static_cast<std::uint16_t>(bits);
    high.bits = static_cast<std::uint16_t>(bits + 1);
    const float middle = std::bit_cast<float>((bits << 16) | 0x8000u);
    EXPECT_EQ(bfloat16(middle).bits, (bits & 1) ? high.bits : low.bits) << bits;
    EXPECT_EQ(bfloat16(std::nextafter(middle, 0.0f)).bits, low.bits) << bits;
  }
}

TEST(Element, nan_stays_nan) {
  const float nans[] = {std::numeric_limits<float>::quiet_NaN(), std::bit_cast<float>(0x7f800001u),
                        std::bit_cast<float>(0xffffffffu)};
  for (float nan : nans) {
    EXPECT_TRUE(std::isnan(static_cast<float>(bfloat16(nan))));
    EXPECT_TRUE(std::isnan(static_cast<float>(float16(nan))));
  }
}

// 1 + 2^-11 + 2^-40 lies above the middle of two f16 values, but rounds to that middle in float.
TEST(Element, a_double_is_rounded_once) {
  EXPECT_EQ(from_double<float16>(1 + 0x1p-11 + 0x1p-40).bits, 0x3c01);
  EXPECT_EQ(from_double<float16>(1 + 0x1p-11).bits, 0x3c00);
  EXPECT_EQ(from_double<bfloat16>(1 + 0x1p-8 + 0x1p-40).bits, 0x3f81);
  EXPECT_EQ(from_double<bfloat16>(1 + 0x1p-8).bits, 0x3f80);
}

}  // namespace
}  // namespace pullback
