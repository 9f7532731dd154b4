// The forward pass on tensor cores, one tile of queries a thread block (Dao 2023,
// FlashAttention-2):
//   s = scale q kᵀ (+ softcap, bias);  m = max s, kept up from tile to tile;  p = exp(s − m)
//   l = Σ p;  out = Σ p drop v / l;  lse = m + log l
//
// A warp owns 16 or 32 of the queries: their scores, sums and outputs stay in its registers. The
// block's warps share tiles of keys and values, K 0, V 0, K 1, V 1, …, which pass through a ring of
// slots in shared memory, filled by asynchronous copies while earlier tiles are worked on.
//
// Without softcap and bias (kTerms false, scale > 0) scores stay what the product gives, and the
// scale goes into the exponential.
#pragma once

#include "ops/attention/cuda/smxx_clear.cuh"
#include "ops/attention/cuda/smxx_forward_planes.cuh"
#include "ops/attention/cuda/smxx_plain_row.cuh"
#include "ops/attention/cuda/smxx_scores.cuh"
#include "ops/attention/cuda/smxx_tiles.cuh"
#include "ops/attention/cuda/tuning.hpp"

namespace pullback::attention {

// The running maximum follows the true one only when that is larger by this much: sums then grow to
// 2^8 at most, and the accumulators are rescaled a few times a row instead of at every tile.
inline constexpr float kSlack = 8;

// Two warps' lanes 4 g … 4 g + 3 share a row.
template <class Combine>
float across_row(float value, const Combine& combine) {
  value = combine(value, __shfl_xor_sync(kAllLanes, value, 1));
  return combine(value, __shfl_xor_sync(kAllLanes, value, 2));
}

template <class T>
float quotient(float a, float b) {
  return sizeof(T) == 4 ? a / b : __fdividef(a, b);
}

// State of the softmax of a warp's rows, and their outputs.
template <int kRowTiles, int kColumnTiles>
struct RunningRows {
  float maximum[kRowTiles][2], sum[kRowTiles][2];  // the sums of this lane's keys
  float out[kRowTiles][kColumnTiles][4];

  RunningRows() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[m][half] = -infinity<float>();
        sum[m][half] = 0;
      }
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][n][e] = 0;
      }
    }
  }

  // Scores become weights; `unit` is what they are to be multiplied by.
  template <int kKeyTiles>
  void take(float (&s)[kRowTiles][kKeyTiles][4], float unit) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float largest[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float value = fmaxf(s[m][0][2 * half], s[m][0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < kKeyTiles; ++n) {
          value = fmaxf(value, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        }
        largest[half] = across_row(value, [](float a, float b) { return fmaxf(a, b); });
      }
      const bool rises = (largest[0] - maximum[m][0]) * unit > kSlack ||
                         (largest[1] - maximum[m][1]) * unit > kSlack;
      if (__any_sync(kAllLanes, rises)) raise(m, largest, unit);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // A row that has seen nothing but −inf: any finite number keeps the weights 0.
        const float shift =
            maximum[m][half] == -infinity<float>() ? 0 : __fmul_rn(maximum[m][half], unit);
        float added = 0;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][n][2 * half + e];
            x = exp2_fast(x * unit - shift);
            added += x;
          }
        }
        sum[m][half] += added;
      }
    }
  }

  void raise(int m, const float (&largest)[2], float unit) {
    float correction[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float raised = fmaxf(maximum[m][half], largest[half]);
      correction[half] =
          maximum[m][half] == raised ? 1 : exp2_fast((maximum[m][half] - raised) * unit);
      maximum[m][half] = raised;
      sum[m][half] *= correction[half];
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[m][n][e] *= correction[e / 2];
    }
  }
};

template <class T, int kWidth, int kThreads>
void store_rows(const HeadRows& to, T* first, uint32_t tile, int rows, int columns, bool vectors) {
  using Layout = TileLayout<T, kWidth>;
  const int thread = static_cast<int>(threadIdx.x % kThreads);
  if (vectors) {
    for (int at = thread; at < rows * Layout::kChunks; at += kThreads) {
      const int row = at / Layout::kChunks, chunk = at % Layout::kChunks;
      const int column = chunk * Layout::kChunk;
      if (column >= columns) continue;
      union {
        uint32_t word[4];
        Vector<T> vector;
      } piece;
      load_shared(piece.word, tile + Layout::offset(row, chunk));
      store_vector(first + row * to.row + column, piece.vector);
    }
  } else {
    for (int at = thread; at < rows * kWidth; at += kThreads) {
      const int row = at / kWidth, column = at % kWidth;
      if (column >= columns) continue;
      const uint32_t word = load_shared_word(tile + Layout::offset(row, column / Layout::kChunk) +
                                             column % Layout::kChunk * int{sizeof(T)} / 4 * 4);
      T element;
      if constexpr (sizeof(T) == 4) {
        element = __uint_as_float(word);
      } else {
        element.bits = static_cast<uint16_t>(column % 2 ? word >> 16 : word);
      }
      first[row * to.row + column * to.element] = element;
    }
  }
}

