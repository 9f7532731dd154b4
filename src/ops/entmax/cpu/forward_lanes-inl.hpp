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
#include "ops/entmax/cpu/sorted_lanes-inl.hpp"
#include "ops/entmax/cpu/stream-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

using entmax::ForwardTile;
using entmax::TensorRows;

// Whether rows whose powers take a logarithm are computed many at a time. Those of f64 are long in
// code, and mostly there to check gradients.
template <class R>
inline constexpr bool kPowersOfLanes = sizeof(R) == sizeof(float);

// Calls f(Power) of the tile's rows, which have one alpha, not above 2; false for others.
template <class R, class F>
bool WithPowerOfLanes(const ForwardTile& tile, const F& f) {
  if (tile.alpha_per_row || tile.length == 0) return false;
  switch (entmax::family_of(tile.alpha)) {
    case Family::softmax:
      return f(LanePower<Family::softmax, R>(tile.alpha));
    case Family::near_one:
      if constexpr (kPowersOfLanes<R>) return f(LanePower<Family::near_one, R>(tile.alpha));
      return false;
    case Family::entmax15:
      return f(LanePower<Family::entmax15, R>(tile.alpha));
    case Family::general:
      if constexpr (kPowersOfLanes<R>) return f(LanePower<Family::general, R>(tile.alpha));
      return false;
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

// Where goes what kLanes rows have besides y: finish(k, RowResult) takes it of row k and fetches
// what that is due, or tau(taus) takes the taus of all where nothing else is wanted.
template <class Finish, class Tau>
struct RowSink {
  Finish finish;
  Tau tau;
  FourLinesAhead& ahead;
  bool fetches;  // that is, rows follow each other
};
template <class Finish, class Tau>
RowSink(Finish, Tau, FourLinesAhead&, bool) -> RowSink<Finish, Tau>;

// y of kLanes rows of whole vectors and, with kMarks, the bits and the size of their support.
template <bool kMarks, class T, class P, class Store, class Sink>
HWY_INLINE void WriteWholeRows(const P& shared_power, const SolvedLanes<Real<T>>& found,
                               const double* tau, const RowView<T>& first, const RowStep<T>& step,
                               T* y, std::int64_t y_step, const Store& store, const Sink& sink) {
  using R = Real<T>;
  constexpr std::size_t kVector = kLanes<R>;
  const LaneTag<R> d;
  // Compilers take stores of vectors for stores to members, and would load tables anew.
  const Power<P::family, R> power = shared_power;
  FourLinesAhead ahead = sink.ahead;
  const std::size_t length = first.length;
  const T* x = first.x;
  [[maybe_unused]] std::uint8_t* support = first.support;
  for (std::size_t k = 0; k < kVector; ++k, y += y_step) {
    const auto shift = hn::Set(d, found.max[k]), at = hn::Set(d, found.theta[k]);
    const auto scale = hn::Set(d, found.scale[k]), rest = hn::Set(d, found.rest[k]);
    [[maybe_unused]] std::size_t size = 0;
    const auto write = [&](std::size_t i) HWY_ATTR {
      const auto excess = power.Excess(d, hn::Sub(Load(d, x + i), shift), at);
      if constexpr (kMarks) {
        const auto active = power.Active(d, excess);
        hn::StoreMaskBits(d, active, support + i / 8);
        size += hn::CountTrue(d, active);
      }
      if constexpr (P::family == Family::sparsemax) {
        store(d, power.Value(d, excess), y + i);
      } else if constexpr (P::uses_rest) {
        store(d, power.Value(d, hn::Sub(excess, rest)), y + i);
      } else {
        store(d, hn::Mul(scale, power.Value(d, excess)), y + i);
      }
    };
    std::size_t i = 0;
    for (; i + 2 * kVector <= length; i += 2 * kVector) {
      write(i);
      write(i + kVector);
    }
    if (i < length) write(i);
    x += step.x;
    if constexpr (kMarks) {
      support += step.support;
      sink.finish(k, RowResult{tau[k], static_cast<std::int64_t>(size)});
    } else if (sink.fetches) {
      // Row by row: all lines of a group at once would have to wait for each other.
      ahead.StepTo(x);
    }
  }
  if constexpr (!kMarks) {
    sink.ahead = ahead;
    sink.tau(tau);
  }
}

// The same by way of a buffer, from which the rows are streamed together.
template <bool kMarks, class T, class P, class Sink>
void WriteStagedRows(const P& power, const SolvedLanes<Real<T>>& found, const double* tau,
                     const RowView<T>& first, const RowStep<T>& step, const Sink& sink) {
  constexpr std::size_t kRows = kLanes<Real<T>>;
  const std::size_t length = first.length;
  const auto apart = static_cast<std::int64_t>(length);
  HWY_ALIGN T staged[kLaneLength * kRows];
  T* const y = first.stream ? staged : first.y;
  WriteWholeRows<kMarks>(power, found, tau, first, step, y, first.stream ? apart : step.y,
                         PlainStore(), sink);
  if (!first.stream) return;
  if (step.y == apart) return StreamBytes(first.y, staged, kRows * length * sizeof(T));
  for (std::size_t k = 0; k < kRows; ++k) {
    StreamBytes(first.y + static_cast<std::int64_t>(k) * step.y, staged + k * length,
                length * sizeof(T));
  }
}

// y and all else that is wanted of kLanes rows.
template <class T, class P, class Sink>
void WriteShortRows(const P& power, const SolvedLanes<Real<T>>& found, const RowView<T>& first,
                    const RowStep<T>& step, const Sink& sink) {
  using R = Real<T>;
  double tau[kLanes<R>];
  for (std::size_t k = 0; k < kLanes<R>; ++k) {
    tau[k] = power.Tau(found.max[k], found.theta[k], found.rest[k]);
  }
  if constexpr (!P::near_one) {
    constexpr bool kStages = !std::is_same_v<T, R>;
    constexpr std::size_t kVector = kLanes<R> * sizeof(R);
    const bool aligned = reinterpret_cast<std::uintptr_t>(first.y) % kVector == 0 &&
                         step.y % static_cast<std::int64_t>(kLanes<R>) == 0;
    const auto write = [&]<bool kMarks>() {
      if constexpr (kStages) {
        WriteStagedRows<kMarks>(power, found, tau, first, step, sink);
      } else if (first.stream) {
        WriteWholeRows<kMarks>(power, found, tau, first, step, first.y, step.y, StreamStore(),
                               sink);
      } else {
        WriteWholeRows<kMarks>(power, found, tau, first, step, first.y, step.y, PlainStore(), sink);
      }
    };
    if (first.length % kLanes<R> == 0 && first.y && (kStages || aligned || !first.stream)) {
      if (!first.support && !first.wants_size) return write.template operator()<false>();
      if constexpr (P::family == Family::sparsemax && kLanes<R> % 8 == 0) {
        if (first.support) return write.template operator()<true>();
      }
    }
  }
  RowView<T> row = first;
  for (std::size_t k = 0; k < kLanes<R>; ++k, step(row)) {
    const Threshold<R> threshold{found.theta[k], found.rest[k], found.scale[k]};
    sink.finish(k, RowResult{tau[k], WriteY(power, row, found.max[k], threshold)});
  }
}

// kLanes rows in the lanes.
template <class T>
struct ShortGroup {
  using R = Real<T>;

  // False if one of the rows is degenerate.
  bool Read(const RowView<T>& first, const RowStep<T>& step) {
    const LaneTag<R> d;
    const std::size_t length = first.length;
    const ShortRowsToRead<T> rows(first.x, step.x, length);
    const auto lowest = hn::Set(d, -std::numeric_limits<R>::infinity());
    auto m0 = lowest, m1 = lowest, m2 = lowest, m3 = lowest;
    auto m4 = lowest, m5 = lowest, m6 = lowest, m7 = lowest;
    auto total = hn::Zero(d);  // NaN, where a row has one
    const auto take_max = [&](const Lane<R>* v, Lane<R>& a, Lane<R>& b, Lane<R>& c, Lane<R>& e)
                              HWY_ATTR {
                                a = hn::Max(a, v[0]);
                                b = hn::Max(b, v[1]);
                                c = hn::Max(c, v[2]);
                                e = hn::Max(e, v[3]);
                              };
    ForEachFourInLanes(rows.from, rows.step, length, [&](std::size_t i, const Lane<R>* v) HWY_ATTR {
      total = hn::Add(total, hn::Add(hn::Add(v[0], v[1]), hn::Add(v[2], v[3])));
      if (i % 8 == 0) {
        take_max(v, m0, m1, m2, m3);
      } else {
        take_max(v, m4, m5, m6, m7);
      }
      for (std::size_t k = 0; k < 4; ++k) hn::Store(v[k], d, x + (i + k) * kLanes<R>);
    });
    static_assert(LaneRows<R>::kFewParts == 8);
    const auto keep = [&](std::size_t part, Lane<R> m)
                          HWY_ATTR { hn::Store(m, d, rows_of.part_max + part * kLanes<R>); };
    keep(0, m0), keep(1, m1), keep(2, m2), keep(3, m3);
    keep(4, m4), keep(5, m5), keep(6, m6), keep(7, m7);
    return rows_of.SetMax(length) && hn::AllFalse(d, hn::IsNaN(total));
  }

  template <class P>
  void Solve(const P& power, std::size_t length) {
    if constexpr (P::family == Family::softmax) {
      rows_of.Solve(power, x, length, static_cast<R*>(nullptr));
    } else if constexpr (P::family == Family::sparsemax) {
      HWY_ALIGN R candidates[(kLaneLength + 1) * kLanes<R>];
      rows_of.Solve(power, x, length, candidates);
    } else {
      rows_of.SolveShort(power, x, length);
    }
  }

  // When they are solved.
  template <class P, class Sink>
  void Write(const P& power, const RowView<T>& first, const RowStep<T>& step, const Sink& sink) {
    if constexpr (P::family != Family::softmax && !std::is_same_v<P, RowsPower<R>>) {
      if (!InLanes(first)) return WriteShortRows(power, rows_of, first, step, sink);
    }
    const LaneTag<R> d;
    const std::size_t length = first.length;
    HWY_ALIGN R y[(kLaneLength + 1) * kLanes<R>];
    LanesToRows(length, y, [&](std::size_t i) HWY_ATTR {
      const auto v = hn::Load(d, x + i * kLanes<R>);
      constexpr bool kKeepsX = P::family == Family::softmax || P::family == Family::sparsemax;
      return kKeepsX ? rows_of.Value(power, v) : rows_of.ValueOfShifted(power, v);
    });
    WriteRows(y, length, first.y, step.y, first.stream);
    double tau[kLanes<R>];
    rows_of.Tau(power, tau);
    sink.tau(tau);
    if (sink.fetches) sink.ahead.StepTo(first.x + static_cast<std::int64_t>(kLanes<R>) * step.x);
  }

  // Whether y is computed in the lanes, where it is all that is wanted: of whole vectors it is
  // faster row by row.
  static bool InLanes(const RowView<T>& first) {
    return first.length % kLanes<R> != 0 && WantsY(first);
  }
  static bool WantsY(const RowView<T>& first) {
    return first.y && !first.support && !first.wants_size;
  }

  LaneRows<R> rows_of;
  HWY_ALIGN R x[(kLaneLength + 1) * kLanes<R>];
};

// kLanes rows from `first` on, a lane each for their thresholds. False, with nothing written, if
// one of them is degenerate.
template <class T, class P, class Sink>
bool OneGroup(const P& power, const RowView<T>& first, const Sink& sink, const RowStep<T>& step) {
  ShortGroup<T> group;
  if (!group.Read(first, step)) return false;
  group.Solve(power, first.length);
  group.Write(power, first, step, sink);
  return true;
}

// Two times as many: from `first` on, and from `second` on.
template <class T, class P, class Sink>
bool TwoGroups(const P& power, const RowView<T>& first, const Sink& first_sink,
               const RowView<T>& second, const Sink& second_sink, const RowStep<T>& step) {
  ShortGroup<T> a, b;
  if (!a.Read(first, step) || !b.Read(second, step)) return false;
  LaneRows<Real<T>>::SolveShort(power, a.rows_of, a.x, b.rows_of, b.x, first.length);
  a.Write(power, first, step, first_sink);
  b.Write(power, second, step, second_sink);
  return true;
}

// kLanes rows of sparsemax, most of which have no more than a few elements in the support.
template <class T, class P, class Sink>
bool ShortSparsemax(const P& power, const RowView<T>& first, const RowStep<T>& step,
                    const Sink& sink) {
  using R = Real<T>;
  const LaneTag<R> d;
  const std::size_t length = first.length;
  const ShortRowsToRead<T> rows(first.x, step.x, length);
  LargestInLanes<R> largest;
  auto total = hn::Zero(d);  // NaN, where a row has one
  ForEachFourInLanes(rows.from, rows.step, length, [&](std::size_t, const Lane<R>* v) HWY_ATTR {
    total = hn::Add(total, hn::Add(hn::Add(v[0], v[1]), hn::Add(v[2], v[3])));
    largest.Add(v);
  });
  const auto max = largest.max();
  if (!hn::AllTrue(d, hn::IsFinite(max)) || !hn::AllFalse(d, hn::IsNaN(total))) return false;
  auto theta = largest.Theta();
  const auto overflows = largest.Overflows(theta);
  if (!hn::AllFalse(d, overflows)) {
    HWY_ALIGN R z[kLaneLength * kLanes<R>];
    ForEachFourInLanes(rows.from, rows.step, length, [&](std::size_t i, const Lane<R>* v) HWY_ATTR {
      for (std::size_t k = 0; k < 4; ++k) {
        hn::Store(hn::Sub(v[k], max), d, z + (i + k) * kLanes<R>);
      }
    });
    const auto start = SafeBound<R>(power, theta);
    const auto found = SolveLanes<R>(power, start, overflows, power.tolerance,
                                     [&](Lane<R> at, hn::Mask<LaneTag<R>>)
                                         HWY_ATTR { return EvaluateLanes(power, at, z, length); });
    theta = hn::IfThenElse(overflows, found.theta, theta);
  }
  SolvedLanes<R> found;
  hn::Store(max, d, found.max);
  hn::Store(theta, d, found.theta);
  hn::Store(hn::Zero(d), d, found.rest);
  hn::Store(hn::Set(d, R{1}), d, found.scale);
  WriteShortRows(power, found, first, step, sink);
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
