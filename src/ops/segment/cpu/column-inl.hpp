// Folding the rows of a tensor with one column: the lanes of a vector hold consecutive rows.

#if defined(PULLBACK_SEGMENT_COLUMN_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_COLUMN_INL_HPP
#undef PULLBACK_SEGMENT_COLUMN_INL_HPP
#else
#define PULLBACK_SEGMENT_COLUMN_INL_HPP
#endif

#include <bit>

#include "ops/segment/cpu/extreme-inl.hpp"
#include "ops/segment/cpu/product-inl.hpp"
#include "ops/segment/cpu/rows-inl.hpp"
#include "ops/segment/cpu/task-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

// Calls f(vector number, vector) for kFewVectors, `identity` behind the last element.
template <class D, class R, class F>
HWY_INLINE void ForFewVectors(D d, const R* HWY_RESTRICT from, std::int64_t count, R identity,
                              const F& f) {
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t k = 0; k < kFewVectors; ++k) {
    if constexpr (pullback::HWY_NAMESPACE::kMasksElements<R>) {
      // Masks without a branch: how many vectors there are is a guess.
      const hn::RebindToSigned<D> di;
      const auto place = hn::Iota(di, static_cast<Int<R>>(k * step));
      const auto inside = hn::RebindMask(d, hn::Lt(place, hn::Set(di, static_cast<Int<R>>(count))));
      const auto v = hn::MaskedLoad(inside, d, from + k * step);
      f(k, hn::IfThenElse(inside, v, hn::Set(d, identity)));
    } else {
      const std::int64_t left = std::clamp<std::int64_t>(count - k * step, 0, step);
      const R* at = from + std::min(k * step, count);
      f(k, LoadFirst(d, at, static_cast<std::size_t>(left), identity));
    }
  }
}

// One vector whose lanes together fold all of `count` > 0 elements. `identity` fills the rest.
template <class D, class R, class Op>
HWY_INLINE hn::Vec<D> FoldToLanes(D d, const R* HWY_RESTRICT from, std::int64_t count, R identity,
                                  const Op& op) {
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  if (count <= step) return LoadFirst(d, from, static_cast<std::size_t>(count), identity);
  auto a = hn::Set(d, identity);
  if (count <= kFewVectors * step) {
    ForFewVectors(d, from, count, identity, [&](std::int64_t, auto v) HWY_ATTR { a = op(a, v); });
    return a;
  }
  std::int64_t i = 0;
  if (count >= 4 * step) {
    auto b = a, c = a, e = a;
    LinesAhead ahead = RowsAhead(Block<R>{from, 1, count}, 1);
    for (; i + 4 * step <= count; i += 4 * step) {
      for (int k = 0; k < 4; ++k) ahead.Step();
      a = op(a, hn::LoadU(d, from + i));
      b = op(b, hn::LoadU(d, from + i + step));
      c = op(c, hn::LoadU(d, from + i + 2 * step));
      e = op(e, hn::LoadU(d, from + i + 3 * step));
    }
    a = op(op(a, b), op(c, e));
  }
  for (; i + step <= count; i += step) a = op(a, hn::LoadU(d, from + i));
  if (i < count) a = op(a, LoadFirst(d, from + i, static_cast<std::size_t>(count - i), identity));
  return a;
}

template <class R>
HWY_INLINE R SumOfRun(const R* from, std::int64_t count) {
  const hn::ScalableTag<R> d;
  const auto lanes =
      FoldToLanes(d, from, count, R{0}, [](auto a, auto b) { return hn::Add(a, b); });
  return hn::GetLane(hn::SumOfLanes(d, lanes));
}

template <class R>
R DotOfRuns(const R* HWY_RESTRICT a, const R* HWY_RESTRICT b, std::int64_t count) {
  const hn::ScalableTag<R> d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  LinesAhead a_ahead = RowsAhead(Block<R>{a, 1, count}, 1);
  LinesAhead b_ahead = RowsAhead(Block<R>{b, 1, count}, 1);
  auto even = hn::Zero(d), odd = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + 2 * step <= count; i += 2 * step) {
    for (int k = 0; k < 2; ++k) {
      a_ahead.Step();
      b_ahead.Step();
    }
    even = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), even);
    odd = hn::MulAdd(hn::LoadU(d, a + i + step), hn::LoadU(d, b + i + step), odd);
  }
  for (; i < count; i += step) {
    const auto left = static_cast<std::size_t>(std::min(step, count - i));
    even = hn::MulAdd(LoadFirst(d, a + i, left), LoadFirst(d, b + i, left), even);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd)));
}

