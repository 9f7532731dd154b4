// Gradients of attention without tensor cores, for f64 and f32. A warp has one key, one query, or
// one element of the bias, and goes over what meets it, 32 pairs at a time: each lane makes the
// products of one pair, in the order in which forward makes its score, so that probabilities agree
// with lse; then the lanes share the width of the sums. Only what is seen is computed.
#pragma once

#include "ops/attention/cuda/smxx_backward_rows.cuh"

namespace pullback::attention {

inline constexpr int kMaxWidth = 256;
inline constexpr int kLaneElements = kMaxWidth / 32;

// A row of the width, element lane + 32 · e in register e; 0 past the end.
template <class T>
struct LaneRow {
  T element[kLaneElements];

  void load(const T* row, int64_t step, int width, int lane) {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      const int c = lane + 32 * e;
      element[e] = c < width ? row[c * step] : T(0);
    }
  }
  void store(T* row, int64_t step, int width, int lane, T factor) const {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) {
      const int c = lane + 32 * e;
      if (c < width) row[c * step] = factor * element[e];
    }
  }
  void add(T factor, const LaneRow& other) {
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) element[e] += factor * other.element[e];
  }
};

// What one query and one key give, which the band lets see each other.
template <class T>
struct Pair {
  bool seen, kept;  // and by dropout
  T weight;         // p · m
  T d_bias, d_a;    // ds, and ds times the softcap's slope
};

template <class T>
const T* row_at(const HeadRows& rows, int64_t batch, int head, int64_t row) {
  return static_cast<const T*>(rows.data) + batch * rows.batch + row * rows.row + head * rows.head;
}

// The rows of a query and a key as positions in the tensors.
template <class T>
Pair<T> pair_of(const BackwardParams& p, int64_t batch, int head, int i, int64_t q_row, int j,
                int64_t k_row, const RowStats<T>& stats) {
  const Problem& problem = p.problem;
  Pair<T> pair = {false, false, 0, 0, 0};
  if (!problem.blocks.sees(batch, head, i, j)) return pair;
  T bias = 0;
  if (p.bias.data != nullptr) {
    bias = static_cast<const T*>(
        p.bias.data)[batch * p.bias.batch + head * p.bias.head + i * p.bias.query + j * p.bias.key];
    if (bias == -infinity<T>()) return pair;
  }
  const auto dot = [&](const HeadRows& a, const HeadRows& b, int width) {
    const T* const x = row_at<T>(a, batch, head, q_row);
    const T* const y = row_at<T>(b, batch, head / problem.group, k_row);
    T sum = 0;
    for (int d = 0; d < width; ++d) sum += x[d * a.element] * y[d * b.element];
    return sum;
  };
  T s = dot(p.q, p.k, problem.head_dim), slope = 1;
  s *= static_cast<T>(problem.exact_scale);
  if (problem.softcap > 0) {
    const T cap = static_cast<T>(problem.exact_softcap);
    const T t = tanh(s / cap);
    slope = 1 - t * t;
    s = cap * t;
  }
  s += bias;
  if (s == -infinity<T>() || stats.lse == infinity<T>()) return pair;
  pair.seen = true;
  const T chance = exp(s - stats.lse);
  T d_chance = 0;
  pair.kept = true;
  T keep_scale = 1;
  if (problem.dropout.active()) {
    pair.kept = problem.dropout.with_seed().keeps(
        static_cast<uint64_t>(batch * problem.heads + head), i, j);
    keep_scale = static_cast<T>(problem.dropout.scale());
  }
  if (pair.kept) {
    pair.weight = chance * keep_scale;
    d_chance = dot(p.d_out, p.v, problem.value_dim) * keep_scale;
  }
  pair.d_bias = chance * (d_chance - stats.delta);
  pair.d_a = pair.d_bias * slope;
  return pair;
}

template <class T>
Pair<T> pair_of_lane(const Pair<T>& own, int lane) {
  const int bits = __shfl_sync(kAllLanes, own.seen + 2 * own.kept, lane);
  return {(bits & 1) != 0, (bits & 2) != 0, __shfl_sync(kAllLanes, own.weight, lane), T(0),
          __shfl_sync(kAllLanes, own.d_a, lane)};
}

template <class T, int kStatsRows = kPlainTile>
RowStats<T> stats_of(const BackwardParams& p, int64_t plane, int64_t first_tile, int i) {
  const auto* const stats = static_cast<const StatsTile<T, kStatsRows>*>(p.stats);
  return stats[plane * p.q_tiles + first_tile + i / kStatsRows].row[i % kStatsRows];
}

