// The backward of long rows across memory, from y, read twice (smxx_columns.cuh).
//   d_x = s (d_y - <s, d_y> / S),  s = y^(2-alpha), S = sum of s
#pragma once

#include "ops/entmax/cuda/backward_row.cuh"
#include "ops/entmax/cuda/smxx_columns.cuh"

namespace pullback::entmax {

template <class T, Weights kWeights>
void backward_columns(const BackwardTileParams& params) {
  using Group = TileGroup<true>;
  using Part = ColumnPart<T>;
  constexpr int kAtOnce = Part::kAtOnce;
  const BackwardParams& p = params.op;
  __shared__ float scratch[2 * Group::kMostValues * kTileScratch];
  Group group(params.shape, scratch);
  ColumnPlace place = column_place(p.rows, params.shape, group);
  const double alpha = kWeights == Weights::power ? alpha_of_row<T>(p, place.row) : p.alpha_of_all;
  if (kWeights == Weights::power && !is_gentle(alpha)) place.count = 0;
  int64_t offsets[3];
  row_offsets(p.rows, place.row, {&p.y, &p.d_y, &p.d_x}, offsets);
  const auto part_of = [&](const RowTensor& tensor, int64_t offset) {
    return Part(tensor, offset, group.part(), group.parts());
  };
  const Part y = part_of(p.y, offsets[0]), d_y = part_of(p.d_y, offsets[1]);
  // Calls use(first, s, d_y) for some elements after the others.
  const auto for_each = [&](const auto& use) {
    for (int first = 0; first < place.count; first += kAtOnce) {
      float s[kAtOnce], gradients[kAtOnce];
      y.load(s, first, place.count, 0);
      d_y.load(gradients, first, place.count, 0);
      to_slopes<T, kWeights>(s, alpha);
      use(first, s, gradients);
    }
  };
  Sums<float> sums;
  for_each([&](int, const float(&s)[kAtOnce], const float(&gradients)[kAtOnce]) {
    Sums<float> some;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) add(some, s[k], gradients[k]);
    sums.s += some.s;
    sums.s_d_y += some.s_d_y;
  });
  group.sum(sums.s, sums.s_d_y);
  const float mean = sums.s_d_y / sums.s;
  const Part d_x = part_of(p.d_x, offsets[2]);
  for_each([&](int first, float(&s)[kAtOnce], const float(&gradients)[kAtOnce]) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) s[k] = gradient(s[k], gradients[k], mean);
    d_x.store(s, first, place.count);
  });
}

}  // namespace pullback::entmax
