// The bias of the backward pass on Hopper, and its gradient.
//
// A tile of the bias lies in shared memory as [query][key]; as scores have keys as rows, it is read
// transposed. d_bias is dS: written from its tile [key][query], or added to sums over the batch
// from the registers it was made in (smxx_backward_scores.cuh).
#pragma once

#include "device/shared_tile.cuh"
#include "ops/attention/cuda/sm90_backward_scores.cuh"

namespace pullback::attention {

template <class T, int kKeys, int kQueries, int kThreads>
void copy_bias(uint32_t tile, const BackwardParams& p, const TilePlace& place, int head,
               int query_tile) {
  const int key = place.tile * kKeys, query = query_tile * kQueries;
  const T* const from = static_cast<const T*>(p.bias.data) + place.batch * p.bias.batch +
                        head * p.bias.head + query * p.bias.query + key;
  TileLoader<T, kQueries, kKeys, kThreads, true, false, true, true>(from, p.bias.query, 1,
                                                                    place.k_length - key)
      .load(tile, 0, place.q_length - query);
}

// Calls visit(n, addends as the thread's scores) for 8 queries after the other. `row` is the warp's
// first key.
template <class T, int kKeys, int kTiles, class Visit>
void for_each_addend(uint32_t tile, int row, int lane, const Visit& visit) {
#pragma unroll
  for (int n = 0; n < kTiles; n += 2) {
    uint32_t words[4];
    load_matrices_transposed(words,
                             tile + TileLayout<T, kKeys>::offset(8 * n + lane / 16 * 8 + lane % 8,
                                                                 row / 8 + lane / 8 % 2));
#pragma unroll
    for (int at = 0; at < 2; ++at) {
      float addend[4];
      unpack<T>(words[2 * at], addend[0], addend[1]);
      unpack<T>(words[2 * at + 1], addend[2], addend[3]);
      visit(n + at, addend);
    }
  }
}

// s = scale · s + bias
template <class T, int kKeys, int kTiles>
void add_bias(float (&s)[kTiles][4], float scale, uint32_t tile, int row, int lane) {
  for_each_addend<T, kKeys, kTiles>(tile, row, lane, [&](int n, const float(&addend)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = __fmaf_rn(s[n][e], scale, addend[e]);
  });
}
// Behind a bias of −inf nothing is seen, whatever the score.
template <class T, int kKeys, int kTiles>
void hide_by_bias(float (&s)[kTiles][4], uint32_t tile, int row, int lane) {
  for_each_addend<T, kKeys, kTiles>(tile, row, lane, [&](int n, const float(&addend)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[n][e] = addend[e] == -infinity<float>() ? -infinity<float>() : s[n][e];
    }
  });
}

// dS^T, of a warp's keys, to the sums of d_bias over the batch, in the order of the lanes; of the
// last item the sum to d_bias. `sums` is the warp's. kAhead: how many pieces of a sum are read
// before the first is waited for.
template <class T, int kAhead, int kTiles>
void add_bias_sums(const BackwardParams& p, const TilePlace& place, int head, int query, int key,
                   const float (&s)[kTiles][4], float* sums, int lane) {
  static_assert(kTiles % kAhead == 0);
  if (p.d_bias.data == nullptr) return;
  const bool first = place.batch == 0;
  if (first || place.batch + 1 < p.chain_items) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float* const own = sums + (n * 32 + lane) * 4;
      first ? store_past_l1(own, s[n]) : add_in_memory(own, s[n]);
    }
    return;
  }
  T* const plane =
      static_cast<T*>(p.d_bias.data) + place.batch * p.d_bias.batch + head * p.d_bias.head;
#pragma unroll
  for (int begin = 0; begin < kTiles; begin += kAhead) {
    float total[kAhead][4];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load_past_l1(total[n], sums + ((begin + n) * 32 + lane) * 4);
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const float(&own)[4] = s[begin + n];
      // A lane has two neighbouring keys of query lane / 4.
      const int i = query + 8 * (begin + n) + lane / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float even = total[n][2 * half] + own[2 * half];
        const float odd = total[n][2 * half + 1] + own[2 * half + 1];
        const uint32_t pair = transposed(pack<T>(even, odd));
        const int j = key + 8 * half + lane % 4 * 2, left = place.k_length - j;
        if (i >= place.q_length || left <= 0) continue;
        T* const to = plane + i * p.d_bias.query + j * p.d_bias.key;
        if (p.d_bias_vectors && left > 1) {
          *reinterpret_cast<uint32_t*>(to) = pair;
        } else {
          to->bits = static_cast<uint16_t>(pair);
          if (left > 1) to[p.d_bias.key].bits = static_cast<uint16_t>(pair >> 16);
        }
      }
    }
  }
}

}  // namespace pullback::attention