// d_k and d_v of a key.
template <class T>
void plain_keys(const BackwardParams& p) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int group = p.problem.group;
  const int64_t pair = blockIdx.x / p.k_tiles;
  const TilePlace place = place_of<false>(p, pair, p.problem.heads / group,
                                          static_cast<int>(blockIdx.x % p.k_tiles), kPlainTile);
  if (!place.exists) return;
  for (int r = warp; r < kPlainTile && r < place.extent; r += kPlainThreads / 32) {
    const int j = place.tile * kPlainTile + r;
    const int64_t row = place.k_begin + j;
    LaneRow<T> d_k = {}, d_v = {};
    if (j < place.k_length) {
      const int64_t begin = static_cast<int64_t>(j) - place.highest;
      const int64_t end = static_cast<int64_t>(j) - place.lowest + 1;
      const int last = end < place.q_length ? static_cast<int>(end) : place.q_length;
      for (int h = 0; h < group; ++h) {
        const int head = place.head * group + h;
        for (int first = begin < 0 ? 0 : static_cast<int>(begin); first < last; first += 32) {
          const int i = first + lane;
          Pair<T> own = {false, false, 0, 0, 0};
          if (i < last) {
            own = pair_of(p, place.batch, head, i, place.q_begin + i, j, row,
                          stats_of<T>(p, pair * group + h, place.first_tile, i));
          }
          for (int n = 0; n < 32 && first + n < last; ++n) {
            const Pair<T> got = pair_of_lane(own, n);
            if (!got.seen) continue;
            const int64_t q_row = place.q_begin + first + n;
            LaneRow<T> other;
            other.load(row_at<T>(p.q, place.batch, head, q_row), p.q.element, p.problem.head_dim,
                       lane);
            d_k.add(got.d_a, other);
            if (!got.kept) continue;
            other.load(row_at<T>(p.d_out, place.batch, head, q_row), p.d_out.element,
                       p.problem.value_dim, lane);
            d_v.add(got.weight, other);
          }
        }
      }
    }
    const auto to = [&](const HeadRows& rows) {
      return static_cast<T*>(rows.data) + place.batch * rows.batch + row * rows.row +
             place.head * rows.head;
    };
    const T scale = static_cast<T>(p.problem.exact_scale);
    if (p.d_k.data != nullptr) {
      d_k.store(to(p.d_k), p.d_k.element, p.problem.head_dim, lane, scale);
    }
    if (p.d_v.data != nullptr) {
      d_v.store(to(p.d_v), p.d_v.element, p.problem.value_dim, lane, T(1));
    }
  }
}

// d_q of a query.
template <class T>
void plain_queries(const BackwardParams& p) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t plane = blockIdx.x / p.q_tiles;
  const TilePlace place = place_of<true>(p, plane, p.problem.heads,
                                         static_cast<int>(blockIdx.x % p.q_tiles), kPlainTile);
  if (!place.exists) return;
  for (int r = warp; r < kPlainTile && r < place.extent; r += kPlainThreads / 32) {
    const int i = place.tile * kPlainTile + r;
    const int64_t row = place.q_begin + i;
    LaneRow<T> d_q = {};
    if (i < place.q_length) {
      const RowStats<T> stats = stats_of<T>(p, plane, place.first_tile, i);
      const int64_t begin = static_cast<int64_t>(i) + place.lowest;
      const int64_t end = static_cast<int64_t>(i) + place.highest + 1;
      const int last = end < place.k_length ? static_cast<int>(end) : place.k_length;
      for (int first = begin < 0 ? 0 : static_cast<int>(begin); first < last; first += 32) {
        const int j = first + lane;
        Pair<T> own = {false, false, 0, 0, 0};
        if (j < last) {
          own = pair_of(p, place.batch, place.head, i, row, j, place.k_begin + j, stats);
        }
        for (int n = 0; n < 32 && first + n < last; ++n) {
          const Pair<T> got = pair_of_lane(own, n);
          if (!got.seen) continue;
          LaneRow<T> other;
          other.load(
              row_at<T>(p.k, place.batch, place.head / p.problem.group, place.k_begin + first + n),
              p.k.element, p.problem.head_dim, lane);
          d_q.add(got.d_a, other);
        }
      }
    }
    T* const to = static_cast<T*>(p.d_q.data) + place.batch * p.d_q.batch + row * p.d_q.row +
                  place.head * p.d_q.head;
    d_q.store(to, p.d_q.element, p.problem.head_dim, lane, static_cast<T>(p.problem.exact_scale));
  }
}

// d_bias: a block has one element after the other and sums over the dimensions along which the bias
// is broadcast, each thread a share of them.
template <class T, int kStatsRows>
void plain_bias_element(const BackwardParams& p, int64_t index) {
  __shared__ T sums[kPlainThreads];
  const Problem& problem = p.problem;
  const BiasShape& own = p.bias_shape;
  const auto digit = [&index](int64_t size) {
    const int64_t value = index % size;
    index /= size;
    return value;
  };
  const int64_t key = digit(own.key), query = digit(own.query), head = digit(own.head);
  const int64_t batch = index;
  // Of each dimension all positions, or ours.
  const int64_t keys = own.key > 1 ? 1 : problem.key, queries = own.query > 1 ? 1 : problem.query;
  const int64_t heads = own.head > 1 ? 1 : problem.heads;
  const int64_t batches = own.batch > 1 ? 1 : problem.batch;
  const TilePlace place = place_of<true>(p, 0, problem.heads, 0, kStatsRows);
  T sum = 0;
  for (int64_t n = threadIdx.x; n < batches * heads * queries * keys; n += kPlainThreads) {
    const int j = static_cast<int>(key + n % keys);
    const int i = static_cast<int>(query + n / keys % queries);
    const int h = static_cast<int>(head + n / (keys * queries) % heads);
    const int64_t b = batch + n / (keys * queries * heads);
    if (j - i < place.lowest || j - i > place.highest) continue;
    const Pair<T> got =
        pair_of(p, b, h, i, i, j, j, stats_of<T, kStatsRows>(p, b * problem.heads + h, 0, i));
    if (got.seen) sum += got.d_bias;
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    T all = 0;
    for (const T part : sums) all += part;
    static_cast<T*>(p.d_bias.data)[batch * p.d_bias.batch + head * p.d_bias.head +
                                   query * p.d_bias.query + key * p.d_bias.key] = all;
  }
  __syncthreads();
}

template <class T, int kStatsRows>
void plain_bias(const BackwardParams& p) {
  const BiasShape& shape = p.bias_shape;
  const int64_t elements = shape.batch * shape.head * shape.query * shape.key;
  for (int64_t index = blockIdx.x; index < elements; index += gridDim.x) {
    plain_bias_element<T, kStatsRows>(p, index);
  }
}

template <class T>
void plain_prepare(const BackwardParams& p) {
  backward_rows<T, kPlainTile, 1>(p, false);
}

}  // namespace pullback::attention
