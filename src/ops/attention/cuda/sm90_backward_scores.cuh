// A warp's scores of the backward pass on Hopper, from products to weights and gradients.
//
// Of S^T and dP^T a warp has 16 keys and a thread [n][2 · half + c]: key lane / 4 + 8 · half and
// query 8 · n + lane % 4 · 2 + c.
#pragma once

#include "device/shared_tile.cuh"
#include "ops/attention/cuda/sm90_products.cuh"
#include "ops/attention/cuda/sm90_seen.cuh"
#include "ops/attention/cuda/smxx_backward_fragments.cuh"
#include "ops/attention/cuda/smxx_backward_scores.cuh"
#include "ops/attention/cuda/smxx_backward_tiles.cuh"

namespace pullback::attention {

// Of each half what the thread's row of scores sees of a tile (sm90_seen.cuh).
struct SeenColumns {
  uint32_t bits[2];

  bool covers(int n, int e) const { return has_column(bits[e / 2], n, e % 2); }
};

// Rows are keys: the warp's begin at `key`, the tile's queries at `query`.
struct SeenQueries : SeenColumns {
  SeenQueries(const TilePlace& place, int key, int query, int lane) {
    const int column = query + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = key + lane / 4 + 8 * half;
      const int first = own - place.highest, end = own - place.lowest + 1;
      const int last = own >= place.k_length ? first : end < place.q_length ? end : place.q_length;
      bits[half] = bits_of_columns(first - column, last - column);
    }
  }
};

// Rows are queries: the warp's begin at `query`, the tile's keys at `key`.
struct SeenKeys : SeenColumns {
  SeenKeys(const TilePlace& place, int query, int key, int lane) {
    const int column = key + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = query + lane / 4 + 8 * half;
      const int first = own + place.lowest, end = own + place.highest + 1;
      const int last = own >= place.q_length ? first : end < place.k_length ? end : place.k_length;
      bits[half] = bits_of_columns(first - column, last - column);
    }
  }
};

// Where the statistics of queries 8 · n + … are, which come in tiles of 64.
constexpr uint32_t stats_of(int n) {
  return static_cast<uint32_t>(n / 8 * stats_bytes(64) + n % 8 * 64);
}

// Whether the warp's keys see queries 8 · n … 8 · n + 7: bit 8 · (n / 2) of `squares`.
inline bool in_block(uint32_t squares, int n) { return (squares >> n / 2 * 8 & 1) != 0; }

// Each in place and, where it is called, in a branch without another side: with two sides the
// compiler lacks registers for the products that run meanwhile.
template <int kTiles>
void hide_unseen(float (&s)[kTiles][4], const SeenColumns& seen) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = seen.covers(n, e) ? s[n][e] : -infinity<float>();
  }
}
template <int kTiles>
void hide_blocks(float (&s)[kTiles][4], uint32_t squares) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = in_block(squares, n) ? s[n][e] : -infinity<float>();
  }
}
// Unseen chances become -0, which others are not. (Of a row whose lse is NaN they are not 0.)
template <bool kBlocks, int kTiles>
void mark_unseen(float (&s)[kTiles][4], const SeenColumns& seen, uint32_t squares) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool sees = seen.covers(n, e) && (!kBlocks || in_block(squares, n)) && s[n][e] != 0;
      s[n][e] = sees ? s[n][e] : -0.0f;
    }
  }
}
// Half of a word in the upper bits. The compiler would keep halves that it sees compared in
// registers of their own, in all steps.
inline uint32_t low_half(uint32_t word) {
  uint32_t half;
  asm volatile("shl.b32 %0, %1, 16;" : "=r"(half) : "r"(word));
  return half;
}
inline uint32_t high_half(uint32_t word) {
  uint32_t half;
  asm volatile("and.b32 %0, %1, 0xffff0000;" : "=r"(half) : "r"(word));
  return half;
}
// The same gradients become -0.
template <int kSteps>
void mark_unseen(uint32_t (&gradients)[kSteps][4], const uint32_t (&chances)[kSteps][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      uint32_t& word = gradients[step][e];
      constexpr uint32_t kUnseen = kUnseenBits << 16;
      if (low_half(chances[step][e]) == kUnseen) word = (word & ~0xffffu) | kUnseenBits;
      if (high_half(chances[step][e]) == kUnseen) word = (word & 0xffffu) | kUnseen;
    }
  }
}

