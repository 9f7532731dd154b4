// What the backward pass needs of every query row: its lse and
//   delta = out · d_out - d_lse
// A block makes the StatsTile of one tile of queries. It also zeroes the tile's turn, and d_q where
// no key is seen, as no other kernel comes there.
#pragma once

#include "device/dependent.cuh"
#include "device/float.cuh"
#include "device/memory.cuh"
#include "device/warp.cuh"
#include "ops/attention/cuda/smxx_backward_tiles.cuh"
#include "ops/attention/cuda/smxx_units.cuh"

namespace pullback::attention {

using namespace device;

// For 16-bit tensors without a bias log2 e, as probabilities are then exp2(s - lse). A bias may be
// as large as a row's mask makes it: what is left of its difference from lse is exact only in the
// units of both.
template <class T>
float lse_unit(const BackwardParams& p) {
  return sizeof(T) == 2 && p.bias.data == nullptr ? 1.4426950408889634f : 1.0f;
}

template <class R>
struct RowStats {
  R lse;  // +inf for rows that see nothing: their probabilities are exp(-inf)
  R delta;
};

// Behind the rows of a tile: whether one of them sees nothing or holds NaN or infinity. Where d_out
// holds such a value delta does too, and where q does lse is NaN or -inf, unless a softcap makes
// infinite products finite.
template <class R, int kQueries>
struct StatsTile {
  RowStats<R> row[kQueries];
  int32_t suspicious;
  float q_unit, d_out_unit;  // of f32 (smxx_planes.cuh)
  int32_t unused;
};

template <class T>
const T* head_row(const HeadRows& rows, const TilePlace& place, int64_t row) {
  return static_cast<const T*>(rows.data) + place.batch * rows.batch + row * rows.row +
         place.head * rows.head;
}

// Whether this lane's share of a row, which kLanes have, holds NaN or infinity.
template <class T, int kLanes>
bool has_extreme(const T* row, int64_t stride, int width, bool vectors, int lane) {
  bool found = false;
  const auto look_at = [&](Real<T> x) { found |= !(x - x == 0); };
  int done = 0;  // columns
  if (vectors) {
    done = width / kVectorLength<T> * kVectorLength<T>;
#pragma unroll 1
    for (int c = lane * kVectorLength<T>; c < done; c += kLanes * kVectorLength<T>) {
      const Vector<T> piece = load_vector(row + c);
#pragma unroll
      for (int e = 0; e < kVectorLength<T>; ++e) look_at(to_real(piece.element[e]));
    }
  }
#pragma unroll 1
  for (int c = done + lane; c < width; c += kLanes) look_at(to_real(row[c * stride]));
  return found;
}

// kLanes threads share a row. With one, the sum runs in the order in which the plain kernels make
// d_out · v: where a query sees one key, ds is d_lse exactly.
template <class T, int kQueries, int kLanes>
void backward_rows(const BackwardParams& p, bool vectors) {
  using R = Real<T>;
  constexpr int kRowsAtOnce = kRowThreads / kLanes;
  static_assert(kQueries % kRowsAtOnce == 0 || kQueries < kRowsAtOnce);
  const int tile = static_cast<int>(blockIdx.x % static_cast<uint32_t>(p.q_tiles));
  const int64_t plane = blockIdx.x / static_cast<uint32_t>(p.q_tiles);
  const TilePlace place = place_of<true>(p, plane, p.problem.heads, tile, kQueries);
  if (!place.exists) return;
  auto& stats = static_cast<StatsTile<R, kQueries>*>(p.stats)[plane * p.q_tiles + tile];
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int value_dim = p.problem.value_dim;

  bool suspicious = false;
  for (int begin = 0; begin < kQueries; begin += kRowsAtOnce) {
    const int r = begin + static_cast<int>(threadIdx.x) / kLanes;
    const int64_t position = static_cast<int64_t>(place.tile) * kQueries + r;
    const int64_t row = place.q_begin + position;
    const bool inside = r < kQueries && position < place.q_length;
    R sum = 0;
    if (inside) {
      const T* const out = head_row<T>(p.out, place, row);
      const T* const d_out = head_row<T>(p.d_out, place, row);
      int done = 0;  // columns
      if (kLanes > 1 && vectors) {
        done = value_dim / kVectorLength<T> * kVectorLength<T>;
#pragma unroll 2
        for (int c = lane * kVectorLength<T>; c < done; c += kLanes * kVectorLength<T>) {
          const Vector<T> a = load_vector(out + c), b = load_vector(d_out + c);
#pragma unroll
          for (int e = 0; e < kVectorLength<T>; ++e) {
            sum += to_real(a.element[e]) * to_real(b.element[e]);
          }
        }
      }
#pragma unroll 1
      for (int c = done + lane; c < value_dim; c += kLanes) {
        sum += to_real(out[c * p.out.element]) * to_real(d_out[c * p.d_out.element]);
      }
      if (kLanes > 1 && p.problem.softcap > 0) {
        suspicious |= has_extreme<T, kLanes>(head_row<T>(p.q, place, row), p.q.element,
                                             p.problem.head_dim, p.vectors != 0, lane);
      }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, step);
    }
    if (lane == 0 && r < kQueries) {
      RowStats<R> result = {infinity<R>(), 0};
      if (inside) {
        const auto at = [&](const RowValues& values) {
          return static_cast<const R*>(values.data)[place.batch * values.batch +
                                                    place.head * values.head + row * values.row];
        };
        const R lse = at(p.lse);
        if (lse != -infinity<R>()) {
          result.lse = lse * static_cast<R>(lse_unit<T>(p));
          result.delta = p.d_lse.data != nullptr ? sum - at(p.d_lse) : sum;
        }
        suspicious |= !(lse - lse == 0) || !(result.delta - result.delta == 0);
      }
      stats.row[r] = result;
    }
  }
  suspicious = __syncthreads_or(suspicious) != 0;
  if (threadIdx.x == 0) {
    stats.suspicious = suspicious;
    stats.q_unit = stats.d_out_unit = 1;
    stats.unused = 0;  // it is copied with the rest
  }
}

