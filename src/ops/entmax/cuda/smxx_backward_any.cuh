// The backward of rows of any layout: strides, ragged rows, alpha per row, any dtype, from y or
// from the support mask. With s = y^(2-alpha), S = sum of s:
//   d_x = s (d_y - <s, d_y> / S)
// Above alpha = 2 a few s may outweigh all others by any factor, and d_y less the mean cancels
// there: in double, d_y of the largest s is subtracted from all d_y first.
// Rows are read two or three times, but once from the caches.
#pragma once

#include "ops/entmax/cuda/smxx_any_row.cuh"

namespace pullback::entmax {

// The first task from `task` on, counted by `step`, whose alpha is not is_gentle(); a lane looks at
// one.
template <class T>
int64_t next_not_gentle(const BackwardParams& p, int64_t task, int64_t step) {
  const int64_t tasks = p.rows.count * p.rows.groups;
  for (; task < tasks; task += kWarpSize * step) {
    const int64_t own = task + static_cast<int>(threadIdx.x) % kWarpSize * step;
    const int64_t row = p.rows.groups == 1 ? own : own / p.rows.groups;
    const bool gentle =
        own >= tasks || is_gentle(alpha_of_row<T>(p, row, own - row * p.rows.groups));
    const uint32_t others = __ballot_sync(kAllLanes, !gentle);
    if (others != 0) return task + (__ffs(static_cast<int>(others)) - 1) * step;
  }
  return task;
}

// R: double where alpha may be above 2, else T's own arithmetic. A row of each group of threads,
// or none: they take part in the sums.
template <class T, class R, Mapping kMapping>
void any_row(const BackwardParams& p, int64_t task, R* scratch) {
  using Threads = RowThreads<kMapping>;
  const bool exists = task < p.rows.count * p.rows.groups;
  RowPlace place = any_place<T>(p, exists ? task : 0);
  if (!exists) place.length = 0;
  const AnyRow<T> row(p, place);

  const auto d_y_at = [&](int64_t i) { return static_cast<R>(to_real(row.d_y[i * row.d_y_step])); };
  // Of the largest s; where several threads have one, the mean of theirs.
  R heaviest = 0;
  if constexpr (sizeof(R) == 8) {
    R largest = 0, of_largest = 0;
    for (int64_t i = Threads::thread(); i < place.length; i += Threads::kThreads) {
      const R s = row.template s<R>(i, place.alpha);
      if (!(s > largest)) continue;
      largest = s;
      of_largest = d_y_at(i);
    }
    const bool has = largest == Threads::largest(largest, scratch) && largest > 0;
    const R count = Threads::sum(has ? R{1} : R{0}, scratch);
    heaviest = Threads::sum(has ? of_largest : R{0}, scratch) / max(count, R{1});
  }

  CompensatedSum<R> s_sum, s_d_y_sum;
  for (int64_t i = Threads::thread(); i < place.length; i += Threads::kThreads) {
    const R s = row.template s<R>(i, place.alpha);
    if (s == 0) continue;
    s_sum.add(s);
    s_d_y_sum.add(s * (d_y_at(i) - heaviest));
  }
  const R s_total = Threads::sum(s_sum.total(), scratch);
  const R mean = Threads::sum(s_d_y_sum.total(), scratch) / s_total;  // less the heaviest
  for (int64_t i = Threads::thread(); i < place.length; i += Threads::kThreads) {
    const R s = row.template s<R>(i, place.alpha);
    R d_x = 0;
    if (place.nan) {
      d_x = quiet_nan<R>();
    } else if (!(s == 0)) {
      d_x = s * (d_y_at(i) - heaviest - mean);
    }
    row.d_x[i * row.d_x_step] = from_real<T>(static_cast<Real<T>>(d_x));
  }
}

template <class T, class R, Mapping kMapping>
void backward_any(const BackwardParams& p) {
  using Threads = RowThreads<kMapping>;
  __shared__ R scratch[Threads::kScratch];
  int64_t task = static_cast<int64_t>(blockIdx.x) * Threads::kRows + Threads::row();
  if constexpr (sizeof(R) == 8 && kMapping != Mapping::across) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * Threads::kRows;
    const auto next = [&](int64_t from) {
      return p.gentle_elsewhere ? next_not_gentle<T>(p, from, step) : from;
    };
    for (task = next(task); task < p.rows.count * p.rows.groups; task = next(task + step)) {
      any_row<T, R, kMapping>(p, task, scratch);
    }
  } else {
    any_row<T, R, kMapping>(p, task, scratch);
  }
}

// Zeros where the axis belongs to no ragged row: before the first offset and after the last.
template <class T>
void backward_rest(const BackwardParams& p) {
  const int64_t first = p.rows.offsets[0];
  const int64_t last = p.rows.offsets[p.rows.groups];
  const int64_t rest = first + p.rows.length - last;
  for (int64_t row = blockIdx.x; row < p.rows.count; row += gridDim.x) {
    T* d_x = static_cast<T*>(p.d_x.data) + row_offset(p.rows, p.d_x, row);
    for (int64_t i = threadIdx.x; i < rest; i += blockDim.x) {
      d_x[(i < first ? i : i - first + last) * p.d_x.axis] = T{};
    }
  }
}

}  // namespace pullback::entmax