// The first or last place of a value, of NaN the first; -1 if it is nowhere.
template <class R>
std::int64_t PlaceOfValue(const R* HWY_RESTRICT from, std::int64_t count, R value, bool last) {
  const hn::ScalableTag<R> d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  const auto wanted = hn::Set(d, value);
  const bool nan = std::isnan(value);
  std::int64_t place = -1;
  for (std::int64_t i = 0; i < count; i += step) {
    const auto left = static_cast<std::size_t>(std::min(step, count - i));
    const auto v = LoadFirst(d, from + i, left);
    const auto equal = hn::And(nan ? hn::IsNaN(v) : hn::Eq(v, wanted), hn::FirstN(d, left));
    if (HWY_LIKELY(hn::AllFalse(d, equal))) continue;
    const unsigned bits = BitsOf(d, equal);
    if (!last || nan) return i + std::countr_zero(bits);
    place = i + std::bit_width(bits) - 1;
  }
  return place;
}

// How many rows tie with a value.
template <class R>
std::int64_t CountOfValue(const R* HWY_RESTRICT from, std::int64_t count, R value) {
  const hn::ScalableTag<R> d;
  const auto wanted = hn::Set(d, value);
  std::size_t found = 0;
  LinesAhead ahead = RowsAhead(Block<R>{from, 1, count}, 1);
  ForColumns<R>(count, [&](auto lanes, std::int64_t i) HWY_ATTR {
    ahead.Step();
    const auto tied = Tied(lanes.Read(d, from + i), wanted);
    found += hn::CountTrue(d, hn::And(tied, lanes.Inside(d)));
  });
  return static_cast<std::int64_t>(found);
}

// Place of the extreme: the first or last of equal ones, of NaN the first.
template <bool kMax, bool kLast, class R>
std::int64_t PlaceOfLongExtreme(const R* HWY_RESTRICT from, std::int64_t count) {
  const hn::ScalableTag<R> d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  constexpr R kIdentity = kMax ? -kInf<R> : kInf<R>;
  const auto better = [](auto a, auto b) HWY_ATTR { return kMax ? hn::Max(a, b) : hn::Min(a, b); };
  const auto best_of = [&](auto a, auto b, auto c, auto e)
                           HWY_ATTR { return better(better(a, b), better(c, e)); };
  const std::int64_t whole = count / (4 * step) * (4 * step);
  auto best = hn::Set(d, kIdentity), sum = hn::Zero(d);  // a sum with a NaN is NaN
  LinesAhead ahead = RowsAhead(Block<R>{from, 1, count}, 1);
  for (std::int64_t i = 0; i < whole; i += 4 * step) {
    for (int k = 0; k < 4; ++k) ahead.Step();
    const auto a = hn::LoadU(d, from + i), b = hn::LoadU(d, from + i + step);
    const auto c = hn::LoadU(d, from + i + 2 * step), e = hn::LoadU(d, from + i + 3 * step);
    best = better(best, best_of(a, b, c, e));
    sum = hn::Add(sum, hn::Add(hn::Add(a, b), hn::Add(c, e)));
  }
  for (std::int64_t i = whole; i < count; i += step) {
    const auto left = static_cast<std::size_t>(std::min(step, count - i));
    best = better(best, LoadFirst(d, from + i, left, kIdentity));
    sum = hn::Add(sum, LoadFirst(d, from + i, left));
  }
  if (!hn::AllFalse(d, hn::IsNaN(sum))) {  // opposite infinities have no NaN for all that
    std::int64_t i = 0;
    while (i < count && !std::isnan(from[i])) ++i;
    if (i < count) return i;
  }
  const auto extreme = kMax ? hn::MaxOfLanes(d, best) : hn::MinOfLanes(d, best);
  const auto place_from = [&](std::int64_t i) HWY_ATTR {
    const auto left = static_cast<std::size_t>(std::min(step, count - i));
    const auto equal = hn::Eq(LoadFirst(d, from + i, left, kIdentity), extreme);
    const unsigned bits = BitsOf(d, hn::And(equal, hn::FirstN(d, left)));
    if (bits == 0) return std::int64_t{-1};
    return i + (kLast ? std::bit_width(bits) - 1 : std::countr_zero(bits));
  };
  const auto place_in = [&](std::int64_t begin, std::int64_t end) HWY_ATTR {
    const std::int64_t vectors = (end - begin + step - 1) / step;
    for (std::int64_t k = 0; k < vectors; ++k) {
      const std::int64_t place = place_from(begin + (kLast ? vectors - 1 - k : k) * step);
      if (place >= 0) return place;
    }
    return std::int64_t{-1};
  };
  if (kLast) {
    if (const std::int64_t place = place_in(whole, count); place >= 0) return place;
  }
  for (std::int64_t k = 0; k < whole; k += 4 * step) {
    const std::int64_t i = kLast ? whole - 4 * step - k : k;
    const auto a = hn::LoadU(d, from + i), b = hn::LoadU(d, from + i + step);
    const auto c = hn::LoadU(d, from + i + 2 * step), e = hn::LoadU(d, from + i + 3 * step);
    if (!hn::AllFalse(d, hn::Eq(best_of(a, b, c, e), extreme))) return place_in(i, i + 4 * step);
  }
  return place_in(whole, count);
}

