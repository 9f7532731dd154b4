// d_bias of a bias that is broadcast: dS summed over the batch, the heads, the queries or the keys
// along which it is. A block owns a tile of the bias and makes dS of everything that maps to it
// once more, in a fixed order; where tiles are few, `bias_parts` blocks share one and leave their
// sums in the workspace, for another kernel to add up in order.
#pragma once

#include "device/async_copy.cuh"
#include "ops/attention/cuda/smxx_backward_fragments.cuh"
#include "ops/attention/cuda/smxx_backward_scores.cuh"

namespace pullback::attention {

// Statistics of kQueries of a plane from a first one on; of queries past the last tile, which are
// not seen, zeros.
template <int kQueries, int kThreads, int kStatsRows>
void copy_stats(const BackwardParams& p, uint32_t to, int64_t plane, int first_query) {
  using Stats = StatsTile<float, kStatsRows>;
#pragma unroll
  for (int first = 0; first < kQueries; first += kThreads * 2) {
    const int r = first + static_cast<int>(threadIdx.x) * 2;
    if (r >= kQueries) continue;
    const int tile = (first_query + r) / kStatsRows;
    const bool inside = tile < p.q_tiles;
    const Stats& stats =
        static_cast<const Stats*>(p.stats)[plane * p.q_tiles + (inside ? tile : 0)];
    async_copy_or_zero(to + r * 8, &stats.row[(first_query + r) % kStatsRows], inside);
  }
}

// One batch item, head, tile of queries and tile of keys.
struct BiasItem {
  int64_t batch, head;
  int query_tile, key_tile;
};

// What maps to the tile of the bias that a thread block owns, or to its part of a tile: of each
// dimension all positions, or the tile's own one. Their digits count up, for divisions of 64 bits
// would take as long as an item.
struct BiasItems {
  bool all_keys, all_queries;
  int part;

  BiasItems(const BackwardParams& p, int tile_keys, int tile_queries) {
    const Problem& problem = p.problem;
    const BiasShape& shape = p.bias_shape;
    const int64_t q_tiles = (problem.query + tile_queries - 1) / tile_queries;
    const int64_t k_tiles = (problem.key + tile_keys - 1) / tile_keys;
    all_keys = shape.key == 1 && problem.key > 1;
    all_queries = shape.query == 1 && problem.query > 1;
    keys_ = all_keys ? static_cast<int>(k_tiles) : 1;
    queries_ = all_queries ? static_cast<int>(q_tiles) : 1;
    heads_ = shape.head > 1 ? 1 : problem.heads;
    int64_t index = blockIdx.x;
    const auto digit = [&index](int64_t size) {
      const int64_t value = index % size;
      index /= size;
      return value;
    };
    own_.key_tile = static_cast<int>(digit(all_keys ? 1 : k_tiles));
    own_.query_tile = static_cast<int>(digit(all_queries ? 1 : q_tiles));
    own_.head = digit(shape.head), own_.batch = digit(shape.batch);
    part = static_cast<int>(index);
    const int64_t count = (shape.batch > 1 ? 1 : problem.batch) * heads_ * queries_ * keys_;
    int64_t begin = count * part / p.bias_parts;
    left_ = count * (part + 1) / p.bias_parts - begin;
    key_ = static_cast<int>(begin % keys_), begin /= keys_;
    query_ = static_cast<int>(begin % queries_), begin /= queries_;
    head_ = static_cast<int>(begin % heads_), batch_ = begin / heads_;
  }

  // The first one of the tile.
  const BiasItem& own() const { return own_; }
  // The next one of the part; false: there is none.
  bool next(BiasItem& item) {
    if (left_ == 0) return false;
    --left_;
    item = {own_.batch + batch_, own_.head + head_, own_.query_tile + query_, own_.key_tile + key_};
    if (++key_ < keys_) return true;
    key_ = 0;
    if (++query_ < queries_) return true;
    query_ = 0;
    if (++head_ < heads_) return true;
    head_ = 0, ++batch_;
    return true;
  }

