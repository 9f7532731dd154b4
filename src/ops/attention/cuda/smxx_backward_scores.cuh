// From scores and their gradients by the products to P^T and dS^T: softcap, bias, band, dropout.
#pragma once

#include "device/async_copy.cuh"
#include "device/memory.cuh"
#include "device/mma.cuh"
#include "ops/attention/cuda/smxx_backward_rows.cuh"
#include "ops/attention/cuda/smxx_scores.cuh"
#include "ops/attention/cuda/smxx_turns.cuh"

namespace pullback::attention {

using namespace device;

inline void load_shared_floats(float (&value)[4], uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
               : "r"(address)
               : "memory");
}

// 8 x 8 elements of 16 bits, of which lane 4 · g + t has 2t and 2t + 1 of row g, transposed.
inline uint32_t transposed(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// Keys come interleaved (device/shared_tile.cuh): in an S^T of 32 keys x 8 · kN queries, element
// [m][n][2 · half + c] of lane 4 · g + t is
//   key 8 · (g / 2) + 2 · w + g % 2 with w = 2 · m + half, and query 8 · n + 2t + c.
// The elements w of 8 queries, transposed, give a lane keys 8t + 2w, 8t + 2w + 1 of query g: all w
// are 8 keys in a row, 16 bytes of a bias, and the draws of one call of dropout's generator.
inline int first_key_of_row(int lane) { return lane / 8 * 8 + lane / 4 % 2; }

// The low or the high element of a pair.
template <class T>
float element_of(uint32_t pair, int high) {
  return to_real(T{static_cast<uint16_t>(high ? pair >> 16 : pair)});
}
template <>
inline float element_of<bf16>(uint32_t pair, int high) {
  return __uint_as_float(__byte_perm(pair, 0, high ? 0x3244 : 0x1044));
}

// 8 elements of a [query][key] plane at keys [j, j + 8), those below `keys`.
template <class T>
void load_eight(uint32_t (&words)[4], const T* row, int64_t step, int j, int keys, bool vectors) {
  if (vectors && j + 8 <= keys) {
    union {
      Vector<T> vector;
      uint32_t word[4];
    } loaded = {load_vector(row + j)};
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] = loaded.word[w];
    return;
  }
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t low = j + 2 * w < keys ? row[(j + 2 * w) * step].bits : 0;
    const uint32_t high = j + 2 * w + 1 < keys ? row[(j + 2 * w + 1) * step].bits : 0;
    words[w] = low | high << 16;
  }
}

template <class T>
void store_words(T* to, const uint32_t (&words)[4]) {
  union {
    uint32_t word[4];
    Vector<T> vector;
  } value = {{words[0], words[1], words[2], words[3]}};
  store_vector(to, value.vector);
}

template <class T>
void store_eight(T* row, int64_t step, int j, int keys, bool vectors, const uint32_t (&words)[4]) {
  if (vectors && j + 8 <= keys) {
    store_words(row + j, words);
    return;
  }
  // Short code, as it stands in many places: one element after the other leaves at the low end.
  uint64_t low = words[0] | static_cast<uint64_t>(words[1]) << 32;
  uint64_t high = words[2] | static_cast<uint64_t>(words[3]) << 32;
  T* to = row + j * step;
  const int count = keys - j < 8 ? keys - j : 8;
#pragma unroll 1
  for (int e = 0; e < count; ++e, to += step) {
    to->bits = static_cast<uint16_t>(low);
    low = low >> 16 | high << 48;
    high >>= 16;
  }
}

template <class T, int kN, Features kFeatures>
struct Scores {
  const BackwardParams& p;
  const Dropout& dropout;
  const TilePlace& place;
  int head;          // query head
  int key, query;    // the first ones, within the sequence
  uint32_t squares;  // bit 8 · (16 queries) + (16 keys): these see each other by the block mask
  uint32_t stats;    // in shared memory, of the first query
  int lane;

  Scores(const BackwardParams& params, const Dropout& seeded, const TilePlace& tile_place,
         int query_head, int first_key, int first_query, uint32_t seen_squares, uint32_t row_stats,
         int lane_number)
      : p(params),
        dropout(seeded),
        place(tile_place),
        head(query_head),
        key(first_key),
        query(first_query),
        squares(seen_squares),
        stats(row_stats),
        lane(lane_number) {}

