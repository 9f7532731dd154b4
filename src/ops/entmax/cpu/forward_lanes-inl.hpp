// The forward pass of rows in the lanes (lanes-inl.hpp): short rows, and rows in columns.

#if defined(PULLBACK_ENTMAX_FORWARD_LANES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_FORWARD_LANES_INL_HPP
#undef PULLBACK_ENTMAX_FORWARD_LANES_INL_HPP
#else
#define PULLBACK_ENTMAX_FORWARD_LANES_INL_HPP
#endif

#include "ops/entmax/cpu/forward_row-inl.hpp"
#include "ops/entmax/cpu/forward_tile.hpp"
#include "ops/entmax/cpu/lanes-inl.hpp"
#include "ops/entmax/cpu/stream-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

using entmax::ForwardTile;
using entmax::TensorRows;

// Up to this length, rows are computed in the lanes.
constexpr std::int64_t kLaneLength = 128;
// Where powers take a logarithm, which batches compute of candidates only.
constexpr std::int64_t kPowerLaneLength = 64;

// Calls f(Power) of the tile's rows, which have one alpha, not above 2; false for others.
template <class R, class F>
bool WithPowerOfLanes(const ForwardTile& tile, const F& f) {
  if (tile.alpha_per_row || tile.length == 0) return false;
  switch (entmax::family_of(tile.alpha)) {
    case Family::softmax:
      return f(LanePower<Family::softmax, R>(tile.alpha));
    case Family::near_one:
      return f(LanePower<Family::near_one, R>(tile.alpha));
    case Family::entmax15:
      return f(LanePower<Family::entmax15, R>(tile.alpha));
    case Family::general:
      return f(LanePower<Family::general, R>(tile.alpha));
    case Family::sparsemax:
      return f(LanePower<Family::sparsemax, R>(tile.alpha));
    default:
      return false;
  }
}

// From one row of a tile to the next.
template <class T>
struct RowStep {
  std::int64_t x, y, support;

  HWY_INLINE void operator()(RowView<T>& row) const {
    row.x += x;
    if (row.y) row.y += y;
    if (row.support) row.support += support;
  }
};

// y of kLanes rows of whole vectors, where each power takes tables: loaded once for all rows, which
// they cannot be while rows are written.
template <class T, class P>
void WriteRowsOfPowers(const P& shared_power, const LaneRows<Real<T>>& group,
                       const RowView<T>& first, const RowStep<T>& step) {
  using R = Real<T>;
  const LaneTag<R> d;
  const P power = shared_power;
  const std::size_t length = first.length;
  HWY_ALIGN R y[static_cast<std::size_t>(kLaneLength) * kLanes<R>];
  RowView<T> row = first;
  for (std::size_t k = 0; k < kLanes<R>; ++k, step(row)) {
    const auto shift = hn::Set(d, group.max[k]), theta = hn::Set(d, group.theta[k]);
    const auto rest = hn::Set(d, group.rest[k]);
    for (std::size_t i = 0; i < length; i += kLanes<R>) {
      const auto excess = power.Excess(d, hn::Sub(Load(d, row.x + i), shift), theta);
      hn::Store(power.Value(d, hn::Sub(excess, rest)), d, y + k * length + i);
    }
  }
  row = first;
  for (std::size_t k = 0; k < kLanes<R>; ++k, step(row)) {
    WriteRow(row.y, length, row.stream,
             [&](T* to, std::size_t begin, std::size_t count, auto store) HWY_ATTR {
               const R* from = y + k * length + begin;
               for (std::size_t i = 0; i < count; i += kLanes<R>) {
                 store(d, hn::Load(d, from + i), to + i);
               }
             });
  }
}

