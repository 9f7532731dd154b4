// The forward of rows of a few elements, and of rows that lie across memory: many rows a block,
// each in the registers of one thread or of several (smxx_tile.cuh). The family's threshold is that
// of smxx_solve.cuh.
//
// All rows of a warp, or of the block where its warps share them, take steps until the last one has
// its threshold.
#pragma once

#include "ops/entmax/cuda/smxx_bounds.cuh"
#include "ops/entmax/cuda/smxx_statistics.cuh"
#include "ops/entmax/cuda/smxx_tile.cuh"
#include "ops/entmax/cuda/smxx_vector.cuh"

namespace pullback::entmax {

// The threshold of the largest elements of a row's threads is a bound that is worth its steps where
// these are many, and exchange what they found through shared memory.
template <class P>
float start_of_tile(const P&, float, TileGroup<false>&) {
  return P::start;
}
template <class P>
float start_of_tile(const P& power, float top, TileGroup<true>& group) {
  constexpr int kManyParts = 8;
  if (group.parts() < kManyParts) return P::start;
  const auto tops = [&](auto use) { use(top); };
  const float theta = power.with_rough([&](const auto& rough) {
    return rise<float>(rough, P::start, group, tops, kBoundTolerance).theta;
  });
  return max(P::start, theta - kBoundSlack<P> * (1 + magnitude(theta)));
}

// One row's part of this thread. Where none `exists`, x has no elements.
template <class T, Family kFamily, class G, class Slice>
void forward_of_tile(const ForwardParams& p, int64_t row, bool exists, G& group, const Slice& x,
                     const Slice& y) {
  using device::infinity;
  constexpr int kHeld = kForwardTileHeld;
  float z[kHeld];
  x.load(z, -infinity<float>());
  float own = -infinity<float>();
  for_held<kHeld>(x.count(), [&](int k) { own = max_or_nan(own, z[k]); });
  const float largest = group.max(own);
  const bool finite = magnitude(largest) < infinity<float>();
  if (!finite) group.excuse();
  const float origin = finite ? largest : 0;
  for_held<kHeld>(x.count(), [&](int k) { z[k] -= origin; });
  const auto all = [&](auto use) { for_held<kHeld>(x.count(), [&](int k) { use(z[k]); }); };
  const auto count = [&](auto active) {
    int mine = 0;
    all([&](float v) { mine += active(v); });
    return group.count(mine);
  };
  const auto store = [&](auto value_of) {  // value_of(z)
    if (!p.y.data || !exists) return;
    if (finite) {
      y.template store<kHeld>([&](int k) { return value_of(z[k]); });
    } else {
      const float fill = largest < 0 ? 0 : device::quiet_nan<float>();
      y.template store<kHeld>([&](int) { return fill; });
    }
  };
  const auto finish = [&](float tau, int size) {
    if (group.part() == 0 && exists) store_statistics(p, row, largest, tau, size);
  };

  if constexpr (kFamily == Family::softmax) {
    const int size =
        p.support_size.data ? count([](float v) { return v > -infinity<float>(); }) : 0;
    float sum = 0, unused = 0;
    all([&](float& v) {
      v = exp_of(v);
      sum += v;
    });
    group.sum(sum, unused);
    const float scale = 1 / sum;
    store([&](float v) { return v * scale; });
    finish(largest + log_of(sum), size);
  } else {
    const Power<kFamily, float> power(p.alpha);
    const float start = start_of_tile(power, own - origin, group);
    Threshold<float> threshold;
    if constexpr (kFamily == Family::sparsemax) {
      threshold = {rise_of_sparsemax(start, group, all), 0, 1};
    } else {
      threshold = solve<float>(
          power, [&](const auto&) { return start; }, group, all, digits_wanted<T>(p));
    }
    const auto output = power_of_output<T, kFamily>(power);
    store([&](float v) { return probability<T>(output, v, threshold); });
    const int size = p.support_size.data
                         ? count([&](float v) { return power.excess(v, threshold) > power.edge; })
                         : 0;
    finish(tau_of<decltype(power)>(p.alpha, largest, threshold), size);
  }
}

template <class T, Family kFamily, bool kStaged>
void forward_tile(const ForwardTileParams& params) {
  const ForwardParams& p = params.op;
  const TileShape& shape = params.shape;
  const int length = static_cast<int>(p.rows.length);
  const auto threads = static_cast<int>(blockDim.x);
  if constexpr (kStaged) {
    extern __shared__ __align__(16) unsigned char memory[];
    T* tile = reinterpret_cast<T*>(memory);
    const int rows_of_pass = threads / device::kWarpSize * shape.columns;
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * (rows_of_pass * shape.passes);
    const auto rows = static_cast<int>(
        min(p.rows.count - begin, static_cast<int64_t>(rows_of_pass * shape.passes)));
    const Staging<T> staging(tile, rows * length, shape.per_row);
    staging.load(static_cast<const T*>(p.x.data) + begin * length);
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < rows; first += rows_of_pass) {
      TileGroup<false> group(shape, nullptr);
      const int row = first + group.row();
      const bool exists = row < rows;
      const TileSlice<T, true> slice(tile + row * shape.pitch, 1, shape, group,
                                     exists ? length : 0);
      forward_of_tile<T, kFamily>(p, begin + row, exists, group, slice, slice);
    }
    if (!p.y.data) return;
    __syncthreads();
    staging.store(static_cast<T*>(p.y.data) + begin * length);
  } else {
    using Group = TileGroup<true>;
    __shared__ float scratch[2 * Group::kMostValues * kTileScratch];
    Group group(shape, scratch);
    const int rows_of_block = shape.columns * (shape.warps == 1 ? threads / device::kWarpSize : 1);
    const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_of_block + group.row();
    const bool exists = row < p.rows.count;
    int64_t at[2];
    row_offsets(p.rows, exists ? row : 0, {&p.x, &p.y}, at);
    const auto slice = [&](const RowTensor& tensor, int64_t offset) {
      return TileSlice<T, false>(static_cast<T*>(tensor.data) + offset, tensor.axis, shape, group,
                                 exists ? length : 0);
    };
    forward_of_tile<T, kFamily>(p, row, exists, group, slice(p.x, at[0]), slice(p.y, at[1]));
  }
}

}  // namespace pullback::entmax