// The same of gradients that are not packed.
template <int kTiles, int kSteps>
void mark_unseen(float (&s)[kTiles][4], const uint32_t (&chances)[kSteps][4]) {
  static_assert(kTiles == 2 * kSteps);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t word = chances[n / 2][n % 2 * 2 + e / 2];
      const uint32_t half = e % 2 == 0 ? low_half(word) : high_half(word);
      if (half == kUnseenBits << 16) s[n][e] = -0.0f;
    }
  }
}

// What dropout keeps of a thread's pairs, 32 at most: bit kept_bit(n, e).
constexpr int kept_bit(int n, int e) { return n / 4 * 16 + e / 2 * 8 + e % 2 * 4 + n % 4; }

// A call of the generator is for 8 keys of a query, which 8 lanes have: each lane makes the bits of
// one query of 32, and takes from others one of each 8. The warp's keys begin at `key`.
template <int kQueries>
uint32_t draw_kept(const Dropout& dropout, uint64_t plane, int query, int key, int lane) {
  static_assert(kQueries == 32 || kQueries == 64);
  uint32_t made = 0;
#pragma unroll
  for (int at = 0; at < kQueries / 16; ++at) {
    const PhiloxWords words =
        dropout.draws(plane, static_cast<uint32_t>(query + at / 2 * 32 + lane),
                      static_cast<uint32_t>(key / Dropout::kKeysPerCall + at % 2));
#pragma unroll
    for (int number = 0; number < 8; ++number) {
      made |= (dropout.keeps(words, number) ? 1u : 0u) << (8 * at + number);
    }
  }
  uint32_t kept = 0;
#pragma unroll
  for (int from = 0; from < 8; ++from) {
    const uint32_t others = __shfl_sync(kAllLanes, made, from / 2 * 8 + lane % 4 * 2 + from % 2);
    kept |= (others >> lane / 4 & 0x01010101u) << (from / 2 + from % 2 * 4);
  }
  return kept;
}
inline bool keeps(uint32_t kept, int n, int e) { return (kept >> kept_bit(n, e) & 1) != 0; }

// Chances that are dropped weigh -0: what meets them is left out.
template <class T, int kTiles>
void pack_kept(uint32_t (&weights)[kTiles / 2][4], const float (&s)[kTiles][4], uint32_t kept) {
#pragma unroll
  for (int step = 0; step < kTiles / 2; ++step) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int n = 2 * step + e / 2, first = e % 2 * 2;
      weights[step][e] = pack<T>(keeps(kept, n, first) ? s[n][first] : -0.0f,
                                 keeps(kept, n, first + 1) ? s[n][first + 1] : -0.0f);
    }
  }
}
template <int kTiles>
void make_gradients(float (&s)[kTiles][4], const float (&d_p)[kTiles][4], uint32_t stats,
                    uint32_t kept, float keep_scale, int lane) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float row[4];
    load_shared_floats(row, stats + stats_of(n) + static_cast<uint32_t>(lane % 4 * 16));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float delta = row[e % 2 * 2 + 1];
      s[n][e] *= __fmaf_rn(keeps(kept, n, e) ? d_p[n][e] : 0.0f, keep_scale, -delta);
    }
  }
}
// Which chances mark_unseen() has marked, as bits of kept_bit(); and the same gradients become -0.
template <int kTiles>
uint32_t unseen_of(const float (&s)[kTiles][4]) {
  uint32_t unseen = 0;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      unseen |= (__float_as_uint(s[n][e]) == 0x80000000u ? 1u : 0u) << kept_bit(n, e);
    }
  }
  return unseen;
}
template <int kTiles>
void mark_unseen(float (&s)[kTiles][4], uint32_t unseen) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = keeps(unseen, n, e) ? -0.0f : s[n][e];
  }
}

// P^T in place of S^T. `stats` has lse and delta of the queries; with a bias, which may be large,
// lse and scores are in natural units, where their difference is exact.
template <bool kBias, int kTiles>
void make_chances(float (&s)[kTiles][4], float factor, uint32_t stats, int lane) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float row[4];  // of two queries
    load_shared_floats(row, stats + stats_of(n) + static_cast<uint32_t>(lane % 4 * 16));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float lse = row[e % 2 * 2];
      s[n][e] = exp2_approx(kBias ? (s[n][e] - lse) * kLog2E : __fmaf_rn(s[n][e], factor, -lse));
    }
  }
}
// dS^T; in the place of P^T or dP^T.
template <int kTiles>
void make_gradients(float (&d_s)[kTiles][4], const float (&s)[kTiles][4],
                    const float (&d_p)[kTiles][4], uint32_t stats, int lane) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float row[4];
    load_shared_floats(row, stats + stats_of(n) + static_cast<uint32_t>(lane % 4 * 16));