// 0 · NaN: what a row does not see may have reached it. Finds the tile anew, so that the fast path
// need not remember it.
template <class T, int kRows, bool kBlocks>
__noinline__ void redo_row(const ForwardParams& params, int row) {
  QueryTile tile;
  if (!find_query_tile(params.problem, params.q_tiles, params.pair_group, kRows, tile)) return;
  plain_row<T, kBlocks>(params, tile.sequence, tile.batch, tile.head, tile.first + row);
}

template <class T, ForwardTile kTile, ForwardKind kKind>
void forward(const ForwardParams& params) {
  constexpr bool kDropout = kKind >= ForwardKind::dropout, kTerms = kKind >= ForwardKind::terms;
  constexpr bool kBlocks = kKind >= ForwardKind::blocks;
  constexpr bool kVectors = kKind < ForwardKind::elements;
  constexpr int kWidth = kTile.width, kKeys = kTile.keys, kSlots = kTile.slots;
  constexpr int kThreads = kTile.warps * 32;
  constexpr int kWarpRows = kTile.rows / kTile.warps, kRowTiles = kWarpRows / 16;
  using Layout = TileLayout<T, kWidth>;
  extern __shared__ __align__(128) char shared[];
  const uint32_t q_tile = shared_address(shared);
  const uint32_t ring = q_tile + kTile.rows * Layout::kRowBytes;

  constexpr bool kAnew = kKind != ForwardKind::plain || kTile.width == 96 || __CUDA_ARCH__ < 900;

  const Problem& p = params.problem;
  QueryTile tile;
  if (!find_query_tile(p, params.q_tiles, params.pair_group, kTile.rows, tile)) return;
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
  using KeyLoader = TileLoader<T, kKeys, kWidth, kThreads, kVectors, true>;
  // Where K and V begin; in shared memory, as registers are short. Each thread reads what it wrote.
  __shared__ const T* first_rows[2];
  first_rows[0] = first_of(params.k, sequence.k_begin, kv_head);
  first_rows[1] = first_of(params.v, sequence.k_begin, kv_head);
  const KeyTiles<kKeys> key_tiles =
      kBlocks && p.blocks.given()
          ? KeyTiles<kKeys>(p.blocks, tile.batch, tile.head, tile.first / kTile.rows)
          : KeyTiles<kKeys>(band, first_query, first_query + rows - 1);
  // Item 2 n is the n-th tile of K, 2 n + 1 that of V.
  const auto load_item = [&](int item) {
    if (item < 2 * key_tiles.count) {
      const int key = key_tiles.key(item / 2);
      const int valid = band.keys - key;
      const uint32_t slot = ring + item % kSlots * (kKeys * Layout::kRowBytes);
      const bool is_value = item % 2 != 0;
      const HeadRows& from = is_value ? params.v : params.k;
      const T* first;
      asm volatile("ld.shared.u64 %0, [%1];"
                   : "=l"(first)
                   : "r"(shared_address(&first_rows[is_value]))
                   : "memory");
      KeyLoader(first, from.row, from.element, is_value ? p.value_dim : p.head_dim)
          .load(slot, key, valid);
    }
    async_commit();
  };
  TileLoader<T, kTile.rows, kWidth, kThreads, kVectors>(
      first_of(params.q, sequence.q_begin + tile.first, tile.head), params.q.row, params.q.element,
      p.head_dim)
      .load(q_tile, 0, rows);
#pragma unroll
  for (int item = 0; item < kSlots - 1; ++item) load_item(item);

  struct Warp {
    int lane, first_row, rows, query;  // the rows are negative or 0 past the last query
    Warp(int first_query, int rows_of_tile) {
      const int thread = thread_number<kAnew>();
      lane = thread % 32;
      first_row = thread / 32 * kWarpRows;
      rows = rows_of_tile - first_row < kWarpRows ? rows_of_tile - first_row : kWarpRows;
      query = first_query + first_row;
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
  const float scale = kTerms ? 1 : p.scale;  // from scores to logits
  const float unit = scale * kLog2E;

  // One tile ahead, where registers allow it.
  constexpr bool kAhead = sizeof(T) == 2 && kWidth < 256;
  BiasTile<T, kRowTiles, kKeys / 8> bias_tile;
  const bool with_bias = kTerms && params.bias.data != nullptr;
  const auto load_bias = [&](int n) {
    if (!with_bias || n >= key_tiles.count) return;
    const Warp warp(first_query, rows);
    const auto [batch, head] = fresh_pair();
    const T* const first = static_cast<const T*>(params.bias.data) + batch * params.bias.batch +
                           head * params.bias.head;
    bias_tile.load(params, first, warp.query, first_query + rows, key_tiles.key(n), band.keys,
                   warp.lane);
  };
  if (kAhead) load_bias(0);

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
  for (int n = 0; n < key_tiles.count; ++n) {
    const int key = key_tiles.key(n);
    const Warp warp(first_query, rows);
    constexpr uint32_t kAllSquares = kBlocks ? all_squares(kKeys, kWarpRows) : 0;
    const auto squares = [&] { return key_tiles.squares(n) >> warp.first_row / 16 & kAllSquares; };
    const bool works =
        warp.rows > 0 &&
        seen_by_some(band, warp.query, warp.query + warp.rows - 1).meets(key, kKeys) &&
        (!kBlocks || squares() != 0);
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
      const auto q_place = place_of_rows<T, kWidth>(warp.lane);
      score_product<T, kWidth, kRowTiles, kKeys>(
          s,
          [&](int step, Operand<T>(&q)[kRowTiles]) {
            load_queries<T, kWidth, kRowTiles>(q, q_rows, q_place, step);
          },
          k_tile, warp.lane);
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
      if constexpr (kTerms) {
        if (!kAhead) load_bias(n);
        add_terms<T>(s, p, with_bias, bias_tile);
        if (kAhead) load_bias(n + 1);
      }
      if (!unmasked.covers(key, kKeys)) hide(s, band, warp.query, key, lane);
      if constexpr (kBlocks) {
        if (squares() != kAllSquares) hide_squares(s, squares(), lane);
      }
      state.take(s, unit);
      if constexpr (kDropout) {
        if (p.dropout.active()) {
          const auto [batch, head] = fresh_pair();
          const uint64_t plane = static_cast<uint64_t>(batch) * p.heads + head;
          drop(s, dropout, plane, warp.query, key, lane);
        }
      }
      if constexpr (kPlanes) {
        plane_values<kWidth>(state.out, s, v_tile, v_unit, lane);
      } else {
        value_product<T, kWidth, kRowTiles, kKeys>(state.out, s, v_tile, lane);
      }
    } else if (kAhead) {
      load_bias(n + 1);
    }
  }
  async_wait<0>();
  if (key_tiles.count == 0 && !kPlanes)
    __syncthreads();  // the queries have arrived before they are replaced
  const Warp warp(first_query, rows);
  if (warp.rows <= 0) return;
  const uint32_t q_rows = q_tile + warp.first_row * Layout::kRowBytes;
  const int lane = warp.lane;

  // The tile is found anew, so that the loop need not remember it.
  QueryTile to;
  if (!find_query_tile(p, params.q_tiles, params.pair_group, kTile.rows, to)) return;
  const int64_t first_out = to.sequence.q_begin + to.first + warp.first_row;
  // The warp's outputs take the place of its queries.
  uint32_t redo = 0;  // rows, bit 16 m + row
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = across_row(state.sum[m][half], [](float a, float b) { return a + b; });
      const float factor = sum == 0 ? 0 : quotient<T>(p.keep_scale, sum);
      float finite = 0;
      const int row = m * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const float left = state.out[m][n][2 * half] * factor;
        const float right = state.out[m][n][2 * half + 1] * factor;
        finite += left * 0 + right * 0;
        const int column = n * 8 + lane % 4 * 2;
        const uint32_t at = q_rows + Layout::offset(row, column / Layout::kChunk) +
                            column % Layout::kChunk * static_cast<int>(sizeof(T));
        if constexpr (sizeof(T) == 2) {
          store_shared(at, pack<T>(left, right));
        } else {
          store_shared(at, __float_as_uint(left));
          store_shared(at + 4, __float_as_uint(right));
        }
      }
      const unsigned bad = __ballot_sync(kAllLanes, finite != 0);
#pragma unroll
      for (int g = 0; g < 8; ++g) {
        if ((bad >> 4 * g & 15) != 0) redo |= 1u << (m * 16 + half * 8 + g);
      }
      if (params.lse.data != nullptr && lane % 4 == 0 && row < warp.rows) {
        float* const lse = static_cast<float*>(params.lse.data) + to.batch * params.lse.batch +
                           to.head * params.lse.head + (first_out + row) * params.lse.row;
        // The weights' shift was rounded. Relative to the largest's own weight nothing is left of
        // that, and a row that sees one key has its score exactly.
        const float largest = state.maximum[m][half], shift = __fmul_rn(largest, unit);
        const float own = exp2_fast(__fmaf_rn(largest, unit, -shift));
        *lse = sum == 0 ? -infinity<float>() : largest * scale + kLn2 * log2_fast(sum / own);
      }
    }
  }
  __syncwarp();
  T* const out = static_cast<T*>(params.out.data) + to.batch * params.out.batch +
                 to.head * params.out.head + first_out * params.out.row;
  store_rows<T, kWidth, 32>(params.out, out, q_rows, warp.rows, p.value_dim, kVectors);
  __syncwarp();
  for (; redo != 0; redo &= redo - 1) {
    const int row = __ffs(static_cast<int>(redo)) - 1;
    if (row < warp.rows) redo_row<T, kTile.rows, kBlocks>(params, warp.first_row + row);
  }
}

}  // namespace pullback::attention
