// d_alpha, from y, of rows of any layout. With b = alpha - 1, L = ln p and t = -b L, README.md's
//   d_alpha = [ <p,R> (<d_y,p> - b <d_y,pL>) - (sum p - b sum pL) <d_y,pR> ] / S
// is the difference of two weighted means of d_y:
//   d_alpha = (V <w,d_y> - W <v,d_y>) / S,  w = p (1 + t), v = p R, s = p e^t
// with V, W and S the sums of v, w and s, and R = L^2 (e^t - 1 - t) / t^2, so that v = (s - w) /
// b^2. Rows are read once.
#pragma once

#include "ops/entmax/cuda/smxx_any_row.cuh"

namespace pullback::entmax {

// Neighbouring elements of a thread that are loaded together, by vectors where memory allows, and
// summed up before the sums go to double; in double one, whose code is long.
template <class R>
inline constexpr int kAlphaChunk = sizeof(R) == 8 ? 1 : 8;

// (e^t - 1 - t) / t^2 for 0 <= t <= 1.
template <class T, class R>
R second_remainder(R t) {
  constexpr int kTerms = sizeof(R) == 8 ? 19 : sizeof(T) == 4 ? 11 : 9;
  R sum = 0, factorial = 1;
  R inverse[kTerms + 1];
#pragma unroll
  for (int k = 1; k <= kTerms; ++k) {
    factorial *= static_cast<R>(k);
    inverse[k] = 1 / factorial;
  }
#pragma unroll
  for (int k = kTerms; k >= 2; --k) sum = fma(sum, t, inverse[k]);
  return sum;
}

// For 16-bit types the hardware's logarithm and exponential have digits enough.
template <class T, class R>
R log_for(R x) {
  if constexpr (sizeof(T) == 2 && sizeof(R) == 4) return log2_approx(x) * 0.693147181f;
  return log_of(x);
}
template <class T, class R>
R exp_for(R x) {
  if constexpr (sizeof(T) == 2 && sizeof(R) == 4) return exp2_approx(x * 1.44269504f);
  return exp_of(x);
}

// What an element adds to sums: nothing where p is 0. Of a subnormal p, which rows near alpha = 1
// have and some logarithms do not know, all is next to nothing.
template <class T, class R>
struct AlphaTerms {
  R s, w, v;