  template <class Visit>
  void for_rows(const Plane& tensor, const Visit& visit) const {
    T* const base = static_cast<T*>(tensor.data) + place.batch * tensor.batch + head * tensor.head;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int i = query + 8 * n + lane / 4;
      if (i < place.q_length) visit(n, base + i * tensor.query);
    }
  }

  // The bias of 32 keys x 8 · kN queries: get() gives those of 8 queries as the scores lie, key w
  // and query c of addend[w][c]. Here a lane has 8 keys of query lane / 4 of every 8.
  struct BiasWords {
    uint32_t word[kN][4];
    void load(const Scores& scores) {
      const BackwardParams& p = scores.p;
      if (p.bias.data == nullptr) return;
      scores.for_rows(p.bias, [&](int n, const T* row) {
        load_eight(word[n], row, p.bias.key, scores.key + scores.lane % 4 * 8,
                   scores.place.k_length, p.bias_vectors != 0);
      });
    }
    void get(int n, float (&addend)[4][2]) const {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        unpack<T>(transposed(word[n][w]), addend[w][0], addend[w][1]);
      }
    }
  };

  // The same through shared memory, in `bytes(number)` of 16 each for 32 · kN pieces of 8 keys:
  // asynchronous, and free of registers. Between load() and get() the warp waits, and for each
  // other.
  template <class Bytes>
  struct SharedBias {
    const Scores& scores;
    Bytes bytes;
    void load() const {
      const BackwardParams& p = scores.p;
      if (p.bias.data == nullptr) return;
      // Queries 4 apart side by side: their pieces lie in other banks.
      const int piece = scores.lane % 4, q = scores.lane / 8 + scores.lane / 4 % 2 * 4;
      const int j = scores.key + piece * 8, keys = scores.place.k_length;
      const bool whole = (!is_general(kFeatures) || p.bias_vectors) && j + 8 <= keys;
      const T* row = static_cast<const T*>(p.bias.data) + scores.place.batch * p.bias.batch +
                     scores.head * p.bias.head + (scores.query + q) * p.bias.query;
      if (whole) {
#pragma unroll(is_general(kFeatures) ? 1 : kN)
        for (int n = 0; n < kN; ++n, row += 8 * p.bias.query) {
          const int r = 8 * n + q;
          async_copy_or_zero(bytes(r * 4 + piece), row + j,
                             scores.query + r < scores.place.q_length);
        }
        return;
      }
#pragma unroll 1
      for (int r = q; r < 8 * kN; r += 8, row += 8 * p.bias.query) {
        if (scores.query + r >= scores.place.q_length) return;
        uint32_t words[4];
        load_eight(words, row, p.bias.key, j, keys, false);
        store_shared(bytes(r * 4 + piece), words);
      }
    }
    void get(int n, float (&addend)[4][2]) const {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint32_t words[4];
        load_shared(words, bytes((8 * n + scores.lane % 4 * 2 + c) * 4 + scores.lane / 8));
#pragma unroll
        for (int w = 0; w < 4; ++w) addend[w][c] = element_of<T>(words[w], scores.lane / 4 % 2);
      }
    }
  };

  bool drops() const {
    return kFeatures == Features::dropout || (is_general(kFeatures) && p.problem.dropout.active());
  }

  // What dropout keeps: bit 8 · n + 2 · w of kept[c].
  void draw(uint32_t (&kept)[2]) const {
    if (!drops()) {
      kept[0] = kept[1] = ~0u;
      return;
    }
    const auto stream = static_cast<uint64_t>(place.batch * p.problem.heads + head);
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const PhiloxWords words =
          dropout.draws(stream, static_cast<uint32_t>(query + 8 * n + lane % 8),
                        static_cast<uint32_t>(key / 8 + lane / 8));
#pragma unroll
      for (unsigned number = 0; number < 8; ++number) {
        bits |= (dropout.keeps(words, number) ? 1u : 0u) << (8 * n + static_cast<int>(number));
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      kept[c] = __shfl_sync(0xffffffffu, bits, (lane & ~7) | (lane % 4 * 2 + c)) >> (lane / 4 % 2);
    }
  }

  // P^T, without the scale of what dropout keeps, and dS^T, from S^T and dP^T. kCareful: some pair
  // of the tile is not to be seen, or some value is not finite. d_bias of each pair goes to
  // sink.add(m, n, e, value), between sink.begin(n) and sink.finish(n) for the pairs of 8 queries.
  template <bool kCareful, class Bias, class Sink>
  __forceinline__ void make(float (&s)[2][kN][4], float (&d_p)[2][kN][4], uint32_t (&pt)[2][kN][2],
                            uint32_t (&ds)[2][kN][2], const Bias& bias, const uint32_t (&kept)[2],
                            Sink& sink) const {
    constexpr bool kHasBias = has_bias(kFeatures);
    const bool biased = kHasBias && (!is_general(kFeatures) || p.bias.data != nullptr);
    const bool capped = is_general(kFeatures) && p.problem.softcap > 0;
    // Scores are in the unit of lse (lse_unit()).
    const float factor =
        (is_general(kFeatures) ? score_unit(p.problem) : p.problem.scale) * (biased ? 1 : kLog2E);
    if (capped) take_tanh<T>(s, p.problem.inner_scale);
    const float keep_scale = p.problem.keep_scale;
    const int lane_key = key + first_key_of_row(lane), lane_query = query + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float row[4];  // lse, delta of two queries
      load_shared_floats(row, stats + static_cast<uint32_t>(n * 64 + lane % 4 * 16));
      float gradient[2][4];
      float addends[4][2] = {};
      if (biased) bias.get(n, addends);
      sink.begin(n);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int m = w / 2, half = w % 2;
        float probability[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float lse = row[2 * c], delta = row[2 * c + 1], addend = addends[w][c];
          const int e = 2 * half + c;
          float score = s[m][n][e] * factor, exponent = score - lse;
          if constexpr (kHasBias) {
            score = __fmaf_rn(s[m][n][e], factor, addend);
            exponent = (score - lse) * (biased ? kLog2E : 1);
          }
          bool seen = true;
          if constexpr (kCareful) {
            const int i = lane_query + 8 * n + c, j = lane_key + 2 * w;
            // -inf is not seen, NaN is; an lse of inf is of a row that sees nothing.
            // Without branches: the elements' chains of instructions are to run side by side.
            seen = (i < place.q_length) & (j < place.k_length) & (j - i >= place.lowest) &
                   (j - i <= place.highest) & (addend != -infinity<float>()) &
                   (score != -infinity<float>()) & (lse != infinity<float>());
            if constexpr (has_blocks(kFeatures)) {
              seen = seen & ((squares >> (n / 2 * 8 + lane / 16) & 1) != 0);
            }
          }
          float chance = exp2_approx(exponent), d_chance = d_p[m][n][e];
          float weight = chance;
          if constexpr (may_drop(kFeatures)) {
            const bool keep = kept[c] >> (8 * n + 2 * w) & 1;
            weight = keep ? chance : -0.0f;
            d_chance = keep ? d_chance * keep_scale : 0.0f;
          }
          float d_s = chance * (d_chance - delta);
          if constexpr (kCareful) {
            weight = seen ? weight : -0.0f;
            d_s = seen ? d_s : -0.0f;
          }
          sink.add(m, n, e, d_s);
          probability[c] = weight;
          gradient[m][e] = d_s;
        }
        pt[m][n][half] = pack<T>(probability[0], probability[1]);
      }
      sink.finish(n);
      if (capped) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float slope = 1 - s[m][n][e] * s[m][n][e];
            // What is not seen stays so.
            if (!kCareful || __float_as_uint(gradient[m][e]) != 0x80000000u)
              gradient[m][e] *= slope;
          }
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        ds[m][n][0] = pack<T>(gradient[m][0], gradient[m][1]);
        ds[m][n][1] = pack<T>(gradient[m][2], gradient[m][3]);
      }
    }
  }
};

