// The backward pass of one row: the mean of d_y by s, and the gradient.

#if defined(PULLBACK_ENTMAX_BACKWARD_ROW_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_BACKWARD_ROW_INL_HPP
#undef PULLBACK_ENTMAX_BACKWARD_ROW_INL_HPP
#else
#define PULLBACK_ENTMAX_BACKWARD_ROW_INL_HPP
#endif

#include "cpu/ahead-inl.hpp"
#include "ops/entmax/cpu/backward_steep-inl.hpp"
#include "ops/entmax/cpu/stream-inl.hpp"
#include "ops/entmax/cpu/weights-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// Calls body(i, w, active, count) for vectors of elements in [begin, end), and skip(i) for groups
// of kGroup whole vectors that have no active element. Branching on single vectors would mispredict
// where a row is neither sparse nor dense.
constexpr std::size_t kGroup = 4;
template <class D, class W, class Body, class Skip>
HWY_INLINE void ForEachVector(D d, const W& weights, std::size_t begin, std::size_t end,
                              const Body& body, const Skip& skip) {
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = begin;
  for (; i + kGroup * lanes <= end; i += kGroup * lanes) {
    const auto w0 = weights.Load(d, i, lanes), w1 = weights.Load(d, i + lanes, lanes);
    const auto w2 = weights.Load(d, i + 2 * lanes, lanes);
    const auto w3 = weights.Load(d, i + 3 * lanes, lanes);
    const auto a0 = weights.Active(d, w0), a1 = weights.Active(d, w1);
    const auto a2 = weights.Active(d, w2), a3 = weights.Active(d, w3);
    if (hn::AllFalse(d, hn::Or(hn::Or(a0, a1), hn::Or(a2, a3)))) {
      skip(i);
      continue;
    }
    body(i, w0, a0, lanes);
    body(i + lanes, w1, a1, lanes);
    body(i + 2 * lanes, w2, a2, lanes);
    body(i + 3 * lanes, w3, a3, lanes);
  }
  for (; i < end; i += lanes) {
    const std::size_t count = std::min(lanes, end - i);
    const auto w = weights.Load(d, i, count);
    body(i, w, weights.Active(d, w), count);
  }
}

// <s, d_y> / S. Keeps s in `stored` unless that is null. The rows that come after this one are
// prefetched, of y unless that is null, of d_y as much as is needed here: no hardware foresees
// which groups will have an active element.
template <class R, class W, class T>
HWY_INLINE R WeightedMean(const W& weights, const T* y, const T* d_y, std::size_t length,
                          R* stored) {
  const hn::ScalableTag<R> d;
  LinesAhead y_ahead(y), d_y_ahead(d_y);
  const auto prefetch_y = [&](std::size_t i) HWY_ATTR {
    if (y != nullptr) y_ahead.StepTo(y + i);
  };
  const std::size_t block = kSumVectors * hn::Lanes(d);
  double total = 0, dot = 0;
  for (std::size_t begin = 0; begin < length; begin += block) {
    auto part = hn::Zero(d), dot_part = hn::Zero(d);
    ForEachVector(
        d, weights, begin, std::min(length, begin + block),
        [&](std::size_t i, auto w, auto active, std::size_t count) HWY_ATTR {
          prefetch_y(i);
          d_y_ahead.StepTo(d_y + i);
          const auto s = hn::IfThenElseZero(active, weights.Weight(d, w));
          const auto g = hn::IfThenElseZero(active, LoadSome(d, d_y + i, count));
          part = hn::Add(part, s);
          dot_part = hn::MulAdd(s, g, dot_part);
          if (stored) hn::StoreU(s, d, stored + i);
        },
        [&](std::size_t i) HWY_ATTR {
          prefetch_y(i);
          d_y_ahead.Skip(d_y + i);
          for (std::size_t k = 0; stored && k < kGroup; ++k) {
            hn::StoreU(hn::Zero(d), d, stored + i + k * hn::Lanes(d));
          }
        });
    total += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, part)));
    dot += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, dot_part)));
  }
  return static_cast<R>(dot / total);
}

// `mean` is an R or a SplitMean.
template <class R, class W, class M, class T>
void WriteGradient(const W& weights, const M& mean, const T* d_y, T* d_x, std::size_t length,
                   bool stream) {
  const hn::ScalableTag<R> d;
  const std::size_t lanes = hn::Lanes(d);
  WriteRow(d_x, length, stream,
           [&](T* to, std::size_t begin, std::size_t count, auto store) HWY_ATTR {
             ForEachVector(
                 d, weights, begin, begin + count,
                 [&](std::size_t i, auto w, auto active, std::size_t n) HWY_ATTR {
                   const auto difference = Less(d, LoadSome(d, d_y + i, n), mean);
                   const auto gradient =
                       hn::IfThenElseZero(active, hn::Mul(weights.Weight(d, w), difference));
                   if (n == lanes) {
                     store(d, gradient, to + (i - begin));
                   } else {
                     StoreFirstAs(d, gradient, to + (i - begin), n);
                   }
                 },
                 [&](std::size_t i) HWY_ATTR {
                   for (std::size_t k = 0; k < kGroup; ++k) {
                     store(d, hn::Zero(d), to + (i - begin) + k * lanes);
                   }
                 });
           });
}

template <class R, class W, class T>
void Gradient(const W& weights, const T* y, const T* d_y, T* d_x, std::size_t length, bool stream) {
  const R mean = WeightedMean<R>(weights, y, d_y, length, static_cast<R*>(nullptr));
  WriteGradient<R>(weights, mean, d_y, d_x, length, stream);
}

template <class T>
void FillNaN(T* d_x, std::size_t length) {
  std::fill_n(d_x, length, from_double<T>(std::numeric_limits<double>::quiet_NaN()));
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
