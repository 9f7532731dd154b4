// Floats of the device toolkit on a GPU, against the host.
#include <bit>
#include <cmath>
#include <limits>

#include "core/element.hpp"
#include "cuda/on_device.hpp"
#include "driver/random.hpp"

namespace pullback::cuda {
namespace {

std::vector<std::uint16_t> all_16_bit_patterns() {
  std::vector<std::uint16_t> bits(65536);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint16_t>(i);
  return bits;
}

template <class Host>
void expect_widened(const std::vector<float>& got) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    Host host;
    host.bits = static_cast<std::uint16_t>(i);
    const float want = static_cast<float>(host);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got[i])) << i;
    } else {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(got[i]), std::bit_cast<std::uint32_t>(want)) << i;
    }
  }
}

TEST_F(OnDeviceToolkit, widens_every_16_bit_value) {
  const auto bits = all_16_bit_patterns();
  const auto widen = [&](const std::string& type) {
    return run<float>("widen_" + type, "device/float.cuh",
                      kIndex + ("static_cast<float*>(b.to)[i] = to_real(static_cast<const " + type +
                                "*>(b.from)[i]);"),
                      bits, bits.size(), 256, 256);
  };
  expect_widened<bfloat16>(widen("bf16"));
  expect_widened<float16>(widen("f16"));
}

// Around every 16-bit value: the value, half a step above it, and a little more and less than that.
TEST_F(OnDeviceToolkit, rounds_to_the_nearest_even) {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 65536; high += 3) {
    for (const std::uint32_t low : {0u, 0x7fffu, 0x8000u, 0x8001u, 0x0fffu, 0x1000u, 0x1001u}) {
      values.push_back(std::bit_cast<float>(high << 16 | low));
    }
  }
  const auto narrow = [&](const std::string& type) {
    return run<std::uint16_t>(
        "narrow_" + type, "device/float.cuh",
        kIndex + ("if (i < b.count) static_cast<" + type + "*>(b.to)[i] = from_real<" + type +
                  ">(static_cast<const float*>(b.from)[i]);"),
        values, values.size(), static_cast<unsigned>(values.size() / 256 + 1), 256);
  };
  const auto bf16 = narrow("bf16"), f16 = narrow("f16");
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) continue;
    EXPECT_EQ(bf16[i], bfloat16(values[i]).bits) << values[i];
    EXPECT_EQ(f16[i], float16(values[i]).bits) << values[i];
  }
}

// Pairs of 16-bit floats: every value beside a random one.
struct Pair {
  std::uint32_t a, b;
};
std::vector<Pair> pairs() {
  driver::Random random(3);
  std::vector<Pair> all;
  for (const std::uint16_t bits : all_16_bit_patterns()) {
    const std::uint64_t others = random.bits();
    all.push_back({bits | static_cast<std::uint32_t>(others) << 16,
                   static_cast<std::uint32_t>(others >> 16)});
  }
  return all;
}

template <class Host>
float half_of(std::uint32_t pair, int half) {
  Host host;
  host.bits = static_cast<std::uint16_t>(pair >> (16 * half));
  return static_cast<float>(host);
}

class DeviceFloats : public OnDeviceToolkit {
 protected:
  static std::vector<std::uint32_t> of_pairs(const std::string& name, const std::string& result,
                                             const std::vector<Pair>& from) {
    return run<std::uint32_t>(
        name, "device/packed.cuh",
        kIndex + ("const uint32_t* x = static_cast<const uint32_t*>(b.from) + 2 * i;\n"
                  "static_cast<uint32_t*>(b.to)[i] = " +
                  result + ";"),
        from, from.size(), 256, 256);
  }

  template <class Host>
  static void expect_packed_maxima(const std::string& type) {
    const std::vector<Pair> from = pairs();
    const auto maxima = [&](const std::string& name) {
      return of_pairs(type + "_" + name, "Packed<" + type + ">::" + name + "(x[0], x[1])", from);
    };
    const auto with_nan = maxima("max_or_nan"), of_numbers = maxima("max");
    for (std::size_t i = 0; i < from.size(); ++i) {
      for (int half = 0; half < 2; ++half) {
        const float a = half_of<Host>(from[i].a, half), b = half_of<Host>(from[i].b, half);
        const float first = half_of<Host>(with_nan[i], half);
        const float second = half_of<Host>(of_numbers[i], half);
        // fmax() of a signalling NaN is NaN.
        const float larger = std::isnan(a) ? b : std::isnan(b) ? a : std::fmax(a, b);
        EXPECT_TRUE(std::isnan(a) || std::isnan(b) ? std::isnan(first) : first == larger)
            << a << ", " << b << ": " << first;
        EXPECT_TRUE(std::isnan(larger) ? std::isnan(second) : second == larger)
            << a << ", " << b << ": " << second;
      }
    }
  }