// The bias of a tile, into the second-level cache. By all threads.
template <class T, int kKeys, int kQueries, int kThreads>
void prefetch_bias(const BackwardParams& p, const TilePlace& place, int head, int query_tile) {
  if (p.bias.data == nullptr || !p.bias_vectors || p.bias.query == 0) return;
  constexpr int kLines = (kKeys + 63) / 64;
#pragma unroll 1
  for (int line = threadIdx.x; line < kQueries * kLines; line += kThreads) {
    const int i = query_tile * kQueries + line / kLines,
              j = place.tile * kKeys + line % kLines * 64;
    if (i < place.q_length && j < place.k_length) {
      prefetch(static_cast<const T*>(p.bias.data) + place.batch * p.bias.batch +
               head * p.bias.head + i * p.bias.query + j);
    }
  }
}

// d_bias of a tile is its dS, which lies in shared memory [key][query]: from rows that are
// interleaved, or taken in that order, a lane gets 8 keys of a query. By all warps.
template <class T, int kKeys, int kQueries, int kWarps, bool kInterleaved = true>
void store_bias(const BackwardParams& p, const TilePlace& place, int head, int query_tile,
                uint32_t ds_tile, int thread = static_cast<int>(threadIdx.x)) {
  if (p.d_bias.data == nullptr) return;
  const int lane = thread % 32;
  const int key_row = kInterleaved ? lane : lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
  T* const plane =
      static_cast<T*>(p.d_bias.data) + place.batch * p.d_bias.batch + head * p.d_bias.head;
  // Where the number of turns depends on the thread the compiler takes nothing behind the loop for
  // uniform, which Hopper's products need. Elsewhere that takes fewer registers.
  constexpr bool kSameTurns = !kInterleaved;
  static_assert(!kSameTurns || kQueries / 8 % kWarps == 0);
#pragma unroll 1
  for (int turn = kSameTurns ? 0 : thread / 32; turn < kQueries / 8; turn += kWarps) {
    const int eight = kSameTurns ? turn + thread / 32 : turn;
    const int i = query_tile * kQueries + eight * 8 + lane / 4;
    T* const row = plane + i * p.d_bias.query;
#pragma unroll
    for (int keys = 0; keys < kKeys; keys += 32) {
      uint32_t words[4];
      load_matrices_transposed(words,
                               ds_tile + TileLayout<T, kQueries>::offset(keys + key_row, eight));
      if (i < place.q_length) {
        store_eight(row, p.d_bias.key, place.tile * kKeys + keys + lane % 4 * 8, place.k_length,
                    p.d_bias_vectors != 0, words);
      }
    }
  }
}

