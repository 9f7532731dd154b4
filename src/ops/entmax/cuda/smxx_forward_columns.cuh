// The forward of long rows across memory (smxx_columns.cuh): softmax in two readings, the other
// families with one more for each step to the threshold (smxx_solve.cuh).
//   softmax: y = exp(x - max) / sum of exp(x - max)
#pragma once

#include "ops/entmax/cuda/smxx_columns.cuh"
#include "ops/entmax/cuda/smxx_forward_tile.cuh"

namespace pullback::entmax {

// The largest element of a thread and, of softmax, its sum of powers and their number.
struct ColumnTop {
  float own, sum;
  int size;
};
template <class T, Family kFamily>
ColumnTop top_of_column(const ColumnPart<T>& x, int count) {
  constexpr int kAtOnce = ColumnPart<T>::kAtOnce;
  ColumnTop top{-device::infinity<float>(), 0, 0};
  for (int first = 0; first < count; first += kAtOnce) {
    float z[kAtOnce];
    x.load(z, first, count, -device::infinity<float>());
    const float before = top.own;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) top.own = max_or_nan(top.own, z[k]);
    if (kFamily != Family::softmax || top.own == -device::infinity<float>()) continue;
    if (top.own > before) top.sum *= exp_of(before - top.own);
    float part = 0;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      part += exp_of(z[k] - top.own);
      top.size += z[k] > -device::infinity<float>();
    }
    top.sum += part;
  }
  return top;
}

template <class T, Family kFamily>
void forward_columns(const ForwardTileParams& params) {
  using device::infinity;
  using Group = TileGroup<true>;
  using Part = ColumnPart<T>;
  constexpr int kAtOnce = Part::kAtOnce;
  const ForwardParams& p = params.op;
  __shared__ float scratch[2 * Group::kMostValues * kTileScratch];
  Group group(params.shape, scratch);
  const ColumnPlace place = column_place(p.rows, params.shape, group);
  int64_t offsets[2];
  row_offsets(p.rows, place.row, {&p.x, &p.y}, offsets);
  const Part x(p.x, offsets[0], group.part(), group.parts());

  ColumnTop top = top_of_column<T, kFamily>(x, place.count);
  const float largest = group.max(top.own);
  const bool finite = magnitude(largest) < infinity<float>();
  if (!finite) group.excuse();
  const float origin = finite ? largest : 0;
  const auto store = [&](auto value_of) {  // value_of(x - largest)
    if (!p.y.data) return;
    const Part y(p.y, offsets[1], group.part(), group.parts());
    const float fill = largest < 0 ? 0 : device::quiet_nan<float>();
    for (int first = 0; first < place.count; first += kAtOnce) {
      float z[kAtOnce];
      x.load(z, first, place.count, 0);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) z[k] = finite ? value_of(z[k] - origin) : fill;
      y.store(z, first, place.count);
    }
  };
  const auto finish = [&](float tau, int size) {
    if (group.part() == 0 && place.exists) store_statistics(p, place.row, largest, tau, size);
  };

  if constexpr (kFamily == Family::softmax) {
    float unused = 0;
    top.sum = top.own > -infinity<float>() ? top.sum * exp_of(top.own - largest) : 0;
    group.sum(top.sum, unused);
    const float scale = 1 / top.sum;
    store([&](float v) { return scale * exp_of(v); });
    finish(largest + log_of(top.sum), p.support_size.data ? group.count(top.size) : 0);
  } else {
    const auto all = [&](auto use) {
      for (int first = 0; first < place.count; first += kAtOnce) {
        float z[kAtOnce];
        x.load(z, first, place.count, -infinity<float>());
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) use(z[k] - origin);
      }
    };
    const Power<kFamily, float> power(p.alpha);
    const float start = start_of_tile(power, top.own - origin, group);
    Threshold<float> threshold;
    if constexpr (kFamily == Family::sparsemax) {
      threshold = {rise_of_sparsemax(start, group, all), 0, 1};
    } else {
      threshold = solve<float>(
          power, [&](const auto&) { return start; }, group, all, digits_wanted<T>(p));
    }
    const auto output = power_of_output<T, kFamily>(power);
    // Before y is stored, which may lie where x does.
    int size = 0;
    if (p.support_size.data) {
      all([&](float v) { size += power.excess(v, threshold) > power.edge; });
      size = group.count(size);
    }
    store([&](float v) { return probability<T>(output, v, threshold); });
    finish(tau_of<decltype(power)>(p.alpha, largest, threshold), size);
  }
}

}  // namespace pullback::entmax
