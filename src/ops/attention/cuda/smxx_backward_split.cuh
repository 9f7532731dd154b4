// Gradients of attention in f32: the kernel of smxx_backward.cuh, its operands split in two planes
// of f16 (smxx_planes.cuh).
//
// Tiles of q, k, v and d_out come as f32 and are split where they lie. P^T and dS^T have a unit for
// every 32 keys x kUnitQueries queries, which is found when they are there, so that small
// probabilities lose nothing. Units go into the sums as factors, every 16 terms.
#pragma once

#include "ops/attention/cuda/smxx_backward.cuh"
#include "ops/attention/cuda/smxx_backward_split_scores.cuh"
#include "ops/attention/cuda/smxx_planes.cuh"

namespace pullback::attention {

template <BackwardTiles kTiles>
struct SplitPlace {
  static constexpr int kKeys = kTiles.keys, kQueries = kTiles.queries, kSplit = kTiles.split;
  // P and dS each have one for so many queries and 32 keys.
  static constexpr int kChunkQueries = kQueries / kSplit;
  static constexpr int kUnitQueries = kChunkQueries < 16 ? 16 : kChunkQueries;

  uint32_t k_largest, v_largest;  // magnitudes
  float k_unit, v_unit;
  float p_unit[kKeys / 32][kQueries / kUnitQueries], ds_unit[kKeys / 32][kQueries / kUnitQueries];
  // Of a warp's scores, where a unit is of two warps.
  uint32_t largest[2][kKeys / 32 * kSplit];
};

template <int kWidth, BackwardTiles kTiles, Features kFeatures>
struct SplitBlock : BackwardBlock<float, kWidth, kTiles, kFeatures> {
  using Base = BackwardBlock<float, kWidth, kTiles, kFeatures>;
  using Place = SplitPlace<kTiles>;
  using Step = BackwardStep;
  using Base::d_k, Base::d_v, Base::p, Base::place, Base::lane, Base::warp, Base::key_row,
      Base::own, Base::block, Base::k_tile, Base::v_tile, Base::q_tiles, Base::d_out_tiles,
      Base::ds_tile, Base::p_tile, Base::stats_tiles;
  using Base::kDqM, Base::kDqN, Base::kDqWidth, Base::kKeyBytes, Base::kKeys, Base::kN, Base::kOwnN,
      Base::kQueries, Base::kQueryBytes, Base::kQueryRows, Base::kSplit, Base::kStages,
      Base::kThreads;
  using typename Base::Stats;
  static constexpr int kChunkQueries = Place::kChunkQueries, kUnitQueries = Place::kUnitQueries;
  // Two warps' scores have one unit.
  static constexpr bool kShared = kChunkQueries < kUnitQueries;
  static_assert(kSplit > 1 && kUnitQueries <= 2 * kChunkQueries);
  using KeyScores = SplitScores<kN, kFeatures>;

  Place& units;

  SplitBlock(const BackwardParams& params, BlockPlace& shared_place, Place& shared_units,
             uint32_t shared)
      : Base(params, shared_place, shared), units(shared_units) {}

  // Flags of the statistics: StatsTile.
  uint32_t flags_of(int stage) const { return stats_tiles + stage * sizeof(Stats) + kQueries * 8; }
  float q_unit(int stage) const { return __uint_as_float(load_shared_word(flags_of(stage) + 4)); }
  float d_out_unit(int stage) const {
    return __uint_as_float(load_shared_word(flags_of(stage) + 8));
  }

  // Keys and values have arrived: their units, and whether they are finite.
  void find_key_units() {
    bool found = false;
    const auto largest_of = [&](uint32_t tile) {
      uint32_t largest = 0;
#pragma unroll 4
      for (uint32_t at = threadIdx.x * 16; at < kKeyBytes; at += kThreads * 16) {
        uint32_t words[4];
        load_shared(words, tile + at);
#pragma unroll
        for (const uint32_t word : words) {
          const uint32_t magnitude = word & 0x7fffffff, order = finite_order(word);
          found |= magnitude >= kInfinityBits;
          largest = order > largest ? order : largest;
        }
      }
      return magnitude_of_order(__reduce_max_sync(0xffffffffu, largest));
    };
    // The largest does not depend on the order.
    atomicMax(&units.k_largest, largest_of(k_tile));
    atomicMax(&units.v_largest, largest_of(v_tile));
    const bool finite = __syncthreads_or(found) == 0;
    if (threadIdx.x == 0) {
      block.finite_keys = finite;
      units.k_unit = unit_of(units.k_largest);
      units.v_unit = unit_of(units.v_largest);
    }
    __syncthreads();
  }

