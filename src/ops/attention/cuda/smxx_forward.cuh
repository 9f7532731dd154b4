// The forward pass on tensor cores, one tile of queries a thread block (Dao 2023,
// FlashAttention-2):
//   s = scale q kᵀ (+ softcap, bias);  m = max s, kept up from tile to tile;  p = exp(s − m)
//   l = Σ p;  out = Σ p drop v / l;  lse = m + log l
//
// A warp owns 16 or 32 of the queries: their scores, sums and outputs stay in its registers. The
// block's warps share tiles of keys and values, K 0, V 0, K 1, V 1, …, which pass through a ring of
// slots in shared memory, filled by asynchronous copies while earlier tiles are worked on. With a
// block mask several thread blocks may share the tile of queries.
//
// Without softcap and bias (scale > 0) scores stay what the product gives, and the scale goes into
// the exponential.
#pragma once

#include "ops/attention/cuda/smxx_clear.cuh"
#include "ops/attention/cuda/smxx_forward_bias.cuh"
#include "ops/attention/cuda/smxx_forward_parts.cuh"
#include "ops/attention/cuda/smxx_forward_planes.cuh"
#include "ops/attention/cuda/smxx_forward_rows.cuh"
#include "ops/attention/cuda/tuning.hpp"

namespace pullback::attention {

// A pointer in shared memory, loaded where it is used: what was stored would stay in registers.
template <class T>
T* remembered(T* const& kept) {
  T* value;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(value) : "r"(shared_address(&kept)) : "memory");
  return value;
}

template <class T, int kRows, bool kBlocks>
__noinline__ void redo_row_of_block(const ForwardParams& params, int row) {
  redo_row<T, kRows, kBlocks>(params, blockIdx.x, row);
}

template <class T, ForwardTile kTile, ForwardKind kKind>
void forward(const ForwardParams& params) {
  constexpr bool kTerms = kKind >= ForwardKind::terms, kBias = kKind >= ForwardKind::bias;
  constexpr bool kStagedBias = stages_bias(kKind, sizeof(T));
  constexpr bool kDropout = kKind == ForwardKind::dropout || kTerms;
  constexpr bool kBlocks = kTerms || is_blocks(kKind);
  constexpr bool kVectors = kKind < ForwardKind::elements;
  // A loop without masks for the tiles that need none is faster, but twice the code, which kernels
  // that can do everything save where products are long. Beside a block mask no tile is whole.
  constexpr bool kWholeTiles =
      sizeof(T) == 2 && !is_blocks(kKind) &&
      (kKind < ForwardKind::terms || (kKind == ForwardKind::terms && kTile.width < 128));
  constexpr bool kMixedTiles = !kWholeTiles && !is_blocks(kKind);
  constexpr int kWidth = kTile.width, kKeys = kTile.keys, kSlots = kTile.slots;
  constexpr int kPartKeys = kBlocks ? part_keys(kTile) : kKeys, kParts = kKeys / kPartKeys;
  constexpr int kThreads = kTile.warps * 32;
  constexpr int kWarpRows = kTile.rows / kTile.warps, kRowTiles = kWarpRows / 16;
  using Layout = TileLayout<T, kWidth>;
  extern __shared__ __align__(128) char shared[];
  const uint32_t q_tile = shared_address(shared);
  const uint32_t ring = q_tile + kTile.rows * Layout::kRowBytes;
  using Bias = StagedBias<T, kTile.rows, kKeys, kThreads>;
  const uint32_t bias_tile = ring + kSlots * kKeys * Layout::kRowBytes;

  constexpr bool kAnew =
      kKind != ForwardKind::plain || kTile.width == 96 || sizeof(T) == 4 || __CUDA_ARCH__ < 900;

  const Problem& p = params.problem;
  QueryTile tile;
  if (!find_query_tile<kBlocks>(p, params.q_tiles, params.pair_group, kTile.rows, tile)) return;
  const Sequence& sequence = tile.sequence;
  const TileRows tile_rows(tile, kTile.rows);
  const int rows = tile_rows.valid;
  if (rows < tile_rows.extent) clear_rows<T>(params, tile, rows, tile_rows.extent, kThreads);
  if (rows == 0) return;
  const int first_query = static_cast<int>(tile.first);
  const SequenceBand band(p.band, sequence);
  const Dropout dropout = kDropout ? p.dropout.for_warp() : p.dropout;

  const int64_t kv_head = tile.head / p.group;
  const auto first_of = [&](const HeadRows& rows_of, int64_t row, int64_t head) {
    return static_cast<const T*>(rows_of.data) + tile.batch * rows_of.batch + row * rows_of.row +
           head * rows_of.head;
  };
  using KeyLoader = TileLoader<T, kPartKeys, kWidth, kThreads, kVectors, true>;
  // Where K and V begin, and the tile's rows of out, the bias and lse; in shared memory, as
  // registers are short. A barrier comes before they are read.
  __shared__ const T* first_rows[kBias ? 4 : 3];
  __shared__ float* first_lse;
  if (threadIdx.x == 0) {
    first_rows[0] = first_of(params.k, sequence.k_begin, kv_head);
    first_rows[1] = first_of(params.v, sequence.k_begin, kv_head);
    first_rows[2] = first_of(params.out, sequence.q_begin + tile.first, tile.head);
    if constexpr (kBias) {
      const Plane& bias = params.bias;
      first_rows[3] = static_cast<const T*>(bias.data) + tile.batch * bias.batch +
                      tile.head * bias.head + tile.first * bias.query;
    }
    first_lse = static_cast<float*>(params.lse.data) + tile.batch * params.lse.batch +
                tile.head * params.lse.head + (sequence.q_begin + tile.first) * params.lse.row;
  }
  using Tiles = KeyTiles<kPartKeys, kParts>;
  const Tiles key_tiles = kBlocks && p.blocks.given()
                              ? Tiles(p.blocks, tile.batch, tile.head, tile.owner)
                              : Tiles(band, first_query, first_query + rows - 1);
  const bool with_bias = kBias && (!kTerms || params.bias.data != nullptr);
  // Item 2 n is the n-th tile of K, 2 n + 1 that of V and of the bias.
  const auto load_item = [&](int item) {
    if (item < 2 * key_tiles.count) {
      const uint32_t slot = ring + item % kSlots * (kKeys * Layout::kRowBytes);
      const bool is_value = item % 2 != 0;
      const HeadRows& from = is_value ? params.v : params.k;
      const KeyLoader loader(remembered(first_rows[is_value]), from.row, from.element,
                             is_value ? p.value_dim : p.head_dim);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int key = key_tiles.key(item / 2, part);
        loader.load(slot + part * (kPartKeys * Layout::kRowBytes), key, band.keys - key);
      }
      if constexpr (kStagedBias) {
        if (with_bias && is_value) {
          const int key = key_tiles.key(item / 2, 0);
          Bias::template load<kTerms>(bias_tile, remembered(first_rows[3]) + key * params.bias.key,
                                      params.bias, rows, band.keys - key, params.bias_vectors != 0);
        }
      }
    }
    async_commit();
  };
  TileLoader<T, kTile.rows, kWidth, kThreads, kVectors>(
      first_of(params.q, sequence.q_begin + tile.first, tile.head), params.q.row, params.q.element,
      p.head_dim)
      .load(q_tile, 0, rows);
  __syncthreads();