// kLanes rows from `first` on, a lane each for their thresholds; finish(k, RowResult) takes what
// row k of them has besides y. False, with nothing written, if one of them is degenerate.
template <class T, class P, class Finish>
bool ShortRows(const P& power, const RowView<T>& first, const RowStep<T>& step,
               const Finish& finish) {
  using R = Real<T>;
  const LaneTag<R> d;
  constexpr std::size_t kElements = kLaneLength * kLanes<R>;
  const std::size_t length = first.length;
  HWY_ALIGN R lanes[kElements];
  if constexpr (std::is_same_v<T, R>) {
    RowsToLanes(first.x, step.x, length, lanes);
  } else {
    HWY_ALIGN R wide[kElements + kLanes<R>];
    for (std::size_t k = 0; k < kLanes<R>; ++k) {
      const T* from = first.x + static_cast<std::int64_t>(k) * step.x;
      R* to = wide + k * length;
      std::size_t i = 0;
      for (; i + kLanes<R> <= length; i += kLanes<R>) hn::StoreU(Load(d, from + i), d, to + i);
      for (; i < length; ++i) to[i] = static_cast<R>(from[i]);
    }
    RowsToLanes(wide, static_cast<std::int64_t>(length), length, lanes);
  }
  LaneRows<R> group;
  constexpr std::size_t kParts = 4;
  const auto lowest = hn::Set(d, -std::numeric_limits<R>::infinity());
  auto m0 = lowest, m1 = lowest, m2 = lowest, m3 = lowest;
  auto broken = hn::IsNaN(lowest);
  const auto take = [&](std::size_t i, auto& best) HWY_ATTR {
    const auto v = hn::Load(d, lanes + i * kLanes<R>);
    broken = hn::Or(broken, hn::IsNaN(v));
    best = hn::Max(best, v);
  };
  std::size_t i = 0;
  for (; i + kParts <= length; i += kParts) {
    take(i, m0);
    take(i + 1, m1);
    take(i + 2, m2);
    take(i + 3, m3);
  }
  for (; i < length; ++i) take(i, m0);
  hn::Store(m0, d, group.part_max);
  hn::Store(m1, d, group.part_max + kLanes<R>);
  hn::Store(m2, d, group.part_max + 2 * kLanes<R>);
  hn::Store(m3, d, group.part_max + 3 * kLanes<R>);
  if (!group.SetMax(length) || !hn::AllFalse(d, broken)) return false;
  HWY_ALIGN R candidates[kElements];
  group.Solve(power, lanes, length, candidates);
  double tau[kLanes<R>];
  group.Tau(power, tau);
  if constexpr (P::family == Family::general) {
    if (length % kLanes<R> == 0 && first.y && !first.wants_size) {
      WriteRowsOfPowers(power, group, first, step);
      for (std::size_t k = 0; k < kLanes<R>; ++k) finish(k, RowResult{tau[k], 0});
      return true;
    }
  }
  RowView<T> row = first;
  for (std::size_t k = 0; k < kLanes<R>; ++k, step(row)) {
    const Threshold<R> threshold{group.theta[k], group.rest[k], group.scale[k]};
    finish(k, RowResult{tau[k], WriteY(power, row, group.max[k], threshold)});
  }
  return true;
}

// Softmax of such rows, which share the quotient and the logarithm.
template <class T, class Finish>
bool ShortSoftmax(const RowView<T>& first, const RowStep<T>& step, const Finish& finish) {
  using R = Real<T>;
  const LaneTag<R> d;
  constexpr std::size_t kPitch = kLaneLength;
  const std::size_t length = first.length, whole = length / kLanes<R> * kLanes<R>;
  const auto lowest = hn::Set(d, -std::numeric_limits<R>::infinity());
  HWY_ALIGN R e[kPitch * kLanes<R>];
  HWY_ALIGN R max[kLanes<R>];
  HWY_ALIGN R factor[kLanes<R>];
  const auto for_vectors = [&](std::size_t k, const auto& body) HWY_ATTR {
    const T* x = first.x + static_cast<std::int64_t>(k) * step.x;
    for (std::size_t i = 0; i < whole; i += kLanes<R>) body(Load(d, x + i), i);
    if (whole < length)
      body(LoadFirst(d, x + whole, length - whole, -std::numeric_limits<R>::infinity()), whole);
  };
  HWY_ALIGN R parts[kLanes<R> * kLanes<R>];
  for (std::size_t k = 0; k < kLanes<R>; ++k) {
    auto best = lowest;
    for_vectors(k, [&](auto v, std::size_t) HWY_ATTR { best = hn::Max(best, v); });
    hn::Store(best, d, parts + k * kLanes<R>);
  }
  const auto part = [&](std::size_t k) HWY_ATTR { return hn::Load(d, parts + k * kLanes<R>); };
  const auto highest = CombineRows<0, kLanes<R>>(d, part, MaxLanesOf());
  if (!hn::AllTrue(d, hn::IsFinite(highest))) return false;
  hn::Store(highest, d, max);
  for (std::size_t k = 0; k < kLanes<R>; ++k) {
    auto sum = hn::Zero(d);
    const auto shift = hn::Set(d, max[k]);
    for_vectors(k, [&](auto v, std::size_t i) HWY_ATTR {
      const auto p = ExpNonPositive(d, hn::Sub(v, shift));
      sum = hn::Add(sum, p);
      hn::Store(p, d, e + k * kPitch + i);
    });
    hn::Store(sum, d, parts + k * kLanes<R>);
  }
  const auto sum = SumsOfRows(parts);
  if (!hn::AllTrue(d, hn::IsFinite(sum))) return false;  // a NaN, which no maximum tells
  hn::Store(hn::Div(hn::Set(d, R{1}), sum), d, factor);
  HWY_ALIGN R logs[kLanes<R>];
  hn::Store(hn::Log(d, sum), d, logs);
  RowView<T> row = first;
  for (std::size_t k = 0; k < kLanes<R>; ++k, step(row)) {
    RowResult result{static_cast<double>(max[k]) + static_cast<double>(logs[k]), 0};
    // All but -inf, also where exp underflows.
    for (std::size_t i = 0; row.wants_size && i < length; ++i) {
      result.support_size += static_cast<R>(row.x[i]) > -std::numeric_limits<R>::infinity();
    }
    if (row.y) {
      const auto scale = hn::Set(d, factor[k]);
      const R* from = e + k * kPitch;
      WriteRow(row.y, length, row.stream,
               [&](T* to, std::size_t, std::size_t count, auto store) HWY_ATTR {
                 for (std::size_t i = 0; i < whole; i += kLanes<R>) {
                   store(d, hn::Mul(scale, hn::Load(d, from + i)), to + i);
                 }
                 if (whole == count) return;
                 StoreFirst(d, hn::Mul(scale, hn::Load(d, from + whole)), to + whole,
                            count - whole);
               });
    }
    finish(k, result);
  }
  return true;
}