  AlphaTerms(R p, R b, R inverse_of_b2) {
    constexpr R kLeast = sizeof(R) == 8 ? 0x1p-1022 : 0x1p-126, kMost = sizeof(R) == 8 ? 600 : 80;
    const R l = p >= kLeast ? log_for<T>(p) : R{0}, t = min(-b * l, kMost);
    s = p * exp_for<T>(t);
    w = fma(p, t, p);
    v = t > 1 ? (s - w) * inverse_of_b2 : p * l * l * second_remainder<T>(t);
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

// R: the arithmetic of terms, double above alpha = 2, where powers leave the range of float, and in
// f64.
template <class T, class R, class Threads>
struct AlphaRow {
  AlphaSum<Real<T>> s, w, v, w_d_y, v_d_y;

  void add(const AnyRow<T>& row, int64_t length, double b) {
    constexpr int kChunk = kAlphaChunk<R>;
    const R inverse_of_b2 = static_cast<R>(1 / (b * b));
    const uint64_t addresses =
        reinterpret_cast<uint64_t>(row.y) | reinterpret_cast<uint64_t>(row.d_y);
    const bool vectors = kChunk > 1 && addresses % 16 == 0 && row.y_step == 1 && row.d_y_step == 1;
    for (int64_t first = kChunk * Threads::thread(); first < length;
         first += kChunk * Threads::kThreads) {
      R p[kChunk], d_y[kChunk];
      if (vectors && first + kChunk <= length) {
        load_chunk(row.y + first, p);
        load_chunk(row.d_y + first, d_y);
      } else {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
          const int64_t i = first + k;
          p[k] = i < length ? static_cast<R>(to_real(row.y[i * row.y_step])) : R{0};
          d_y[k] = i < length ? static_cast<R>(to_real(row.d_y[i * row.d_y_step])) : R{0};
        }
      }
      add_chunk(p, d_y, static_cast<R>(b), inverse_of_b2);
    }
  }

 private:
  static void load_chunk(const T* from, R (&to)[kAlphaChunk<R>]) {
    if constexpr (kAlphaChunk<R> > 1) {
      constexpr int kLength = kVectorLength<T>;
#pragma unroll
      for (int k = 0; k < kAlphaChunk<R>; k += kLength) {
        const Piece piece = load_words(from + k);
#pragma unroll
        for (int e = 0; e < kLength; ++e) to[k + e] = element_of(piece, e, T{});
      }
    }
  }
  // So that a constant added to d_y leaves no trace in 32 bits, sums are of what d_y has past
  // that of the chunk's largest p. (That of a small p may be past all others by any factor, as a
  // logarithm's gradient is, and must not meet their weights.)
  void add_chunk(const R (&p)[kAlphaChunk<R>], const R (&d_y)[kAlphaChunk<R>], R b,
                 R inverse_of_b2) {
    R most = 0, origin = 0, of_s = 0, of_w = 0, of_v = 0, of_w_d_y = 0, of_v_d_y = 0;
#pragma unroll
    for (int k = 0; k < kAlphaChunk<R>; ++k) {
      origin = p[k] > most ? d_y[k] : origin;
      most = max(most, p[k]);
    }
#pragma unroll
    for (int k = 0; k < kAlphaChunk<R>; ++k) {
      const AlphaTerms<T, R> terms(p[k], b, inverse_of_b2);
      const R past = p[k] == 0 ? p[k] : d_y[k] - origin;
      of_s += terms.s;
      of_w += terms.w;
      of_v += terms.v;
      of_w_d_y = fma(terms.w, past, of_w_d_y);
      of_v_d_y = fma(terms.v, past, of_v_d_y);
    }
    const double from = origin, sum_w = of_w, sum_v = of_v;
    s.add(of_s);
    w.add(sum_w);
    v.add(sum_v);
    w_d_y.add(fma(from, sum_w, static_cast<double>(of_w_d_y)));
    v_d_y.add(fma(from, sum_v, static_cast<double>(of_v_d_y)));
  }
};

template <class T, Mapping kMapping>
void backward_d_alpha(const BackwardParams& p) {
  using Threads = RowThreads<kMapping>;
  __shared__ double scratch[Threads::kScratch];
  const int64_t task = static_cast<int64_t>(blockIdx.x) * Threads::kRows + Threads::row();
  const bool exists = task < p.rows.count * p.rows.groups;
  RowPlace place = any_place<T>(p, exists ? task : 0);
  if (!exists) place.length = 0;
  const AnyRow<T> row(p, place);

  double s, w, v, w_d_y, v_d_y;
  const auto take = [&](auto sums) {
    sums.add(row, place.length, place.alpha - 1);
    s = sums.s.total();
    w = sums.w.total();
    v = sums.v.total();
    w_d_y = sums.w_d_y.total();
    v_d_y = sums.v_d_y.total();
  };
  if (sizeof(T) == 8 || place.alpha <= 2) {
    take(AlphaRow<T, Real<T>, Threads>());
  } else {
    take(AlphaRow<T, double, Threads>());
  }
  for (double* sum : {&s, &w, &v, &w_d_y, &v_d_y}) *sum = Threads::sum(*sum, scratch);
  if (!exists || Threads::thread() != 0) return;
  double result = (v * w_d_y - w * v_d_y) / s;
  if (s == 0) result = 0;  // nothing visible in the row
  if (place.nan) result = quiet_nan<double>();
  const int64_t at = row_offset(p.rows, p.d_alpha, place.row) + place.group * p.d_alpha.axis;
  static_cast<Real<T>*>(p.d_alpha.data)[at] = static_cast<Real<T>>(result);
}

}  // namespace pullback::entmax
