// From scores and their gradients by the products to P^T and dS^T: softcap, bias, band, dropout.
#pragma once

#include "device/mma.cuh"
#include "ops/attention/cuda/smxx_backward_rows.cuh"

namespace pullback::attention {

using namespace device;

// What a kernel is compiled for beside the band: nothing, dropout, a block mask (and dropout, as
// the parameters say), or everything, as the parameters say: bias, softcap, rows of any strides.
inline constexpr int kPlain = 0, kDropout = 1, kBlocks = 2, kGeneral = 3;

inline float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

inline void load_shared_floats(float (&value)[4], uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
               : "r"(address)
               : "memory");
}

// A warp's 32 keys x 8 · kN queries. Element [m][n][2 · half + c] of a lane is key
// 16 · m + 8 · half + lane / 4 and query 8 · n + lane % 4 · 2 + c.
template <class T, int kN, int kFeatures>
struct Scores {
  const BackwardParams& p;
  const TilePlace& place;
  int64_t plane;
  int key, query;    // the first ones, within the sequence
  uint32_t squares;  // bit 8 · (16 queries) + (16 keys): these see each other by the block mask
  uint32_t stats;    // in shared memory, of the first query
  int lane;

  Scores(const BackwardParams& params, const TilePlace& tile_place, int64_t plane_number,
         int first_key, int first_query, uint32_t seen_squares, uint32_t row_stats, int lane_number)
      : p(params),
        place(tile_place),
        plane(plane_number),
        key(first_key),
        query(first_query),
        squares(seen_squares),
        stats(row_stats),
        lane(lane_number) {}

  // Bit 8 · n of kept[m][half][c], after a shift that makes the lane's key bit 0. A call of the
  // generator serves 8 keys of a query; each lane makes kN of them for all.
  void draw(uint32_t (&kept)[2][2][2]) const {
    const Dropout& dropout = p.problem.dropout;
    // Varlen: planes are heads, of every sequence.
    const uint64_t stream = p.problem.sequences == nullptr
                                ? static_cast<uint64_t>(plane)
                                : static_cast<uint64_t>(place.batch * p.problem.heads + plane);
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
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int from = (2 * m + half) * 8 + lane % 4 * 2 + c;
          kept[m][half][c] = __shfl_sync(0xffffffffu, bits, from) >> (lane / 4);
        }
      }
    }
  }

  // The score times log2 e; `slope` is the softcap's derivative. Unseen: false.
  bool general_score(float raw, int i, int j, bool inside, const T* bias, float& s,
                     float& slope) const {
    slope = 1;
    float t = raw * p.problem.scale;
    if (p.problem.softcap > 0) {
      const float power = exp2_fast(t * (2 * kLog2E / p.problem.softcap));
      const float tanh = 1 - 2 / (power + 1);
      slope = 1 - tanh * tanh;
      t = p.problem.softcap * tanh;
    }
    s = t * kLog2E;
    if (bias == nullptr) return inside && s != -infinity<float>();
    if (!inside) return false;
    const float b = to_real(bias[i * p.bias.query + j * p.bias.key]);
    s += b * kLog2E;
    return b != -infinity<float>() && s != -infinity<float>();
  }

  // kCareful: some pair of the tile is not to be seen, or some value is not finite. The general
  // kernel hands d_bias of each pair to sink(m, n, e, i, j, value).
  template <bool kCareful, class Sink>
  __forceinline__ void make(float (&s)[2][kN][4], float (&d_p)[2][kN][4], uint32_t (&pt)[2][kN][2],
                            uint32_t (&ds)[2][kN][2], const Sink& sink) const {
    constexpr bool kTested = kCareful || kFeatures == kGeneral;
    const float factor = p.problem.scale * kLog2E;
    uint32_t kept[2][2][2];
    const bool drops =
        kFeatures == kDropout || (kFeatures >= kBlocks && p.problem.dropout.active());
    if (drops) draw(kept);
    const float keep_scale = p.problem.keep_scale;

    const int lane_key = key + lane / 4, lane_query = query + lane % 4 * 2;
    const int keys = place.k_length, queries = place.q_length;
    const T* bias = nullptr;
    if constexpr (kFeatures == kGeneral) {
      if (p.bias.data != nullptr) {
        bias =
            static_cast<const T*>(p.bias.data) + place.batch * p.bias.batch + head() * p.bias.head;
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float row[4];  // lse, delta of two queries
      load_shared_floats(row, stats + static_cast<uint32_t>(n * 64 + lane % 4 * 16));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float probability[2], gradient[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float lse = row[2 * c], delta = row[2 * c + 1];
            const int e = 2 * half + c;
            const int i = lane_query + 8 * n + c, j = lane_key + 16 * m + 8 * half;
            float exponent = s[m][n][e] * factor, slope = 1;
            bool seen = true;
            if constexpr (kTested) {
              seen = i < queries && j < keys && j - i >= place.lowest && j - i <= place.highest;
              if constexpr (kFeatures >= kBlocks) {
                seen = seen && (squares >> (n / 2 * 8 + m) & 1) != 0;
              }
              if constexpr (kFeatures == kGeneral) {
                seen = general_score(s[m][n][e], i, j, seen, bias, exponent, slope);
              } else {
                seen = seen && exponent != -infinity<float>();
              }
              // a row that sees nothing, and NaN, which is seen
              seen = seen && !(lse == infinity<float>());
            }
            float chance = exp2_fast(exponent - lse), d_chance = d_p[m][n][e];
            float weight = chance;
            if (drops) {
              const bool keep = kept[m][half][c] >> (8 * n) & 1;
              weight = keep ? chance * keep_scale : -0.0f;
              d_chance = keep ? d_chance * keep_scale : 0.0f;
            }
            float d_s = chance * (d_chance - delta);
            if constexpr (kTested) {
              weight = seen ? weight : -0.0f;
              d_s = seen ? d_s : -0.0f;
            }
            if constexpr (kFeatures == kGeneral) {
              sink(m, n, e, i, j, seen ? d_s : 0.0f);
              d_s = seen ? d_s * slope : d_s;
            }
            probability[c] = weight;
            gradient[c] = d_s;
          }
          pt[m][n][half] = pack<T>(probability[0], probability[1]);
          ds[m][n][half] = pack<T>(gradient[0], gradient[1]);
        }
      }
    }
  }

  int64_t head() const { return plane % p.problem.heads; }
};

}  // namespace pullback::attention