// The units of the tile's rows of q and d_out.
template <int kQueries>
void find_query_units(const BackwardParams& p, bool vectors) {
  __shared__ uint32_t largest[2];
  const int tile = static_cast<int>(blockIdx.x % static_cast<uint32_t>(p.q_tiles));
  const int64_t plane = blockIdx.x / static_cast<uint32_t>(p.q_tiles);
  const TilePlace place = place_of<true>(p, plane, p.problem.heads, tile, kQueries);
  if (!place.exists) return;
  if (threadIdx.x < 2) largest[threadIdx.x] = 0;
  __syncthreads();
  const int first = place.tile * kQueries;
  const int rows = place.q_length - first < kQueries ? place.q_length - first : kQueries;
  const auto find = [&](const HeadRows& tensor, int width, uint32_t& result) {
    uint32_t found = 0;
    const auto take = [&](float x) {
      const uint32_t magnitude = finite_magnitude_of(x);
      found = magnitude > found ? magnitude : found;
    };
    const int pieces = vectors ? width / 4 : width;
    for (int i = static_cast<int>(threadIdx.x); i < rows * pieces; i += kRowThreads) {
      const float* const row = head_row<float>(tensor, place, place.q_begin + first + i / pieces);
      if (vectors) {
        const Vector<float> four = load_vector(row + i % pieces * 4);
#pragma unroll
        for (const float x : four.element) take(x);
      } else {
        take(row[i % pieces * tensor.element]);
      }
    }
    // The largest does not depend on the order.
    atomicMax(&result, __reduce_max_sync(kAllLanes, found));
  };
  find(p.q, p.problem.head_dim, largest[0]);
  find(p.d_out, p.problem.value_dim, largest[1]);
  __syncthreads();
  if (threadIdx.x == 0) {
    auto& stats = static_cast<StatsTile<float, kQueries>*>(p.stats)[plane * p.q_tiles + tile];
    stats.q_unit = unit_of(largest[0]);
    stats.d_out_unit = unit_of(largest[1]);
  }
}

// Rows of d_q that see no tile of keys.
template <class T, int kQueries, int kKeys>
void clear_unseeing(const BackwardParams& p) {
  const int tile = static_cast<int>(blockIdx.x % static_cast<uint32_t>(p.q_tiles));
  const int64_t plane = blockIdx.x / static_cast<uint32_t>(p.q_tiles);
  const TilePlace place = place_of<true>(p, plane, p.problem.heads, tile, kQueries);
  if (!place.exists || p.d_q.data == nullptr) return;
  const SeenBlocksTable& blocks = p.problem.blocks;
  if (blocks.given()) {
    if (blocks.counts[blocks.plane(place.batch, place.head) * blocks.query_tiles + place.tile] >
        0) {
      return;
    }
  } else {
    const TileRange seen = key_tiles_of(place, place.tile, kKeys, kQueries);
    if (seen.begin < seen.end) return;
  }
  const int rows = place.extent < kQueries ? place.extent : kQueries;
  const int64_t first = place.q_begin + static_cast<int64_t>(place.tile) * kQueries;
  for (int i = static_cast<int>(threadIdx.x); i < rows * p.problem.head_dim; i += kRowThreads) {
    T* const row = const_cast<T*>(head_row<T>(p.d_q, place, first + i / p.problem.head_dim));
    row[i % p.problem.head_dim * p.d_q.element] = from_real<T>(0);
  }
}

template <class T, int kQueries, int kKeys>
void backward_prepare(const BackwardParams& p) {
  allow_next_kernel();
  const int64_t threads = int64_t{gridDim.x} * kRowThreads;
  for (int64_t i = int64_t{blockIdx.x} * kRowThreads + threadIdx.x; i < p.turn_count;
       i += threads) {
    p.turns[i] = 0;
  }
  backward_rows<T, kQueries, 8>(p, p.row_vectors != 0);
  if constexpr (sizeof(T) == 4) find_query_units<kQueries>(p, p.vectors != 0);
  clear_unseeing<T, kQueries, kKeys>(p);
}

}  // namespace pullback::attention
