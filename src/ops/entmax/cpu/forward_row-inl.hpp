// A row of the forward pass: where it is, its maximum, and rows that have no distribution.

#if defined(PULLBACK_ENTMAX_FORWARD_ROW_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_FORWARD_ROW_INL_HPP
#undef PULLBACK_ENTMAX_FORWARD_ROW_INL_HPP
#else
#define PULLBACK_ENTMAX_FORWARD_ROW_INL_HPP
#endif

#include "cpu/ahead-inl.hpp"
#include "ops/entmax/cpu/forward_tile.hpp"
#include "ops/entmax/cpu/solve-inl.hpp"
#include "ops/entmax/cpu/stream-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

using entmax::RowResult;

constexpr std::size_t kAccumulators = 4;

template <class T>
struct RowView {
  const T* x;
  std::size_t length;
  T* y;                   // or null
  std::uint8_t* support;  // or null
  bool stream;
  bool wants_size;
  const T* next;  // the row that comes after this one, or null
};

// LinesAhead for rows that are read one after the other: the four lines that it takes in turn are
// fetched at once, for a third of the instructions.
class FourLinesAhead {
 public:
  explicit FourLinesAhead(const void* at)
      : at_(reinterpret_cast<std::uintptr_t>(at) / kFour * kFour) {}

  // All before `to` is used.
  HWY_INLINE void StepTo(const void* to) {
    for (const auto end = reinterpret_cast<std::uintptr_t>(to); at_ + kFour <= end; at_ += kFour) {
      constexpr std::uintptr_t kPage = 4096, kRegion = LinesAhead::kLead;
      static_assert(kRegion == 4 * kPage);
      const auto* next =
          reinterpret_cast<const char*>((at_ / kRegion + 1) * kRegion + at_ % kRegion / 4);
      for (std::uintptr_t page = 0; page < 4; ++page) hwy::Prefetch(next + page * kPage);
    }
  }

 private:
  static constexpr std::uintptr_t kFour = 4 * LinesAhead::kLine;

  std::uintptr_t at_;
};

constexpr std::size_t kNextBytes = 8192;

// The solver computes on few elements for as long as it takes to fetch a few KB: without this,
// memory would idle.
template <class T>
void PrefetchNext(const RowView<T>& row) {
  if (row.next == nullptr) return;
  const auto* from = reinterpret_cast<const std::uint8_t*>(row.next);
  for (std::size_t i = 0; i < std::min(row.length * sizeof(T), kNextBytes); i += 64) {
    hwy::Prefetch(from + i);
  }
}

// The maximum, NaN if there is a NaN. `lane_maxima` receives kAccumulators vectors, which are the
// row itself, padded with -inf, when it is that short.
template <class R, class T>
R MaxOfRow(const T* x, std::size_t length, R* lane_maxima, bool prefetch) {
  const hn::ScalableTag<R> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto lowest = hn::Set(d, -std::numeric_limits<R>::infinity());
  auto m0 = lowest, m1 = lowest, m2 = lowest, m3 = lowest;
  auto nan = hn::IsNaN(lowest);
  const auto take = [&](auto v, auto& max) HWY_ATTR {
    nan = hn::Or(nan, hn::IsNaN(v));
    max = hn::Max(v, max);
  };
  std::size_t i = 0;
  LinesAhead ahead(x, lanes * sizeof(T));
  for (; i + 4 * lanes <= length; i += 4 * lanes) {
    for (int k = 0; prefetch && k < 4; ++k) ahead.Step();
    take(LoadAs(d, x + i), m0);
    take(LoadAs(d, x + i + lanes), m1);
    take(LoadAs(d, x + i + 2 * lanes), m2);
    take(LoadAs(d, x + i + 3 * lanes), m3);
  }
  if (i + lanes <= length) take(LoadAs(d, x + i), m0), i += lanes;
  if (i + lanes <= length) take(LoadAs(d, x + i), m1), i += lanes;
  if (i + lanes <= length) take(LoadAs(d, x + i), m2), i += lanes;
  if (i < length) {
    take(LoadFirstAs(d, x + i, length - i, -std::numeric_limits<Real<T>>::infinity()), m3);
  }
  hn::StoreU(m0, d, lane_maxima);
  hn::StoreU(m1, d, lane_maxima + lanes);
  hn::StoreU(m2, d, lane_maxima + 2 * lanes);
  hn::StoreU(m3, d, lane_maxima + 3 * lanes);
  if (!hn::AllFalse(d, nan)) return std::numeric_limits<R>::quiet_NaN();
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(hn::Max(m0, m1), hn::Max(m2, m3))));
}