// The same of at most kFewVectors vectors; negative if there is a NaN.
template <bool kMax, bool kLast, class R>
std::int64_t PlaceOfExtremeOfFew(const R* HWY_RESTRICT from, std::int64_t count) {
  const hn::ScalableTag<R> d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  constexpr R kIdentity = kMax ? -kInf<R> : kInf<R>;
  hn::Vec<decltype(d)> v[kFewVectors];
  ForFewVectors(d, from, count, kIdentity,
                [&](std::int64_t k, auto rows) HWY_ATTR { v[k] = rows; });
  // NaN for opposite infinities too, which costs time only.
  const auto sum = hn::Add(hn::Add(v[0], v[1]), hn::Add(v[2], v[3]));
  if (!hn::AllFalse(d, hn::IsNaN(sum))) return -1;
  const auto better = [](auto a, auto b) { return kMax ? hn::Max(a, b) : hn::Min(a, b); };
  const auto best = better(better(v[0], v[1]), better(v[2], v[3]));
  const auto extreme = kMax ? hn::MaxOfLanes(d, best) : hn::MinOfLanes(d, best);
  std::uint64_t bits = 0;
  for (std::int64_t k = 0; k < kFewVectors; ++k) {
    bits |= std::uint64_t{BitsOf(d, hn::Eq(v[k], extreme))} << (k * step);
  }
  bits &= (std::uint64_t{2} << (count - 1)) - 1;
  return kLast ? std::bit_width(bits) - 1 : std::countr_zero(bits);
}

template <bool kMax, bool kLast, class R>
HWY_INLINE std::int64_t PlaceOfExtreme(const R* HWY_RESTRICT from, std::int64_t count) {
  const hn::ScalableTag<R> d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  if (count > step) {
    const std::int64_t place =
        count <= kFewVectors * step ? PlaceOfExtremeOfFew<kMax, kLast>(from, count) : -1;
    return place >= 0 ? place : PlaceOfLongExtreme<kMax, kLast>(from, count);
  }
  const auto left = static_cast<std::size_t>(count);
  const auto v = LoadFirst(d, from, left, kMax ? -kInf<R> : kInf<R>);
  const auto nan = hn::IsNaN(v);
  if (!hn::AllFalse(d, nan)) return std::countr_zero(BitsOf(d, nan));
  const auto extreme = kMax ? hn::MaxOfLanes(d, v) : hn::MinOfLanes(d, v);
  const unsigned bits = BitsOf(d, hn::And(hn::Eq(v, extreme), hn::FirstN(d, left)));
  return kLast ? std::bit_width(bits) - 1 : std::countr_zero(bits);
}

// The LogSum of a run whose elements are near a shift, and with kKeep the powers to `to`. False,
// and they mean nothing, if one is not.
template <bool kKeep, class R>
bool PowersOfNearRun(const R* HWY_RESTRICT from, std::int64_t count, const LogSum<R>& state,
                     R* HWY_RESTRICT to) {
  const hn::ScalableTag<R> d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  LinesAhead ahead = RowsAhead(Block<R>{from, 1, count}, 1);
  const auto start = hn::Set(d, from[0]);
  const auto shift = count == 1 ? start : NearShift(d, start);
  Nearness<decltype(d)> near, near2;
  auto total = hn::Zero(d), total2 = total;
  std::int64_t i = 0;
  while (i + 2 * step <= count) {
    constexpr std::int64_t kLook = 512;  // rows until what is far ends this
    const std::int64_t stop = std::min(count, i + kLook);
    for (; i + 2 * step <= stop; i += 2 * step) {
      ahead.Step();
      ahead.Step();
      const auto v = hn::Sub(hn::LoadU(d, from + i), shift);
      const auto w = hn::Sub(hn::LoadU(d, from + i + step), shift);
      near.Add(v);
      near2.Add(w);
      const auto power = ExpOfNear(d, v), power2 = ExpOfNear(d, w);
      total = hn::Add(total, power);
      total2 = hn::Add(total2, power2);
      if (kKeep) hn::StoreU(power, d, to + i);
      if (kKeep) hn::StoreU(power2, d, to + i + step);
    }
    if (!near.All(shift) || !near2.All(shift)) return false;
  }
  for (; i < count; i += step) {
    const auto left = static_cast<std::size_t>(std::min(step, count - i));
    const auto v = hn::Sub(LoadFirst(d, from + i, left, from[0]), shift);
    near.Add(v);
    const auto power = ExpOfNear(d, v);
    total = hn::Add(total, hn::IfThenElseZero(hn::FirstN(d, left), power));
    if (kKeep) StoreFirst(d, power, to + i, left);
  }
  state.largest[0] = hn::GetLane(shift);
  state.sum[0] = hn::GetLane(hn::SumOfLanes(d, hn::Add(total, total2)));
  return near.All(shift);
}