 private:
  BiasItem own_;
  int keys_, queries_, heads_;
  int key_, query_, head_;  // of the next one, as is the next line
  int64_t batch_, left_;
};

// Warps stand in kKeys / 32 rows of kSide; each has 32 keys x kQueries / kSide queries.
template <class T, int kWidth, int kKeys, int kQueries, int kSide, int kStatsRows>
struct BiasBlock {
  static constexpr int kThreads = kKeys / 32 * kSide * 32;
  static constexpr int kChunks = kQueries / kSide / 32;
  static constexpr int kN = 4;  // a chunk is 32 keys x 32 queries
  using WidthTile = TileLayout<T, kWidth>;
  static constexpr uint32_t kKeyBytes = kKeys * WidthTile::kRowBytes;
  static constexpr uint32_t kQueryBytes = kQueries * WidthTile::kRowBytes;

  struct Adder {
    float (&sum)[2][kN][4];
    void begin(int) {}
    void add(int m, int n, int e, float d_s) { sum[m][n][e] += d_s; }
    void finish(int) {}
  };

  const BackwardParams& p;
  const Dropout dropout;
  const int lane, warp, key_row, query_row;
  const uint32_t k_tile, v_tile, q_tile, d_out_tile, stats_tile;
  float sum[kChunks][2][kN][4] = {};

  BiasBlock(const BackwardParams& params, uint32_t shared)
      : p(params),
        dropout(params.problem.dropout.for_warp()),
        lane(static_cast<int>(threadIdx.x % 32)),
        warp(static_cast<int>(threadIdx.x / 32)),
        key_row(warp / kSide * 32),
        query_row(warp % kSide * (kQueries / kSide)),
        k_tile(shared),
        v_tile(k_tile + kKeyBytes),
        q_tile(v_tile + kKeyBytes),
        d_out_tile(q_tile + kQueryBytes),
        stats_tile(d_out_tile + kQueryBytes) {}

  template <int kRows, bool kInterleaved>
  void load(uint32_t tile, const HeadRows& rows, int64_t batch, int64_t head, int first, int length,
            int columns) const {
    const T* const from =
        static_cast<const T*>(rows.data) + batch * rows.batch + first * rows.row + head * rows.head;
    if (p.vectors) {
      TileLoader<T, kRows, kWidth, kThreads, true, kInterleaved>(from, rows.row, rows.element,
                                                                 columns)
          .load(tile, 0, length - first);
    } else {
      TileLoader<T, kRows, kWidth, kThreads, false, kInterleaved>(from, rows.row, rows.element,
                                                                  columns)
          .load(tile, 0, length - first);
    }
  }

  void score_product(float (&result)[2][kN][4], uint32_t key_tile, uint32_t query_tile,
                     int first) const {
    const LaneRows<T, kWidth, false> keys(key_tile, lane);
    const LaneRows<T, kWidth, true> queries(query_tile, lane);
    multiply_columns<T, kWidth>(result, keys, key_row, queries, first);
  }