// For kernels that take d_bias from dS^T, or have none.
struct NoSink {
  void begin(int) {}
  void add(int, int, int, float) {}
  void finish(int) {}
};

// Writes d_bias, or adds to a sum of it over launches: of batch items, where the bias is broadcast
// along the batch. The sum lies in the workspace in the order of the lanes.
template <class T, int kN, class Scores, bool kAhead = false>
struct BiasWriter {
  const Scores& scores;
  float* sums;  // of the 32 keys x 8 · kN queries
  // Of 8 queries: those of this launch, and sums of the launches before, which are fetched ahead.
  float value[2][4], before[kAhead ? 2 : 1][2][4];

  float* sum_at(int n, int m) const { return sums + ((n * 2 + m) * 32 + scores.lane) * 4; }
  bool adds(BiasStep step) const {
    return scores.p.d_bias.data != nullptr && scores.p.bias_step == step;
  }
  void fetch(int n) {
    load_past_l1(before[kAhead ? n % 2 : 0][0], sum_at(n, 0));
    load_past_l1(before[kAhead ? n % 2 : 0][1], sum_at(n, 1));
  }

  void begin(int n) {
    if (!kAhead || !adds(BiasStep::last)) return;
    if (n == 0) fetch(0);
    if (n + 1 < kN) fetch(n + 1);
  }
  void add(int m, int, int e, float d_s) { value[m][e] = d_s; }
  void finish(int n) {
    if (adds(BiasStep::first)) {
      store_past_l1(sum_at(n, 0), value[0]);
      store_past_l1(sum_at(n, 1), value[1]);
    } else if (adds(BiasStep::middle)) {
      add_in_memory(sum_at(n, 0), value[0]);
      add_in_memory(sum_at(n, 1), value[1]);
    } else if (scores.p.d_bias.data != nullptr) {
      if (adds(BiasStep::last)) {
        if (!kAhead) fetch(n);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) value[m][e] += before[kAhead ? n % 2 : 0][m][e];
        }
      }
      if constexpr (sizeof(T) == 4) {
        store_each(n);
      } else {
        store_rows(n);
      }
    }
  }

 private:
  void store_rows(int n) const {
    const BackwardParams& p = scores.p;
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      words[w] = transposed(pack<T>(value[w / 2][w % 2 * 2], value[w / 2][w % 2 * 2 + 1]));
    }
    const int i = scores.query + 8 * n + scores.lane / 4;
    if (i >= scores.place.q_length) return;
    T* const row = static_cast<T*>(p.d_bias.data) + scores.place.batch * p.d_bias.batch +
                   scores.head * p.d_bias.head + i * p.d_bias.query;
    store_eight(row, p.d_bias.key, scores.key + scores.lane % 4 * 8, scores.place.k_length,
                p.d_bias_vectors != 0, words);
  }
  void store_each(int n) const {
    const BackwardParams& p = scores.p;
    const int first_key = scores.key + first_key_of_row(scores.lane);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int i = scores.query + 8 * n + scores.lane % 4 * 2 + c;
      if (i >= scores.place.q_length) continue;
      T* to = static_cast<T*>(p.d_bias.data) + scores.place.batch * p.d_bias.batch +
              scores.head * p.d_bias.head + i * p.d_bias.query + first_key * p.d_bias.key;
#pragma unroll
      for (int w = 0; w < 4; ++w, to += 2 * p.d_bias.key) {
        if (first_key + 2 * w < scores.place.k_length) *to = value[w / 2][w % 2 * 2 + c];
      }
    }
  }
};

}  // namespace pullback::attention