template <class T>
void FillRow(const RowView<T>& row, double value) {
  if (row.y) std::fill_n(row.y, row.length, from_double<T>(value));
  if (row.support) std::fill_n(row.support, (row.length + 7) / 8, std::uint8_t{0});
}

// Rows without a distribution: with a NaN or +inf, with nothing visible, or with an invalid alpha.
template <class T>
RowResult DegenerateRow(const RowView<T>& row, bool empty) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  FillRow(row, empty ? 0.0 : kNaN);
  if (empty) return {std::numeric_limits<double>::infinity(), 0};
  return {kNaN, -1};
}

// Where a row goes that is not wanted. Not a null pointer: those have no elements to point to.
struct Nowhere {
  Nowhere operator+(std::size_t) const { return {}; }
};
struct NoStore {
  template <class D>
  HWY_INLINE void operator()(D, hn::Vec<D>, Nowhere) const {}
};

// What is wanted of y, the bits of its support, and its size, which is returned.
template <class P, class R, class T>
std::int64_t WriteY(const P& power, const RowView<T>& row, R max, const Threshold<R>& threshold) {
  const hn::ScalableTag<R> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto shift = hn::Set(d, max), at = hn::Set(d, threshold.theta);
  const auto scale = hn::Set(d, threshold.scale), rest = hn::Set(d, threshold.rest);
  const auto excess_of = [&](auto v) HWY_ATTR {
    const auto excess = power.Excess(d, hn::Sub(v, shift), at);
    // Below the edge nothing is in the support, even if the sum of the two rounds up.
    if constexpr (P::steep) {
      return hn::IfThenElse(hn::Lt(excess, hn::Zero(d)), excess, hn::Sub(excess, rest));
    }
    return P::uses_rest ? hn::Sub(excess, rest) : excess;
  };
  const auto value = [&](auto excess) HWY_ATTR {
    if constexpr (P::family == Family::sparsemax) return power.Value(d, excess);
    // Most vectors hold nothing of the support: no power for them.
    constexpr bool kCheap = P::family == Family::entmax15;
    if (!kCheap && hn::AllFalse(d, power.Active(d, excess))) return hn::Zero(d);
    const auto p = power.Value(d, excess);
    if constexpr (P::steep) return hn::IfThenElse(hn::Eq(excess, hn::Neg(rest)), scale, p);
    return P::uses_rest ? p : hn::Mul(scale, p);
  };
  const auto load_first = [&](const T* from, std::size_t count) HWY_ATTR {
    return LoadFirstAs(d, from, count, -std::numeric_limits<Real<T>>::infinity());
  };
  const bool marks = row.support != nullptr || row.wants_size;
  std::size_t size = 0;
  const auto mark = [&](auto excess, std::size_t i) HWY_ATTR {
    const auto active = power.Active(d, excess);
    size += hn::CountTrue(d, active);
    if (row.support) StoreBits(d, active, i, row.length, row.support);
  };
  const auto fill = [&](auto to, std::size_t begin, std::size_t count, auto store) HWY_ATTR {
    const T* x = row.x + begin;
    std::size_t i = 0;
    if (marks) {
      for (; i + lanes <= count; i += lanes) {
        const auto excess = excess_of(LoadAs(d, x + i));
        mark(excess, begin + i);
        store(d, value(excess), to + i);
      }
    } else {
      for (; i + lanes <= count; i += lanes) store(d, value(excess_of(LoadAs(d, x + i))), to + i);
    }
    if (i == count) return;
    const auto excess = excess_of(load_first(x + i, count - i));
    if (marks) mark(excess, begin + i);
    if constexpr (!std::is_same_v<decltype(to), Nowhere>) {
      StoreFirstAs(d, value(excess), to + i, count - i);
    }
  };
  if (row.y) {
    WriteRow(row.y, row.length, row.stream, fill);
  } else {
    fill(Nowhere(), 0, row.length, NoStore());
  }
  return static_cast<std::int64_t>(size);
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