  void add(const BiasItem& item) {
    const int64_t batch = item.batch, head = item.head;
    const int query_tile = item.query_tile, key_tile = item.key_tile;
    TilePlace place =
        place_of<true>(p, batch * p.problem.heads + head, p.problem.heads, 0, kQueries);
    place.tile = key_tile;
    const TileRange range = query_tiles_of(place, key_tile, kKeys, kQueries);
    if (query_tile < range.begin || query_tile >= range.end) return;
    const int64_t plane = batch * p.problem.heads + head;
    const int64_t kv_head = head / p.problem.group;
    const int first_query = query_tile * kQueries, first_key = key_tile * kKeys;
    __syncthreads();
    load<kKeys, true>(k_tile, p.k, batch, kv_head, first_key, place.k_length, p.problem.head_dim);
    load<kQueries, false>(q_tile, p.q, batch, head, first_query, place.q_length,
                          p.problem.head_dim);
    copy_stats<kQueries, kThreads, kStatsRows>(p, stats_tile, plane, first_query);
    async_commit();
    load<kKeys, true>(v_tile, p.v, batch, kv_head, first_key, place.k_length, p.problem.value_dim);
    load<kQueries, false>(d_out_tile, p.d_out, batch, head, first_query, place.q_length,
                          p.problem.value_dim);
    async_commit();
    async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int first = query_row + chunk * 32;
      float s[2][kN][4], d_p[2][kN][4];
      uint32_t pt[2][kN][2], ds[2][kN][2];
      uint32_t squares = 0;
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        const int query = first_query + first + at / 2 * 16;
        const int key = first_key + key_row + at % 2 * 16;
        if (query < place.q_length && key < place.k_length &&
            p.problem.blocks.sees(batch, head, query, key)) {
          squares |= 1u << (at / 2 * 8 + at % 2);
        }
      }
      const Scores<T, kN, Features::general_blocks> scores(
          p, dropout, place, static_cast<int>(head), first_key + key_row, first_query + first,
          squares, stats_tile + first * 8, lane);
      typename Scores<T, kN, Features::general_blocks>::BiasWords bias;
      bias.load(scores);
      score_product(s, k_tile, q_tile, first);
      score_product(d_p, v_tile, d_out_tile, first);
      uint32_t kept[2];
      scores.draw(kept);
      Adder adder{sum[chunk]};
      scores.template make<true>(s, d_p, pt, ds, bias, kept, adder);
    }
  }

  // Sums over the tile's keys or queries where the bias has one of them only. The result is in row
  // or column 0 of the tile.
  void fold(bool keys, bool queries, float* shared) {
    float over_keys[kChunks][kN][2] = {};  // of each query of the lane
    if (keys) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float total = sum[chunk][0][n][c] + sum[chunk][0][n][2 + c] + sum[chunk][1][n][c] +
                          sum[chunk][1][n][2 + c];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) {
              total += __shfl_xor_sync(0xffffffffu, total, step);
            }
            over_keys[chunk][n][c] = total;
          }
        }
      }
    }
    __syncthreads();
    // shared[row of warps][query], or [column of warps][key]
    if (keys) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (lane < 4) {
              shared[warp / kSide * kQueries + query_row + chunk * 32 + 8 * n + lane * 2 + c] =
                  over_keys[chunk][n][c];
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float total = 0;
#pragma unroll
          for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
            for (int n = 0; n < kN; ++n) {
              total += sum[chunk][m][n][2 * half] + sum[chunk][m][n][2 * half + 1];
            }
          }
          total += __shfl_xor_sync(0xffffffffu, total, 1);
          total += __shfl_xor_sync(0xffffffffu, total, 2);
          if (lane % 4 == 0) {
            shared[warp % kSide * kKeys + key_row + 4 * m + 2 * half + first_key_of_row(lane)] =
                total;
          }
        }
      }
    }
    __syncthreads();
    const int length = keys ? kQueries : kKeys, warps = keys ? kKeys / 32 : kSide;
    for (int r = static_cast<int>(threadIdx.x); r < length; r += kThreads) {
      float total = shared[r];
      for (int w = 1; w < warps; ++w) total += shared[w * length + r];
      shared[r] = total;
    }
    __syncthreads();
    if (keys && queries) {
      for (int half = kQueries / 2; half > 0; half /= 2) {
        const int r = static_cast<int>(threadIdx.x);
        if (r < half) shared[r] += shared[r + half];
        __syncthreads();
      }
    }
  }
};

// Where the d_bias of a (batch, head), or a part of its sums, goes.
template <class T>
struct BiasStore {
  T* d_bias;
  float* sums;  // rather than to d_bias, unless null
  int64_t query_step, key_step;

  BiasStore(const BackwardParams& p, int part, int64_t batch, int64_t head)
      : d_bias(static_cast<T*>(p.d_bias.data) + batch * p.d_bias.batch + head * p.d_bias.head),
        sums(nullptr),
        query_step(p.d_bias.query),
        key_step(p.d_bias.key) {
    const BiasShape& own = p.bias_shape;
    if (p.bias_parts == 1) return;
    sums = p.bias_sums + ((part * own.batch + batch) * own.head + head) * (own.query * own.key);
    query_step = own.key, key_step = 1;
  }