// The LogSum of a run, and with kKeep the powers to `to`.
template <bool kKeep, class R>
void LogSumOfRun(const R* HWY_RESTRICT from, std::int64_t count, const LogSum<R>& state,
                 R* HWY_RESTRICT to = nullptr) {
  if (PowersOfNearRun<kKeep>(from, count, state, to)) return;
  const hn::ScalableTag<R> d;
  auto largest = hn::Set(d, -kInf<R>), sum = hn::Zero(d);
  ForColumns<R>(count, [&](auto lanes, std::int64_t i) HWY_ATTR {
    const auto x = hn::IfThenElse(lanes.Inside(d), lanes.Read(d, from + i), hn::Set(d, -kInf<R>));
    largest = hn::Max(x, largest);
  });
  largest = hn::MaxOfLanes(d, largest);
  const auto shift = Shift(d, largest);
  ForColumns<R>(count, [&](auto lanes, std::int64_t i) HWY_ATTR {
    const auto power = ExpOf(d, hn::Sub(lanes.Read(d, from + i), shift));
    sum = hn::Add(sum, lanes.First(d, power));
    if (kKeep) lanes.Write(d, power, to + i);
  });
  state.largest[0] = hn::GetLane(largest);
  state.sum[0] = hn::GetLane(hn::SumOfLanes(d, sum));
}

// Softmax of a run.
template <class R>
void SoftmaxOfRun(const R* HWY_RESTRICT from, std::int64_t count, R* HWY_RESTRICT to) {
  const hn::ScalableTag<R> d;
  R largest[hn::MaxLanes(d)] = {},
    sum[hn::MaxLanes(d)] = {};  // whole vectors, of which one is used
  LogSumOfRun<true>(from, count, LogSum<R>{largest, sum}, to);
  FinishSoftmax(LogSum<R>{largest, sum}, 1);
  const auto inverse = hn::Set(d, sum[0]);
  ForColumns<R>(count, [&](auto lanes, std::int64_t i) HWY_ATTR {
    lanes.Write(d, hn::Mul(lanes.Read(d, to + i), inverse), to + i);
  });
}

// A piece of a tensor with one column, to the state that forward keeps of it.
template <class T, class R>
void FoldRun(const SegmentProblem& problem, const Matrix<const T>& x, const Segments& segments,
             const Piece& piece, const State<R>& state, const Task<R>& task) {
  ForRuns(piece, [&](std::int64_t row, std::int64_t rows) {
    const R* run = ReadRun(x, segments, row, rows, task.block);
    const bool first = row == piece.begin;
    switch (problem.reduce) {
      case SegmentReduce::sum:
      case SegmentReduce::mean:
        state.a[0] = SumOfRun(run, rows) + (first ? R{0} : state.a[0]);
        break;
      case SegmentReduce::prod:
        state.a[0] = ProductOfRun(run, rows) * (first ? R{1} : state.a[0]);
        state.b[0] = 0;
        break;
      case SegmentReduce::max:
      case SegmentReduce::min: {
        const std::int64_t place = WithExtreme(problem, [&]<bool kMax, bool kLast>() {
          return PlaceOfExtreme<kMax, kLast>(run, rows);
        });
        if (first || Beats(problem, run[place], state.a[0])) {
          state.a[0] = run[place];
          state.places()[0] = static_cast<Int<R>>(row - piece.begin + place);
        }
        break;
      }
      case SegmentReduce::logsumexp:
      case SegmentReduce::softmax: {
        const LogSum<R> later{task.vector, task.vector + 1};
        LogSumOfRun<false>(run, rows, first ? state.log_sum() : later);
        if (!first) MergeLogSum(state.log_sum(), later, 1);
        break;
      }
    }
  });
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
