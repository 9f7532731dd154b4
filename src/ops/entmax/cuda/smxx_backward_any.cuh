// The backward of rows of any layout: strides, ragged rows, alpha per row, any dtype, from y or
// from the support mask; and d_alpha. With s = y^(2-alpha), S = sum of s:
//   d_x = s (d_y - <s, d_y> / S)
// Above alpha = 2 a few s may outweigh all others by any factor, and d_y less the mean cancels
// there: in double, d_y of the largest s is subtracted from all d_y first.
//   d_alpha = [ <p,R> (<d_y,p> - b <d_y,pL>) - (sum p - b sum pL) <d_y,pR> ] / S
// with b = alpha - 1, L = ln p, R = L^2 (e^t - 1 - t) / t^2 at t = -b L: README.md derives it.
// Rows are read two or three times, but once from the caches.
#pragma once

#include "ops/entmax/cuda/backward_slice.cuh"
#include "ops/entmax/cuda/backward_tuning.cuh"

namespace pullback::entmax {

template <Mapping kMapping>
struct RowThreads {
  static constexpr bool kWarps = kMapping == Mapping::warp;
  static constexpr int kRows = rows_of_block(kMapping);
  static constexpr int kThreads = kAnyThreads / kRows;  // of a row

  static int row() { return static_cast<int>(threadIdx.x) / (kWarps ? kWarpSize : 1) % kRows; }
  static int thread() {
    return kWarps ? static_cast<int>(threadIdx.x) % kWarpSize
                  : static_cast<int>(threadIdx.x) / kRows;
  }

  // The sum over a row's threads, on all of them. All threads of the block take part.
  // `scratch`: kAnyThreads numbers.
  template <class R>
  static R sum(R value, R* scratch) {
    if constexpr (kWarps) return warp_sum(value);
    __syncthreads();
    R result = 0;
    if constexpr (kMapping == Mapping::block) {
      const R of_warp = warp_sum(value);
      if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = of_warp;
      __syncthreads();
      for (int i = 0; i < kAnyThreads / kWarpSize; ++i) result += scratch[i];
    } else {
      scratch[threadIdx.x] = value;
      __syncthreads();
      for (int i = 0; i < kThreads; ++i) result += scratch[i * kRows + row()];
    }
    return result;
  }
  // The largest, which is not negative, likewise; not of a warp.
  template <class R>
  static R largest(R value, R* scratch) {
    __syncthreads();
    scratch[threadIdx.x] = value;
    __syncthreads();
    R result = 0;
    for (int i = 0; i < kThreads; ++i) result = max(result, scratch[i * kRows + row()]);
    return result;
  }
};

// One row in global memory; positions count from its first element.
template <class T>
struct AnyRow {
  const T* y = nullptr;
  const uint8_t* bits = nullptr;  // instead of y
  const T* d_y;
  T* d_x;
  int64_t y_step, bits_step, d_y_step, d_x_step;

  AnyRow(const BackwardParams& p, const RowPlace& place) {
    const auto at = [&](const RowTensor& tensor) {
      return row_offset(p.rows, tensor, place.row) + place.begin * tensor.axis;
    };
    if (p.y.data) {
      y = static_cast<const T*>(p.y.data) + at(p.y);
    } else {
      bits = static_cast<const uint8_t*>(p.support.data) + row_offset(p.rows, p.support, place.row);
    }
    d_y = static_cast<const T*>(p.d_y.data) + at(p.d_y);
    d_x = static_cast<T*>(p.d_x.data) + at(p.d_x);
    y_step = p.y.axis;
    bits_step = p.support.axis;
    d_y_step = p.d_y.axis;
    d_x_step = p.d_x.axis;
  }