#pragma unroll
  for (int item = 0; item < kSlots - 1; ++item) load_item(item);

  struct Warp : WarpRows {
    int query;
    Warp(int first_query, int rows_of_tile) {
      const int thread = thread_number<kAnew>();
      lane = thread % 32;
      // Warps of one number share a processor of the multiprocessor, and the last rows of a causal
      // tile see the most keys: some thread blocks count rows the other way round.
      const int number = blockIdx.x & 4 ? kTile.warps - 1 - thread / 32 : thread / 32;
      first_row = number * kWarpRows;
      rows = rows_of_tile - first_row < kWarpRows ? rows_of_tile - first_row : kWarpRows;
      query = first_query + first_row;
    }
    // Whether one of the rows sees one of the keys.
    bool sees(const SequenceBand& band, int key, int count) const {
      return rows > 0 && seen_by_some(band, query, query + rows - 1).meets(key, count);
    }
  };
  // What is made of these is not kept either.
  struct Pair {
    int64_t batch, head;
  };
  const auto fresh_pair = [&] {
    int batch = tile.batch, head = tile.head;
    asm volatile("" : "+r"(batch), "+r"(head));
    return Pair{batch, head};
  };
  const KeySpan unmasked = seen_by_all(band, first_query, first_query + rows - 1);
  // From scores to logits.
  const float score_scale = kTerms ? score_unit(p) : p.scale;
  const float scale = with_bias || (kTerms && !(score_scale > kLeastScale)) ? 1.0f : score_scale;
  const float unit = scale * kLog2E;

  const auto add_terms = [&](float(&s)[kRowTiles][kKeys / 8][4], int n, const Warp& warp) {
    if (kTerms && p.softcap > 0) take_tanh<T>(s, p.inner_scale);
    if constexpr (kStagedBias) {
      if (with_bias) add_bias(s, score_scale, Bias(bias_tile, warp.first_row, warp.lane));
    } else if constexpr (kTerms) {
      const int key = key_tiles.key(n, 0);
      const float* const first =
          remembered(first_rows[3]) + warp.first_row * params.bias.query + key * params.bias.key;
      if (with_bias) {
        add_bias(s, score_scale,
                 DirectBias{first, params.bias.query, params.bias.key, warp.rows, band.keys - key,
                            params.bias_vectors != 0, warp.lane});
      }
    }
    if (kTerms && !with_bias && scale != score_scale) scale_scores(s, score_scale);
  };

  // f32 is split in planes of f16, tile by tile.
  constexpr bool kPlanes = sizeof(T) == 4;
  __shared__ uint32_t largest[2][kTile.warps];  // of K and V
  float q_unit = 1;
  if constexpr (kPlanes) {
    async_wait<0>();
    __syncthreads();
    q_unit = split_arrived<kTile.rows, kWidth, kThreads>(q_tile, largest[1]);
  }

  RunningRows<kRowTiles, kWidth / 8> state;
  int n = 0;
  // On the edge some of the queries may not see some of the keys. Unrolled: where whole tiles have
  // a loop of their own `edge` is a constant.
