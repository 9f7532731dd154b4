// From scores and their gradients by the products to P^T and dS^T, in f32: what Scores of
// smxx_backward_scores.cuh does for 16 bits, in units of e and with the roundings of the forward
// pass, whose lse is subtracted: where one key weighs all, its probability is 1.
#pragma once

#include "ops/attention/cuda/smxx_backward_scores.cuh"

namespace pullback::attention {

// Σ_d x_d y_d in plain f32.
inline float plain_dot(const HeadRows& x, const HeadRows& y, int64_t batch, int head, int kv_head,
                       int64_t x_row, int64_t y_row, int width) {
  const float* const a =
      static_cast<const float*>(x.data) + batch * x.batch + x_row * x.row + head * x.head;
  const float* const b =
      static_cast<const float*>(y.data) + batch * y.batch + y_row * y.row + kv_head * y.head;
  float sum = 0;
#pragma unroll 1
  for (int d = 0; d < width; ++d) sum += a[d * x.element] * b[d * y.element];
  return sum;
}

template <int kN, Features kFeatures>
struct SplitScores : Scores<float, kN, kFeatures> {
  using Base = Scores<float, kN, kFeatures>;
  using Base::Base;
  using Base::drops, Base::head, Base::key, Base::lane, Base::p, Base::place, Base::query,
      Base::squares, Base::stats;

  // What infinity and NaN make of products is unlike what they make of planes: a product that is
  // not finite is made once more, or all are. `at(key, query)` is where a product of the warp's
  // waits in shared memory; keys are rows of the tile.
  template <class Place>
  void repair(float (&product)[2][kN][4], float unit, bool all, const HeadRows& of_queries,
              const HeadRows& of_keys, int width, const Place& at) const {
    const auto for_each = [&](const auto& visit) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            visit(product[m][n][e],
                  at(16 * m + e / 2 * 8 + lane / 4, 8 * n + lane % 4 * 2 + e % 2));
          }
        }
      }
    };
    for_each([&](float x, uint32_t to) { store_shared(to, __float_as_uint(x)); });
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < 8 * kN; ++i) {
      const float x = __uint_as_float(load_shared_word(at(lane, i)));
      const int own_query = query + i;
      const int own_key = key + first_key_of_row(lane % 8 * 4) + lane / 8 * 2;
      if ((x - x == 0 && !all) || own_query >= place.q_length || own_key >= place.k_length)
        continue;
      const float sum = plain_dot(of_queries, of_keys, place.batch, head, head / p.problem.group,
                                  place.q_begin + own_query, place.k_begin + own_key, width);
      store_shared(at(lane, i), __float_as_uint(sum / unit));
    }
    __syncwarp();
    for_each([&](float& x, uint32_t from) { x = __uint_as_float(load_shared_word(from)); });
    __syncwarp();  // other lanes store planes there
  }

  // s becomes P^T, d_p dS^T; the products are to be multiplied by their units. kCareful: some pair
  // of the tile is not to be seen, or some value is not finite.
  template <bool kCareful>
  void make(float (&s)[2][kN][4], float (&d_p)[2][kN][4], float s_unit, float d_p_unit,
            const uint32_t (&kept)[2], float* bias_sums) const {
    constexpr bool kIsGeneral = is_general(kFeatures);
    const Problem& problem = p.problem;
    const bool drops = this->drops(), biased = kIsGeneral && p.bias.data != nullptr;
    const bool capped = kIsGeneral && problem.softcap > 0;
    const int lane_key = key + first_key_of_row(lane), lane_query = query + lane % 4 * 2;
    const float* const bias = static_cast<const float*>(p.bias.data) +
                              (biased ? place.batch * p.bias.batch + head * p.bias.head : 0);
    BiasWriter<float, kN, Base> writer{*this, bias_sums, {}};
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float row[4];  // lse, delta of two queries
      load_shared_floats(row, stats + static_cast<uint32_t>(n * 64 + lane % 4 * 16));
      const float* const bias_at =
          bias + (lane_query + 8 * n) * p.bias.query + lane_key * p.bias.key;
      // What only some problems have comes first, one after the other: the rest has no branches.
      float score[2][4], slope[2][4], addend[2][4];
      const auto for_each = [&](const auto& visit) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
#pragma unroll
          for (int c = 0; c < 2; ++c) visit(w / 2, w % 2 * 2 + c, w, c);
        }
      };
      for_each([&](int m, int e, int, int) {
        score[m][e] = s[m][n][e] * s_unit;
        slope[m][e] = 1, addend[m][e] = 0;
      });
      if (capped) {
        for_each([&](int m, int e, int, int) {
          score[m][e] = tanhf(score[m][e] * problem.inner_scale);
          slope[m][e] = 1 - score[m][e] * score[m][e];
        });
      }
      const float factor = capped ? problem.softcap : problem.scale;
      if (biased) {
        for_each([&](int m, int e, int w, int c) {
          const bool inside =
              lane_query + 8 * n + c < place.q_length && lane_key + 2 * w < place.k_length;
          if (inside) addend[m][e] = bias_at[c * p.bias.query + 2 * w * p.bias.key];
        });
      }
      for_each([&](int m, int e, int w, int c) {
        const float lse = row[2 * c], delta = row[2 * c + 1];
        const int i = lane_query + 8 * n + c, j = lane_key + 2 * w;
        bool seen = true;
        const float logit = kIsGeneral ? __fmaf_rn(score[m][e], factor, addend[m][e])
                                       : __fmul_rn(score[m][e], factor);
        if constexpr (kCareful) {
          // −inf is not seen, NaN is; an lse of inf is of a row that sees nothing.
          seen = i < place.q_length && j < place.k_length && j - i >= place.lowest &&
                 j - i <= place.highest && lse != infinity<float>() &&
                 addend[m][e] != -infinity<float>() && logit != -infinity<float>();
          if constexpr (has_blocks(kFeatures)) {
            seen = seen && (squares >> (n / 2 * 8 + lane / 16) & 1) != 0;
          }
        }
        const float chance = exp2_approx((logit - lse) * kLog2E);
        float weight = chance, d_chance = d_p[m][n][e] * d_p_unit;
        if (drops) {
          const bool keep = kept[c] >> (8 * n + 2 * w) & 1;
          weight = keep ? chance : -0.0f;
          d_chance = keep ? d_chance * problem.keep_scale : 0.0f;
        }
        float d_s = chance * (d_chance - delta);
        if constexpr (kCareful) {
          weight = seen ? weight : -0.0f;
          d_s = seen ? d_s : -0.0f;
        }
        if constexpr (kIsGeneral) {
          writer.add(m, n, e, d_s);
          // What is not seen stays so.
          if (seen) d_s *= slope[m][e];
        }
        s[m][n][e] = weight;
        d_p[m][n][e] = d_s;
      });
      if constexpr (kIsGeneral) writer.finish(n);
    }
  }
};

}  // namespace pullback::attention