  template <class R>
  R s(int64_t i, double alpha) const {
    if (bits) return static_cast<R>(bits[(i >> 3) * bits_step] >> (i & 7) & 1);
    const R value = static_cast<R>(to_real(y[i * y_step]));
    return value == 0 ? R{0} : weight<T, Weights::power>(value, alpha);
  }
};

template <class T>
RowPlace any_place(const BackwardParams& p, int64_t task) {
  RowPlace place = place_of<T, Weights::power>(p, task);
  place.alpha = alpha_of_row<T>(p, place.row, place.group);
  place.nan = !valid_alpha(place.alpha);
  if (p.support_size.data) {
    const auto* sizes = static_cast<const int32_t*>(p.support_size.data);
    place.nan = sizes[row_offset(p.rows, p.support_size, place.row)] < 0;
  }
  return place;
}

// R: double where alpha may be above 2, else T's own arithmetic.
template <class T, class R, Mapping kMapping>
void backward_any(const BackwardParams& p) {
  using Threads = RowThreads<kMapping>;
  __shared__ R scratch[kAnyThreads];
  const int64_t task = static_cast<int64_t>(blockIdx.x) * Threads::kRows + Threads::row();
  const bool exists = task < p.rows.count * p.rows.groups;
  // Threads without a row take part in the sums.
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

// (e^t - 1 - t) / t^2 for t >= 0.
template <class R>
R second_remainder(R t) {
  if (t > R{0.5}) return (expm1_of(t) - t) / (t * t);
  constexpr int kTerms = sizeof(R) == 8 ? 15 : 9;
  R sum = 1;
#pragma unroll
  for (int k = kTerms; k > 2; --k) sum = fma(sum * t, R{1} / static_cast<R>(k), R{1});
  return sum / 2;
}

// What an element adds to sums.
template <class R>
struct AlphaTerms {
  R p, s, pl, pr;

  AlphaTerms(R probability, R b) : p(probability) {
    const R l = log_of(p), most = sizeof(R) == 8 ? 600 : 80;
    const R t = min(-b * l, most);
    s = p * exp_of(t);
    pl = p * l;
    pr = pl * l * second_remainder(max(t, R{0}));
  }
};

// f64 has no digits to spare.
template <class R>
struct AlphaSum {
  double sum = 0;
  void add(double value) { sum += value; }
  double total() const { return sum; }
};
template <>
struct AlphaSum<double> : CompensatedSum<double> {};

// From y. Seven sums of opposite signs meet in the result: they are in double whatever T is, of
// terms in its own arithmetic, which every sum has the same of; above alpha = 2, where powers leave
// the range of float, of terms in double.
template <class T, Mapping kMapping>
void backward_d_alpha(const BackwardParams& p) {
  using Threads = RowThreads<kMapping>;
  __shared__ double scratch[kMapping == Mapping::warp ? 1 : kAnyThreads];
  const int64_t task = static_cast<int64_t>(blockIdx.x) * Threads::kRows + Threads::row();
  const bool exists = task < p.rows.count * p.rows.groups;
  RowPlace place = any_place<T>(p, exists ? task : 0);
  if (!exists) place.length = 0;
  const AnyRow<T> row(p, place);
  const double b = place.alpha - 1;

  enum : int { kP, kS, kPL, kPR, kGP, kGPL, kGPR, kSums };
  AlphaSum<Real<T>> sums[kSums];
  const auto add_all = [&](auto b_of_terms) {
    using R = decltype(b_of_terms);
    for (int64_t i = Threads::thread(); i < place.length; i += Threads::kThreads) {
      const auto probability = static_cast<R>(to_real(row.y[i * row.y_step]));
      if (probability == 0) continue;
      const auto g = static_cast<double>(to_real(row.d_y[i * row.d_y_step]));
      const AlphaTerms<R> terms(probability, b_of_terms);
      sums[kP].add(terms.p);
      sums[kS].add(terms.s);
      sums[kPL].add(terms.pl);
      sums[kPR].add(terms.pr);
      sums[kGP].add(g * terms.p);
      sums[kGPL].add(g * terms.pl);
      sums[kGPR].add(g * terms.pr);
    }
  };
  if (place.alpha <= 2) {
    add_all(static_cast<Real<T>>(b));
  } else {
    add_all(b);
  }
  double total[kSums];
#pragma unroll
  for (int k = 0; k < kSums; ++k) total[k] = Threads::sum(sums[k].total(), scratch);
  if (!exists || Threads::thread() != 0) return;
  double result =
      (total[kPR] * (total[kGP] - b * total[kGPL]) - (total[kP] - b * total[kPL]) * total[kGPR]) /
      total[kS];
  if (total[kS] == 0) result = 0;  // nothing visible in the row
  if (place.nan) result = quiet_nan<double>();
  const int64_t at = row_offset(p.rows, p.d_alpha, place.row) + place.group * p.d_alpha.axis;
  static_cast<Real<T>*>(p.d_alpha.data)[at] = static_cast<Real<T>>(result);
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