#pragma unroll
  for (int loop = kWholeTiles ? 0 : 1; loop < 2; ++loop) {
    for (; n < (loop != 0 ? key_tiles.count : key_tiles.whole); ++n) {
      const bool edge = loop != 0 && !(kMixedTiles && n < key_tiles.whole);
      const Warp warp(first_query, rows);
      constexpr uint32_t kAllSquares = kBlocks ? all_squares(kPartKeys, kWarpRows) : 0;
      const auto squares = [&](int part) {
        return key_tiles.squares(n, part) >> warp.first_row / 16 & kAllSquares;
      };
      int key[kParts];
      bool works = !edge && warp.rows > 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        key[part] = key_tiles.key(n, part);
        if (edge) {
          works =
              works || (warp.sees(band, key[part], kPartKeys) && (!kBlocks || squares(part) != 0));
        }
      }
      float s[kRowTiles][kKeys / 8][4];
      async_wait<kSlots - 2>();
      __syncthreads();
      load_item(2 * n + kSlots - 1);
      const uint32_t q_rows = q_tile + warp.first_row * Layout::kRowBytes;
      const uint32_t k_tile = ring + 2 * n % kSlots * (kKeys * Layout::kRowBytes);
      if constexpr (kPlanes) {
        const float k_unit = split_arrived<kKeys, kWidth, kThreads>(k_tile, largest[0]);
        if (works) plane_scores<kWidth>(s, q_rows, k_tile, q_unit * k_unit, warp.lane);
      } else if (works) {
        score_product<T, kWidth>(s, q_rows, k_tile, warp.lane);
      }
      async_wait<kSlots - 2>();
      __syncthreads();
      load_item(2 * n + kSlots);
      const uint32_t v_tile = ring + (2 * n + 1) % kSlots * (kKeys * Layout::kRowBytes);
      float v_unit = 1;
      if constexpr (kPlanes) {
        v_unit = split_arrived<kKeys, kWidth, kThreads>(v_tile, largest[1]);
      }
      if (works) {
        const int lane = thread_number<kAnew>() % 32;
        if constexpr (kBias) add_terms(s, n, Warp(first_query, rows));
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          constexpr int kTiles = kPartKeys / 8;
          const int first_n = part * kTiles, end_n = first_n + kTiles;
          if (edge && !unmasked.covers(key[part], kPartKeys)) {
            hide(s, first_n, end_n, band, warp.query, key[part], lane);
          }
          if constexpr (kBlocks) {
            if (squares(part) != kAllSquares) hide_squares(s, first_n, end_n, squares(part), lane);
          }
        }
        state.template take<kBias>(s, unit);
        if constexpr (kDropout) {
          static_assert(kParts == 1);
          if (p.dropout.active()) {
            const auto [batch, head] = fresh_pair();
            const uint64_t plane = static_cast<uint64_t>(batch) * p.heads + head;
            drop(s, dropout, plane, warp.query, key[0], lane);
          }
        }
        if constexpr (kPlanes) {
          plane_values<kWidth>(state.out, s, v_tile, v_unit, lane);
        } else {
          value_product<T, kWidth>(state.out, s, v_tile, lane);
        }
      }
    }
  }
  async_wait<0>();
  if (key_tiles.count == 0 && !kPlanes)
    __syncthreads();  // the queries have arrived before they are replaced
  if constexpr (is_blocks(kKind)) {
    const SeenOwner owner = p.blocks.owners[tile.owner];
    if (owner.parts > 1) {
      const auto [batch, head] = fresh_pair();
      const Warp own(first_query, rows);
      const int thread = own.first_row / kWarpRows * 32 + own.lane;
      if (!join_parts<kThreads>(state, params, owner, batch * p.heads + head, unit, thread)) return;
    }
  }
  const Warp warp(first_query, rows);
  if (warp.rows <= 0) return;
  struct Place {
    const ForwardParams& params;
    const T* const& first_out;
    float* const& first_lse;
    T* out() const { return const_cast<T*>(remembered(first_out)); }
    float* lse() const { return remembered(first_lse); }
    int columns_before() const { return 0; }
    void redo(int row) const { redo_row_of_block<T, kTile.rows, kBlocks>(params, row); }
  };
  finish_rows<T, kVectors, kBias>(params, state, q_tile + warp.first_row * Layout::kRowBytes, warp,
                                  scale, unit, Place{params, first_rows[2], first_lse});
}

}  // namespace pullback::attention