  void split_keys(uint32_t tile, float unit) const {
    // Once a block: short code.
    split_tile<kKeys, kWidth, kThreads, 16>(tile, inverse_of(unit));
  }
  void split_queries(int stage) const {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      split_tile<kQueries, kWidth, kThreads>(
          (which == 0 ? q_tiles : d_out_tiles) + stage * kQueryBytes,
          inverse_of(which == 0 ? q_unit(stage) : d_out_unit(stage)));
    }
  }

  KeyScores scores_of(const Step& step, int first, uint32_t stats) const {
    return KeyScores(p, this->dropout, place, step.head, place.tile * kKeys + key_row,
                     step.tile * kQueries + first, step.squares >> (first / 16 * 8 + key_row / 16),
                     stats + first * 8, lane);
  }

  void score_product(float (&sum)[2][kN][4], uint32_t key_tile, uint32_t query_tile,
                     int first) const {
    const PlaneRows<kWidth, false> keys(key_tile, lane);
    const PlaneRows<kWidth, true> queries(query_tile, lane);
    multiply_plane_columns<kWidth, true>(sum, keys, key_row, queries, first);
  }

  static uint32_t largest_of(const float (&values)[2][kN][4]) {
    uint32_t largest = 0;
    const auto visit = [&](const auto& magnitude) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const uint32_t own = magnitude(values[m][n][e]);
            largest = own > largest ? own : largest;
          }
        }
      }
      largest = __reduce_max_sync(0xffffffffu, largest);
    };
    visit([](float x) { return magnitude_of(x); });
    if (largest >= kInfinityBits) {
      largest = 0;
      visit([](float x) { return finite_magnitude_of(x); });
    }
    return largest;
  }

  // Writes scores to their tile [key][query].
  void store_scores(uint32_t tile, const float (&values)[2][kN][4], int first, float unit) const {
    const float inverse = inverse_of(unit);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = key_row + 16 * m + 8 * half + lane / 4;
          const Planes pair =
              split_pair(values[m][n][2 * half], values[m][n][2 * half + 1], inverse);
          const uint32_t at = tile + plane_offset<kQueries>(key, first / 8 + n) +
                              static_cast<uint32_t>(lane % 4 * 4);
          store_shared(at, pair.high);
          store_shared(at ^ 16, pair.low);
        }
      }
    }
  }

  // P^T and dS^T of the warp's keys and queries, and their units.
  void store_scores(const float (&weights)[2][kN][4], const float (&d_s)[2][kN][4],
                    int first) const {
    uint32_t largest[2] = {largest_of(weights), largest_of(d_s)};
    if constexpr (kShared) {
      if (lane == 0) {
        units.largest[0][warp] = largest[0];
        units.largest[1][warp] = largest[1];
      }
      __syncthreads();
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const uint32_t other = units.largest[which][warp ^ 1];
        largest[which] = other > largest[which] ? other : largest[which];
      }
    }
    const float p_unit = unit_of(largest[0]), ds_unit = unit_of(largest[1]);
    if (lane == 0 && (!kShared || own % 2 == 0)) {
      units.p_unit[key_row / 32][first / kUnitQueries] = p_unit;
      units.ds_unit[key_row / 32][first / kUnitQueries] = ds_unit;
    }
    store_scores(p_tile, weights, first, p_unit);
    store_scores(ds_tile, d_s, first, ds_unit);
  }

  // What products of tiles with these units are to be multiplied by. Where that is more than a
  // float holds, though what it is of may not be, they are made once more, without units.
  static float product_unit(float a, float b) { return a * b < infinity<float>() ? a * b : 1; }
  bool passes_f32(int stage) const {
    return !(units.k_unit * q_unit(stage) < infinity<float>() &&
             units.v_unit * d_out_unit(stage) < infinity<float>());
  }

  // Products wait where P^T and dS^T of the warp will be stored.
  void repair(float (&s)[2][kN][4], float (&d_p)[2][kN][4], const KeyScores& scores, int stage,
              int first, bool all) const {
    const auto in = [&](uint32_t tile) {
      return [=, row = key_row](int key, int query) {
        return tile + TileLayout<float, kQueries>::offset(row + key, (first + query) / 4) +
               static_cast<uint32_t>(query % 4 * 4);
      };
    };
    scores.repair(s, product_unit(units.k_unit, q_unit(stage)), all, p.q, p.k, p.problem.head_dim,
                  in(p_tile));
    scores.repair(d_p, product_unit(units.v_unit, d_out_unit(stage)), all, p.d_out, p.v,
                  p.problem.value_dim, in(ds_tile));
  }

  // P^T and dS^T of the step.
  void make_scores(const Step& step, int stage, bool careful, bool suspicious) const {
    const int first = own * kChunkQueries;
    float s[2][kN][4], d_p[2][kN][4];
    const KeyScores scores = scores_of(step, first, stats_tiles + stage * sizeof(Stats));
    // With a block mask the warp's keys may see all, some or none of the queries.
    constexpr uint32_t kAllSquares = all_squares(kUnitQueries, 32);
    const uint32_t squares = scores.squares & kAllSquares;
    if (this->listed() && kFeatures == Features::blocks && !suspicious && squares == 0) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[m][n][e] = d_p[m][n][e] = -0.0f;
        }
      }
    } else {
      score_product(s, k_tile, q_tiles + stage * kQueryBytes, first);
      score_product(d_p, v_tile, d_out_tiles + stage * kQueryBytes, first);
      const bool all = passes_f32(stage);
      if (suspicious || !block.finite_keys || all) repair(s, d_p, scores, stage, first, all);
      uint32_t kept[2];
      scores.draw(kept);
      const float s_unit = product_unit(units.k_unit, q_unit(stage));
      const float d_p_unit = product_unit(units.v_unit, d_out_unit(stage));
      float* const bias_sums = this->bias_sums_of(step, 0);
      if (careful || is_general(kFeatures) || (this->listed() && squares != kAllSquares)) {
        scores.template make<true>(s, d_p, s_unit, d_p_unit, kept, bias_sums);
      } else {
        scores.template make<false>(s, d_p, s_unit, d_p_unit, kept, bias_sums);
      }
    }
    store_scores(s, d_p, first);
  }

  // d_v += P^T dO and d_k += dS^T Q. Rows of q and d_out with NaN or infinity: unseen weights must
  // not meet them.
  void sum_keys(int stage, bool suspicious) {
    const uint32_t q_tile = q_tiles + stage * kQueryBytes;
    const uint32_t d_out_tile = d_out_tiles + stage * kQueryBytes;
    if (suspicious) {
      add_planes_not_finite<kQueries, kWidth>(d_v, p_tile, key_row, d_out_tile, own * kOwnN, lane);
      __syncthreads();
      make_planes_finite<kQueries, kWidth, kThreads>(q_tile);
      make_planes_finite<kQueries, kWidth, kThreads>(d_out_tile);
      __syncthreads();
    }
    const PlaneRows<kQueries, false> p_rows(p_tile, lane), ds_rows(ds_tile, lane);
    const PlaneRows<kWidth, false> q_rows(q_tile, lane), d_out_rows(d_out_tile, lane);
    const float to_q = q_unit(stage), to_d_out = d_out_unit(stage);
    // Or the compiler keeps what follows from it in registers over all steps.
    int own_eight = own * kOwnN;
    asm volatile("" : "+r"(own_eight));
    const auto add_values = [&](int first) {
      const float unit = units.p_unit[key_row / 32][first / kUnitQueries] * to_d_out;
      PlaneMatrices a[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) a[m].load(p_rows.at(key_row + 16 * m, first / 8));
      multiply_plane_rows(d_v, a, d_out_rows, first, own_eight, {unit, unit});
    };
    const auto add_keys = [&](int first) {
      const float unit = units.ds_unit[key_row / 32][first / kUnitQueries] * to_q;
      PlaneMatrices a[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) a[m].load(ds_rows.at(key_row + 16 * m, first / 8));
      multiply_plane_rows(d_k, a, q_rows, first, own_eight, {unit, unit});
    };
    const bool wants_v = p.d_v.data != nullptr, wants_k = p.d_k.data != nullptr;
    if (!is_general(kFeatures) && wants_v && wants_k) {  // one block, for the compiler to mix
#pragma unroll
      for (int first = 0; first < kQueries; first += 16) {
        add_values(first);
        add_keys(first);
      }
    } else {
#pragma unroll 1
      for (int first = 0; first < kQueries; first += 16) {
        if (wants_v) add_values(first);
        if (wants_k) add_keys(first);
      }
    }
  }

  // The warp's part of dS K.
  void query_product(float (&sum)[kDqM][kDqN][4], int first_query, int first_eight) const {
    const PlaneRows<kQueries, true> ds_rows(ds_tile, lane);
    const PlaneRows<kWidth, false> k_rows(k_tile, lane);
    asm volatile("" : "+r"(first_eight));
#pragma unroll 2
    for (int key = 0; key < kKeys; key += 16) {
      PlaneMatrices a[kDqM];
      float unit[kDqM];
#pragma unroll
      for (int m = 0; m < kDqM; ++m) {
        const int query = first_query + 16 * m;
        a[m].load_transposed(ds_rows.at(key, query / 8));
        unit[m] = units.ds_unit[key / 32][query / kUnitQueries] * units.k_unit;
      }
      multiply_plane_rows(sum, a, k_rows, key, first_eight, unit);
    }
  }

  void sum_queries(const Step& step) const {
    float sum[kDqM][kDqN][4];
    if constexpr (Base::listed()) this->sums().take_over(block.turns[0]);
    this->sums().begin(block.turns[0], sum, 0);
    if (!block.finite_keys) {
      make_planes_finite<kKeys, kWidth, kThreads>(k_tile);
      __syncthreads();
    }
    const int dq_row = warp % kQueryRows * (16 * kDqM);
    const int dq_column = warp / kQueryRows * kDqWidth;
    query_product(sum, dq_row, dq_column / 8);
    if (!block.finite_keys) {
      __syncthreads();
      this->load_keys(k_tile, p.k, p.problem.head_dim);
      async_commit();
      async_wait<0>();
      __syncthreads();
      split_keys(k_tile, units.k_unit);
    }
    this->end_d_q(step, sum, dq_row, dq_column);
  }

  void run() {
    if (threadIdx.x == 0) {
      this->steps().begin();
    }
    __syncthreads();
    if (this->steps().exists(0)) {
      sum_steps();
    } else {
      wait_for_previous_kernel();
    }
    this->finish_keys(true, true);
  }

  void sum_steps() {
    this->load_keys_and_values();
    wait_for_previous_kernel();  // for statistics and turns
    if (threadIdx.x == 0) this->steps().find(1);
    this->load_step(block.steps[0], 0);
    if (threadIdx.x == 0) {
      units.k_largest = units.v_largest = 0;
    }
    async_wait<0>();
    __syncthreads();
    find_key_units();
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      split_keys(which == 0 ? k_tile : v_tile, which == 0 ? units.k_unit : units.v_unit);
    }
    for (int number = 0;; ++number) {
      const Step& step = this->steps().at(number);
      const Step& next = this->steps().at(number + 1);
      const int stage = kStages > 1 ? number % 2 : 0;
      const bool more = this->steps().exists(number + 1);
      split_queries(stage);
      __syncthreads();
      if (threadIdx.x == 0) this->steps().find(number + 2);
      if (kStages > 1 && more) this->load_step(next, stage ^ 1);

      const bool suspicious = load_shared_word(flags_of(stage)) != 0;
      const bool careful =
          suspicious || !block.finite_keys ||
          pairs_seen(place, place.tile * kKeys, step.tile * kQueries, kKeys, kQueries) != Seen::all;
      int32_t turn_seen = 0;
      if (threadIdx.x == 0 && p.d_q.data != nullptr) {
        turn_seen = this->sums().seen(step);
      }
      make_scores(step, stage, careful, suspicious);
      if (threadIdx.x == 0 && p.d_q.data != nullptr) {
        this->sums().begin_turn(step, turn_seen, block.turns[0]);
      }
      __syncthreads();
      if (threadIdx.x == 0 && p.d_q.data != nullptr) block.swap_turn(0, p.turns);
      sum_keys(stage, suspicious);
      if (kStages == 1 && more) {
        __syncthreads();
        this->load_step(next, 0);
      }
      if (p.d_q.data != nullptr) sum_queries(step);
      if (!more) break;
      async_wait<0>();
      __syncthreads();
    }
    __syncthreads();
    if (threadIdx.x == 0) block.end_turn();
  }
};

template <int kWidth, BackwardTiles kTiles, Features kFeatures>
void split_backward(const BackwardParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Block = SplitBlock<kWidth, kTiles, kFeatures>;
  __shared__ BlockPlace place;
  __shared__ typename Block::Place units;
  if (threadIdx.x < 32) {
    const BlockPlace found = block_place<kTiles.keys, kTiles.queries, Block::listed()>(p);
    if (threadIdx.x == 0) place = found;
  }
  __syncthreads();
  if (place.keys.exists) {
    Block(p, place, units, shared_address(shared)).run();
  } else {
    wait_for_previous_kernel();
  }
}

}  // namespace pullback::attention