  // As integers halves are in the order of the floats, equal where these are, NaN above all; and
  // back they are the same floats.
  template <class Host>
  static void expect_integers_in_order(const std::string& type) {
    std::vector<Pair> from = pairs();
    for (Pair& pair : from) pair.a = (pair.b << 16 & 0xffff0000u) | (pair.a & 0xffffu);
    const auto ordered = [&](const std::string& of) {
      return "reordered(Packed<" + type + ">::canonical(" + of + "))";
    };
    const auto integers = of_pairs(type + "_integers", ordered("x[0]"), from);
    const auto floats = of_pairs(type + "_floats", "reordered(" + ordered("x[0]") + ")", from);
    for (std::size_t i = 0; i < from.size(); ++i) {
      const float low = half_of<Host>(from[i].a, 0), high = half_of<Host>(from[i].a, 1);
      const auto low_order = static_cast<std::int16_t>(integers[i] & 0xffff);
      const auto high_order = static_cast<std::int16_t>(integers[i] >> 16);
      const bool below = std::isnan(high) ? !std::isnan(low) : low < high;
      const bool above = std::isnan(low) ? !std::isnan(high) : low > high;
      EXPECT_EQ(low_order < high_order, below) << low << ", " << high;
      EXPECT_EQ(low_order > high_order, above) << low << ", " << high;
      for (int half = 0; half < 2; ++half) {
        const float was = half_of<Host>(from[i].a, half), is = half_of<Host>(floats[i], half);
        EXPECT_TRUE(std::isnan(was) ? std::isnan(is) : was == is) << was << ", " << is;
      }
    }
  }

  // The result for each number, of a function of one or of two neighbouring ones.
  static std::vector<float> of_numbers(const std::string& function, const std::vector<float>& from,
                                       bool of_two = false) {
    return run<float>(function, "device/float.cuh",
                      kIndex + ("const float* x = static_cast<const float*>(b.from) + i;\n"
                                "if (i + 1 < b.count) static_cast<float*>(b.to)[i] = " +
                                function + (of_two ? "(x[0], x[1]);" : "(x[0]);")),
                      from, from.size(), static_cast<unsigned>(from.size() / 256 + 1), 256);
  }
};

TEST_F(DeviceFloats, larger_of_packed_halves) {
  expect_packed_maxima<bfloat16>("bf16");
  expect_packed_maxima<float16>("f16");
}

TEST_F(DeviceFloats, packed_halves_as_integers_in_order) {
  expect_integers_in_order<bfloat16>("bf16");
  expect_integers_in_order<float16>("f16");
}

TEST_F(DeviceFloats, packed_halves_come_apart) {
  const std::vector<Pair> from = pairs();
  for (const std::string type : {"bf16", "f16"}) {
    for (const std::string half : {"low", "high"}) {
      const auto got =
          of_pairs(type + "_" + half,
                   "[&] { float low, high; Packed<" + type +
                       ">::unpack(x[0], low, high); return __float_as_uint(" + half + "); }()",
                   from);
      for (std::size_t i = 0; i < from.size(); ++i) {
        const int place = half == "high";
        const float want = type == "bf16" ? half_of<bfloat16>(from[i].a, place)
                                          : half_of<float16>(from[i].a, place);
        const auto value = std::bit_cast<float>(got[i]);
        EXPECT_TRUE(std::isnan(want) ? std::isnan(value) : value == want) << value << ", " << want;
      }
    }
  }
}

TEST_F(DeviceFloats, approximations) {
  driver::Random random(4);
  std::vector<float> from;
  for (int i = 0; i < 100000; ++i) {
    from.push_back(std::ldexp(static_cast<float>(1 + random.uniform()),
                              static_cast<int>(random.integer(-100, 100))));
  }
  const auto roots = of_numbers("sqrt_approx", from);
  const auto inverses = of_numbers("reciprocal_approx", from);
  const auto logarithms = of_numbers("log2_approx", from);
  const auto powers = of_numbers("exp2_approx", logarithms);
  for (std::size_t i = 0; i + 2 < from.size(); ++i) {
    const double x = from[i];
    EXPECT_NEAR(roots[i] / std::sqrt(x), 1, 2e-7) << x;
    EXPECT_NEAR(inverses[i] * x, 1, 2e-7) << x;
    // What PTX promises of lg2.approx.
    const double tolerance = std::ldexp(1, -22) * std::fmax(1, std::fabs(std::log2(x)));
    EXPECT_NEAR(logarithms[i], std::log2(x), tolerance) << x;
    EXPECT_NEAR(powers[i] / std::exp2(double{logarithms[i]}), 1, 3e-7) << x;
  }
}

TEST_F(DeviceFloats, a_NaN_beats_everything) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> from = {1, kNan, kInfinity, kNan, -kInfinity, 2,
                                   3, -3,   kNan,      kNan, 0,          0};
  const auto got = of_numbers("max_or_nan", from, true);
  for (std::size_t i = 0; i + 1 < from.size(); ++i) {
    const bool none = std::isnan(from[i]) || std::isnan(from[i + 1]);
    EXPECT_TRUE(none ? std::isnan(got[i]) : got[i] == std::fmax(from[i], from[i + 1])) << i;
  }
}

}  // namespace
}  // namespace pullback::cuda