  void operator()(int64_t query, int64_t key, float value) const {
    const int64_t at = query * query_step + key * key_step;
    if (sums == nullptr) {
      d_bias[at] = from_real<T>(value);
    } else {
      sums[at] = value;
    }
  }
};

template <class T, int kWidth, int kKeys, int kQueries, int kSide, int kStatsRows>
void bias_gradient(const BackwardParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Block = BiasBlock<T, kWidth, kKeys, kQueries, kSide, kStatsRows>;
  Block block(p, shared_address(shared));
  const BiasShape& own = p.bias_shape;
  BiasItems items(p, kKeys, kQueries);
  for (BiasItem item; items.next(item);) block.add(item);

  const BiasItem& first = items.own();
  const bool all_keys = items.all_keys, all_queries = items.all_queries;
  const BiasStore<T> store(p, items.part, first.batch, first.head);
  const int64_t first_query = int64_t{first.query_tile} * kQueries;
  const int64_t first_key = int64_t{first.key_tile} * kKeys;
  if (all_keys || all_queries) {
    float* const folded = reinterpret_cast<float*>(shared);
    block.fold(all_keys, all_queries, folded);
    const int length = all_keys ? all_queries ? 1 : kQueries : kKeys;
    const int64_t left = all_keys ? own.query - first_query : own.key - first_key;
    for (int r = static_cast<int>(threadIdx.x); r < length && r < left; r += Block::kThreads) {
      store(all_keys ? first_query + r : first_query, all_keys ? first_key : first_key + r,
            folded[r]);
    }
    return;
  }
#pragma unroll
  for (int chunk = 0; chunk < Block::kChunks; ++chunk) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < Block::kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int64_t i =
              first_query + block.query_row + chunk * 32 + 8 * n + block.lane % 4 * 2 + e % 2;
          const int64_t j =
              first_key + block.key_row + 4 * m + e / 2 * 2 + first_key_of_row(block.lane);
          if (i < own.query && j < own.key) store(i, j, block.sum[chunk][m][n][e]);
        }
      }
    }
  }
}

// Adds up the parts.
template <class T>
void combine_bias(const BackwardParams& p) {
  const BiasShape& own = p.bias_shape;
  const int64_t count = own.batch * own.head * own.query * own.key;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x; index < count;
       index += static_cast<int64_t>(gridDim.x) * kRowThreads) {
    float total = 0;
    for (int part = 0; part < p.bias_parts; ++part) total += p.bias_sums[part * count + index];
    static_cast<T*>(p.d_bias.data)[index / (own.key * own.query * own.head) * p.d_bias.batch +
                                   index / (own.key * own.query) % own.head * p.d_bias.head +
                                   index / own.key % own.query * p.d_bias.query +
                                   index % own.key * p.d_bias.key] = from_real<T>(total);
  }
}

// Before the kernel of d_k, which leaves d_bias alone where the band hides whole tiles. A warp
// takes a row.
template <class T>
void clear_bias(const BackwardParams& p) {
  const BiasShape& own = p.bias_shape;
  const int64_t rows = own.batch * own.head * own.query;
  constexpr int kRowWarps = kRowThreads / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  for (int64_t row = int64_t{blockIdx.x} * kRowWarps + threadIdx.x / kWarpSize; row < rows;
       row += int64_t{gridDim.x} * kRowWarps) {
    T* const to = static_cast<T*>(p.d_bias.data) + row / (own.query * own.head) * p.d_bias.batch +
                  row / own.query % own.head * p.d_bias.head + row % own.query * p.d_bias.query;
    int64_t done = 0;
    if (p.d_bias_vectors) {
      constexpr int kLength = kVectorLength<T>;
      done = own.key / kLength * kLength;
      for (int64_t at = lane * kLength; at < done; at += kWarpSize * kLength) {
        store_vector(to + at, Vector<T>{});
      }
    }
    for (int64_t at = done + lane; at < own.key; at += kWarpSize) to[at * p.d_bias.key] = T{};
  }
}

}  // namespace pullback::attention