// Rows side by side in columns. False if one of them is degenerate; the packed rows then serve all.
template <class T, class P>
bool StripeInLanes(const ForwardTile& tile, const P& power) {
  using R = Real<T>;
  const LaneTag<R> d;
  constexpr std::int64_t kRowsAhead = 32, kLine = 64;
  constexpr std::size_t kMostGroups = entmax::kPackedLineBytes / sizeof(T) / kLanes<R>;
  constexpr auto kRows = static_cast<std::int64_t>(kLanes<R>);
  const auto length = static_cast<std::size_t>(tile.length);
  const auto bytes = tile.rows * static_cast<std::int64_t>(sizeof(T));
  R* const stripe = reinterpret_cast<R*>(tile.stripe);
  LaneRows<R> groups[kMostGroups];
  // body(g, first row, rows) of each group.
  const auto for_groups = [&](const auto& body) HWY_ATTR {
    for (std::int64_t r = 0; r < tile.rows; r += kRows) {
      body(static_cast<std::size_t>(r / kRows), r,
           static_cast<std::size_t>(std::min(kRows, tile.rows - r)));
    }
  };
  const auto at = [&](std::size_t g, std::size_t i) {
    return stripe + (g * length + i) * kLanes<R>;
  };
  const auto highest = hn::Set(d, std::numeric_limits<R>::infinity());
  auto broken = hn::IsNaN(highest);
  const T* from = tile.x.row<T>(0);
  const std::size_t parts = LaneRows<R>::Parts(length), part_length = (length + parts - 1) / parts;
  for (std::size_t part = 0; part < parts; ++part) {
    const auto best = [&](std::size_t g) { return groups[g].part_max + part * kLanes<R>; };
    for_groups([&](std::size_t g, std::int64_t, std::size_t)
                   HWY_ATTR { hn::Store(hn::Neg(highest), d, best(g)); });
    const std::size_t begin = std::min(length, part * part_length);
    for (std::size_t i = begin; i < std::min(length, begin + part_length);
         ++i, from += tile.x.step) {
      // The lines of neighbouring axis positions are far apart, which no hardware foresees.
      const auto ahead = reinterpret_cast<std::uintptr_t>(from) +
                         static_cast<std::uintptr_t>(kRowsAhead * tile.x.step) * sizeof(T);
      for (std::int64_t byte = 0; byte < bytes; byte += kLine) {
        __builtin_prefetch(reinterpret_cast<const void*>(ahead + static_cast<std::uintptr_t>(byte)),
                           0, 2);
      }
      for_groups([&](std::size_t g, std::int64_t r, std::size_t count) HWY_ATTR {
        const auto v = count == kLanes<R> ? Load(d, from + r) : LoadFirst(d, from + r, count);
        broken = hn::Or(broken, hn::Not(hn::Lt(v, highest)));
        hn::Store(hn::Max(hn::Load(d, best(g)), v), d, best(g));
        hn::StoreU(v, d, at(g, i));
      });
    }
  }
  const auto group_count = static_cast<std::size_t>((tile.rows + kRows - 1) / kRows);
  if (!hn::AllFalse(d, broken)) return false;
  for (std::size_t g = 0; g < group_count; ++g) {
    if (!groups[g].SetMax(length)) return false;
    groups[g].Solve(power, at(g, 0), length, at(group_count, 0));
  }
  for_groups([&](std::size_t g, std::int64_t r, std::size_t count) HWY_ATTR {
    if (!tile.tau) return;
    double tau[kLanes<R>];
    groups[g].Tau(power, tau);
    for (std::size_t k = 0; k < count; ++k) {
      *tile.tau.row<R>(r + static_cast<std::int64_t>(k)) = static_cast<R>(tau[k]);
    }
  });
  if (!tile.y) return true;
  T* to = tile.y.row<T>(0);
  const bool stream = tile.stream && std::is_same_v<T, R> &&
                      reinterpret_cast<std::uintptr_t>(to) % (kLanes<R> * sizeof(R)) == 0 &&
                      tile.y.step % kRows == 0;
  for (std::size_t i = 0; i < length; ++i, to += tile.y.step) {
    for_groups([&](std::size_t g, std::int64_t r, std::size_t count) HWY_ATTR {
      const auto y = groups[g].Value(power, hn::LoadU(d, at(g, i)));
      if (count < kLanes<R>) return StoreFirst(d, y, to + r, count);
      if constexpr (std::is_same_v<T, R>) {
        if (stream) return hn::Stream(y, d, to + r);
      }
      Store(d, y, to + r);
    });
  }
  return true;
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