#pragma unroll
    for (int e = 0; e < 4; ++e) d_s[n][e] = s[n][e] * (d_p[n][e] - row[e % 2 * 2 + 1]);
  }
}

// The same where a thread's two rows are queries: S and dP, of which it knows lse and delta.
template <int kTiles>
void make_row_chances(float (&s)[kTiles][4], float factor, const float (&lse)[2]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = exp2_approx(__fmaf_rn(s[n][e], factor, -lse[e / 2]));
  }
}
template <int kTiles>
void make_row_gradients(float (&d_s)[kTiles][4], const float (&s)[kTiles][4],
                        const float (&d_p)[kTiles][4], const float (&delta)[2]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) d_s[n][e] = s[n][e] * (d_p[n][e] - delta[e / 2]);
  }
}

// tanh in place of S^T, whose logits are that times the cap.
template <class T, int kTiles>
void take_tanh(float (&s)[kTiles][4], float inner_scale) {
  take_tanh<T>(reinterpret_cast<float(&)[1][kTiles][4]>(s), inner_scale);
}
// dS^T · (1 - t²), where the logits were softcap · t; in the place of P^T or dP^T. Registers lack
// for t, which P^T and lse tell; where they do not, P^T is 0.
template <int kTiles>
void make_capped_gradients(float (&d_s)[kTiles][4], const float (&s)[kTiles][4],
                           const float (&d_p)[kTiles][4], float softcap, uint32_t stats, int lane) {
  const float inverse = kLn2 / softcap;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float row[4];
    load_shared_floats(row, stats + stats_of(n) + static_cast<uint32_t>(lane % 4 * 16));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float lse = row[e % 2 * 2], delta = row[e % 2 * 2 + 1];
      const float t = fmaxf((log2_fast(s[n][e]) + lse) * inverse, -1.0f);
      d_s[n][e] = s[n][e] * ((d_p[n][e] - delta) * __fmaf_rn(-t, t, 1.0f));
    }
  }
}

// Operands to the warp's rows of a tile [key][query] of 64 queries, from 8 · first_chunk on: `row`
// is the thread's first.
template <class T, int kSteps>
void store_operands(uint32_t tile, const uint32_t (&words)[kSteps][4], int row, int pair,
                    int first_chunk = 0) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t at =
          TileLayout<T, kPanel>::offset(row + e % 2 * 8, first_chunk + 2 * step + e / 2);
      store_shared(tile + at + static_cast<uint32_t>(pair * 4), words[step][e]);
    }
  }
}

// By kThreads threads. Whether a part of shared memory, of a multiple of 16 bytes, has a NaN or
// infinity that the thread saw; and a copy of one, or the same place, where they are 0.
template <class T, int kThreads>
bool sees_extreme(uint32_t from, uint32_t bytes, int thread) {
  uint32_t sum = 0;
#pragma unroll 4
  for (uint32_t at = thread * 16; at < bytes; at += kThreads * 16) {
    uint32_t words[4];
    load_shared(words, from + at);
#pragma unroll
    for (const uint32_t pair : words) sum = add_extreme<T>(sum, pair);
  }
  return high_not_finite<T>(sum) || low_not_finite<T>(sum);
}
template <class T, int kThreads>
void copy_finite(uint32_t to, uint32_t from, uint32_t bytes, int thread) {
#pragma unroll 1
  for (uint32_t at = thread * 4; at < bytes; at += kThreads * 4) {
    store_shared(to + at, finite_or_zero<T>(load_shared_word(from + at)));
  }
}

// add_not_finite() for a tile of 64 rows in panels, from columns 8 · kFrom on.
template <class T, int kFrom = 0, int kTiles>
void add_panels_not_finite(float (&sum)[kTiles][4], uint32_t weights, int weight_row, uint32_t tile,
                           uint32_t panel_bytes, int lane) {
  constexpr int kLeft = kTiles - kFrom, kOwn = kLeft < kPanel / 8 ? kLeft : kPanel / 8;
  add_not_finite<T, kPanel, kPanel>(reinterpret_cast<float(&)[1][kOwn][4]>(sum[kFrom]), weights,
                                    weight_row, tile + kFrom * 8 / kPanel * panel_bytes, 0, kPanel,
                                    0, lane);
  if constexpr (kLeft > kOwn) {
    add_panels_not_finite<T, kFrom + kOwn>(sum, weights, weight_row, tile, panel_bytes, lane);
  }
}

}  // namespace pullback::attention
