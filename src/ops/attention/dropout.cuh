// Which probabilities dropout keeps: a pure function of (seed, batch * H + head, query, key), so
// that any tile order, thread count and backend keep the same ones.
//
//   Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3")
//   key      seed bits 0-31, seed bits 32-63
//   counter  key position / 8, query position (low 32 bits of both), then bits 0-31 and bits 32-63
//            of batch * H + head
//   draws    eight of 16 bits from a call's four words: draw 2w is the low half of word w, draw
//            2w + 1 the high half; the key at position j has draw j % 8
//   kept     draw >= threshold, threshold = round(65536 p), at most 65535
//   scale    the kept are multiplied by 65536 / (65536 - threshold): exactly 1 / P(kept)
//
// Positions count within the sequence. Host and device compile this file.
#pragma once

#include "device/types.cuh"

namespace pullback::attention {

struct PhiloxWords {
  uint32_t word[4];
};

inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;
inline constexpr int kPhiloxRounds = 10;

inline constexpr PhiloxWords philox(uint32_t key0, uint32_t key1, PhiloxWords counter) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{kPhiloxMultiplier0} * counter.word[0];
    const uint64_t b = uint64_t{kPhiloxMultiplier1} * counter.word[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

struct Dropout {
  static constexpr int kKeysPerCall = 8;

  uint32_t threshold = 0;  // 0: everything is kept
  uint32_t seed_low = 0, seed_high = 0;
  // Not null: where kernels read the seed, so that a captured run draws anew at each replay. What
  // draws is with_seed(), or for_warp().
  const uint64_t* seed_at = nullptr;

  constexpr Dropout() = default;  // drops nothing
  constexpr Dropout(double probability, uint64_t seed)
      : threshold(threshold_of(probability)),
        seed_low(static_cast<uint32_t>(seed)),
        seed_high(static_cast<uint32_t>(seed >> 32)) {}

  static constexpr uint32_t threshold_of(double probability) {
    const auto rounded = static_cast<uint32_t>(probability * 65536 + 0.5);
    return rounded > 65535 ? 65535 : rounded;
  }

  constexpr bool active() const { return threshold != 0; }
  constexpr double scale() const { return 65536.0 / (65536.0 - threshold); }

  constexpr Dropout with_seed() const {
    Dropout own = *this;
    if (seed_at) {
      own.seed_low = static_cast<uint32_t>(*seed_at);
      own.seed_high = static_cast<uint32_t>(*seed_at >> 32);
    }
    return own;
  }
#ifdef __CUDACC_RTC__
  // The same in registers that a warp shares, for whole warps: the generator's keys then cost
  // threads as little as constants do, where each of their own would take an addition a round.
  Dropout for_warp() const {
    Dropout own = *this;
    if (seed_at) {
      const uint64_t seed = *seed_at;
      asm("redux.sync.or.b32 %0, %1, 0xffffffff;"
          : "=r"(own.seed_low)
          : "r"(static_cast<uint32_t>(seed)));
      asm("redux.sync.or.b32 %0, %1, 0xffffffff;"
          : "=r"(own.seed_high)
          : "r"(static_cast<uint32_t>(seed >> 32)));
    }
    return own;
  }
#endif

  // The draws of keys 8 * key_block … 8 * key_block + 7. `plane` is batch * H + head.
  constexpr PhiloxWords draws(uint64_t plane, uint32_t query, uint32_t key_block) const {
    return philox(
        seed_low, seed_high,
        {{key_block, query, static_cast<uint32_t>(plane), static_cast<uint32_t>(plane >> 32)}});
  }

  // `number` is key % 8. What lies below a draw decides nothing. Words are chosen rather than
  // indexed, or they would be in memory where the compiler does not know the number.
  constexpr bool keeps(const PhiloxWords& words, unsigned number) const {
    const uint32_t low = number < 2 ? words.word[0] : words.word[1];
    const uint32_t high = number < 6 ? words.word[2] : words.word[3];
    const uint32_t word = number < 4 ? low : high;
    return (number % 2 != 0 ? word : word << 16) >= threshold << 16;
  }

  constexpr bool keeps(uint64_t plane, int64_t query, int64_t key) const {
    return keeps(draws(plane, static_cast<uint32_t>(query), static_cast<uint32_t>(key / 8)),
                 static_cast<unsigned>(key % 8));
  }
};

}  // namespace pullback::attention
