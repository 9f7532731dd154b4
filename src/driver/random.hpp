// The random numbers of tests and benchmarks: the same on every machine for the same seed.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace pullback::driver {

// SplitMix64 (Steele, Lea, Flood 2014): tiny, and good enough for test data.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  // Large tensors made with it are left as they are: for devices that compute nothing.
  static Random filling_nothing(std::uint64_t seed) {
    Random random(seed);
    random.fills_nothing_ = true;
    return random;
  }
  bool fills_nothing() const { return fills_nothing_; }

  std::uint64_t bits() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // As if bits() had been called `count` times: where another thread goes on.
  void skip(std::int64_t count) {
    state_ += 0x9e3779b97f4a7c15u * static_cast<std::uint64_t>(count);
  }
  // Uniform in [low, high], both included.
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool chance(double probability) { return uniform() < probability; }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  static constexpr std::int64_t kBitsOfNormal = 2;  // calls of bits()
  double normal() {
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }

 private:
  std::uint64_t state_;
  bool fills_nothing_ = false;
};

}  // namespace pullback::driver
