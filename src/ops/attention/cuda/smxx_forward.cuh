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

#include "device/memory.cuh"
#include "ops/attention/cuda/smxx_clear.cuh"
#include "ops/attention/cuda/smxx_forward_bias.cuh"
#include "ops/attention/cuda/smxx_forward_parts.cuh"
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

// Whether weights are exp2(score · unit − product) for this product of a maximum and the unit:
// what its rounding makes them wrong by must not be more than sums and lse make good. Else the
// maximum is taken from the scores first: a bias may be a mask of −3e38. Products that large are
// left to redo_row().
inline bool has_shift(float product) { return fabsf(product) < 0x1p24f; }

// State of the softmax of a warp's rows, and their outputs.
template <int kRowTiles, int kColumnTiles>
struct RunningRows {
  static constexpr int kRows = kRowTiles, kColumns = kColumnTiles;
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

  // Scores become weights; `unit` is what they are to be multiplied by. Unless kHuge, weights of
  // rows whose maximum has no shift come to nothing.
  template <bool kHuge, int kKeyTiles>
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
      const bool huge =
          kHuge && (!has_shift(maximum[m][0] * unit) || !has_shift(maximum[m][1] * unit));
      if (__any_sync(kAllLanes, rises || huge)) {
        raise(m, largest, unit);
        if (kHuge) subtract_huge(s[m], m, unit);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Of a row that has seen nothing but −inf any finite number keeps the weights 0.
        const bool none =
            kHuge ? !has_shift(maximum[m][half] * unit) : maximum[m][half] == -infinity<float>();
        const float shift = none ? 0 : __fmul_rn(maximum[m][half], unit);
        float added = 0;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[m][n][2 * half + e];
            x = exp2_approx(x * unit - shift);
            added += x;
          }
        }
        sum[m][half] += added;
      }
    }
  }

  // Scores of rows whose maximum has no shift, less that maximum. A row that has seen nothing but
  // −inf keeps it.
  template <int kKeyTiles>
  void subtract_huge(float (&s)[kKeyTiles][4], int m, float unit) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float own = maximum[m][half];
      const float less = has_shift(own * unit) || own == -infinity<float>() ? 0 : own;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) s[n][2 * half + e] -= less;
      }
    }
  }

  void raise(int m, const float (&largest)[2], float unit) {
    float correction[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float raised = fmaxf(maximum[m][half], largest[half]);
      correction[half] =
          maximum[m][half] == raised ? 1 : exp2_approx((maximum[m][half] - raised) * unit);
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

// A warp's rows, of which there are `rows`, from shared memory.
template <class T, int kWidth, int kRows>
void store_rows(const HeadRows& to, T* first, uint32_t tile, int rows, int columns, bool vectors) {
  using Layout = TileLayout<T, kWidth>;
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  if (vectors) {
    constexpr int kAcross = Layout::kChunks % 8 == 0 ? 8 : 4, kDown = kWarpSize / kAcross;
    const int row = lane / kAcross, chunk = lane % kAcross;
    T* own = first + row * to.row + chunk * Layout::kChunk;
#pragma unroll
    for (int down = 0; down < kRows; down += kDown) {
#pragma unroll
      for (int across = 0; across < Layout::kChunks; across += kAcross) {
        if (row + down >= rows || (chunk + across) * Layout::kChunk >= columns) continue;
        union {
          uint32_t word[4];
          Vector<T> vector;
        } piece;
        load_shared(piece.word, tile + Layout::offset(row + down, chunk + across));
        store_vector(own + across * Layout::kChunk, piece.vector);
      }
      own += kDown * to.row;
    }
  } else {
    for (int at = lane; at < rows * kWidth; at += kWarpSize) {
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
  if (!find_query_tile<kBlocks>(params.problem, params.q_tiles, params.pair_group, kRows, tile)) {
    return;
  }
  plain_row<T, kBlocks>(params, tile.sequence, tile.batch, tile.head, tile.first + row);
}

// A pointer in shared memory, loaded where it is used: what was stored would stay in registers.
template <class T>
T* remembered(T* const& kept) {
  T* value;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(value) : "r"(shared_address(&kept)) : "memory");
  return value;
}

template <class T, ForwardTile kTile, ForwardKind kKind>
void forward(const ForwardParams& params) {
  constexpr bool kTerms = kKind >= ForwardKind::terms, kBias = kKind >= ForwardKind::bias;
  constexpr bool kStagedBias = stages_bias(kKind, sizeof(T));
  constexpr bool kDropout = kKind == ForwardKind::dropout || kTerms;
  constexpr bool kBlocks = kTerms || is_blocks(kKind);
  constexpr bool kVectors = kKind < ForwardKind::elements;
  // A loop without masks for the tiles that need none: faster, but twice the code.
  constexpr bool kWholeTiles =
      sizeof(T) == 2 && !is_blocks(kKind) && kKind != ForwardKind::elements;
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

  struct Warp {
    int lane, first_row, rows, query;  // the rows are negative or 0 past the last query
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
  // Unrolled: `edge` is a constant. On the edge some of the queries may not see some of the keys.
#pragma unroll
  for (int edge = kWholeTiles ? 0 : 1; edge < 2; ++edge) {
    for (; n < (edge ? key_tiles.count : key_tiles.whole); ++n) {
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
  const uint32_t q_rows = q_tile + warp.first_row * Layout::kRowBytes;
  const int lane = warp.lane;

  // The warp's outputs take the place of its queries.
  float sums[kRowTiles][2];
  unsigned bad[kRowTiles][2];  // lanes that hold NaN or infinity
  const uint32_t pair_bytes = lane % 4u * (2 * sizeof(T));
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = across_row(state.sum[m][half], [](float a, float b) { return a + b; });
      const float factor = sum == 0 ? 0 : quotient<T>(p.keep_scale, sum);
      sums[m][half] = sum;
      float finite = 0;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const float left = state.out[m][n][2 * half] * factor;
        const float right = state.out[m][n][2 * half + 1] * factor;
        finite = __fmaf_rn(right, 0.0f, __fmaf_rn(left, 0.0f, finite));
        const int chunk = n * 8 / Layout::kChunk + static_cast<int>(pair_bytes / 16);
        const uint32_t at =
            q_rows + Layout::offset(row_at(m, half) + first_row_of(lane), chunk) + pair_bytes % 16;
        if constexpr (sizeof(T) == 2) {
          store_shared(at, pack<T>(left, right));
        } else {
          store_shared(at, __float_as_uint(left));
          store_shared(at + 4, __float_as_uint(right));
        }
      }
      bad[m][half] = __ballot_sync(kAllLanes, finite != 0);
    }
  }
  // Of the lanes that share rows each finishes the lse of one.
  if (params.lse.data != nullptr) {
    float largest = 0, sum = 0;
    int row = kWarpRows;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool own = lane % 4 == 2 * m + half;
        float own_maximum = state.maximum[m][half], own_sum = sums[m][half];
        // Else the compiler chooses an address, in local memory.
        asm volatile("" : "+f"(own_maximum), "+f"(own_sum));
        largest = own ? own_maximum : largest;
        sum = own ? own_sum : sum;
        row = own ? row_at(m, half) + first_row_of(lane) : row;
      }
    }
    if (row < warp.rows) {
      // The weights' shift was rounded: by how much, the fused product tells. A row that sees one
      // key has its score exactly.
      const float shift = __fmul_rn(largest, unit);
      const float rounding = has_shift(shift) ? __fmaf_rn(largest, unit, -shift) : 0;
      const float more = sum == exp2_approx(rounding) ? 0 : kLn2 * (log2_fast(sum) - rounding);
      remembered(first_lse)[(warp.first_row + row) * params.lse.row] =
          sum == 0 ? -infinity<float>() : largest * scale + more;
    }
  }
  __syncwarp();
  store_rows<T, kWidth, kWarpRows>(
      params.out, const_cast<T*>(remembered(first_rows[2])) + warp.first_row * params.out.row,
      q_rows, warp.rows, p.value_dim, kVectors);
  unsigned any = 0;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (!kBias) {
        const float largest = state.maximum[m][half];
        const bool lost = !has_shift(largest * unit) && largest != -infinity<float>();
        bad[m][half] |= __ballot_sync(kAllLanes, lost);
      }
      any |= bad[m][half];
    }
  }
  if (any == 0) return;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll 1
      for (int g = 0; g < 8; ++g) {
        const int row = row_at(m, half) + g;
        if ((bad[m][half] >> 4 * g & 15) != 0 && row < warp.rows) {
          redo_row<T, kTile.rows, kBlocks>(params, warp.first_row + row);
        }
      }
    }
  }
}

}  // namespace pullback::attention
