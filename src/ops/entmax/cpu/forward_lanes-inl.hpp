// The forward pass of rows in the lanes (lanes-inl.hpp): short rows, and rows in columns.

#if defined(PULLBACK_ENTMAX_FORWARD_LANES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_FORWARD_LANES_INL_HPP
#undef PULLBACK_ENTMAX_FORWARD_LANES_INL_HPP
#else
#define PULLBACK_ENTMAX_FORWARD_LANES_INL_HPP
#endif

#include "ops/entmax/cpu/forward_tile.hpp"
#include "ops/entmax/cpu/lanes-inl.hpp"
#include "ops/entmax/cpu/stream-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

using entmax::ForwardTile;
using entmax::RowTensor;

// Up to this length, rows are computed in the lanes.
constexpr std::int64_t kLaneLength = 128;

// Calls f(Power) of the tile's rows, which have one alpha, not above 2; false for others.
template <class R, class F>
bool WithPowerOfLanes(const ForwardTile& tile, const F& f) {
  if (tile.alpha_per_row || tile.length == 0) return false;
  switch (entmax::family_of(tile.alpha)) {
    case Family::softmax:
      return f(Power<Family::softmax, R>(tile.alpha));
    case Family::near_one:
      return f(Power<Family::near_one, R>(tile.alpha));
    case Family::entmax15:
      return f(Power<Family::entmax15, R>(tile.alpha));
    case Family::general:
      return f(Power<Family::general, R>(tile.alpha));
    case Family::sparsemax:
      return f(Power<Family::sparsemax, R>(tile.alpha));
    default:
      return false;
  }
}

template <class R>
void WriteStatistics(const ForwardTile& tile, std::int64_t r, const LaneRows<R>& group,
                     std::int64_t rows) {
  for (std::int64_t k = 0; k < rows; ++k) {
    if (tile.tau) *tile.tau.row<R>(r + k) = static_cast<R>(group.tau[k]);
    if (!tile.support_size) continue;
    *tile.support_size.row<std::int32_t>(r + k) = static_cast<std::int32_t>(
        std::min(static_cast<double>(group.size[k]),
                 static_cast<double>(std::numeric_limits<std::int32_t>::max())));
  }
}

// Rows r to r + kLanes, of x and y with unit stride. False, with nothing written, if one of them is
// degenerate.
template <class T, class P>
bool ShortRowsInLanes(const ForwardTile& tile, const P& power, const RowTensor& x,
                      const RowTensor& y, std::int64_t r) {
  using R = Real<T>;
  const LaneTag<R> d;
  constexpr bool kConverts = !std::is_same_v<T, R>;
  constexpr auto kRows = static_cast<std::int64_t>(kLanes<R>);
  constexpr std::size_t kElements = kLaneLength * kLanes<R>;
  const auto length = static_cast<std::size_t>(tile.length);
  HWY_ALIGN R lanes[kElements];
  HWY_ALIGN R candidates[kElements];
  HWY_ALIGN R rows[kElements + kLanes<R>];
  if constexpr (kConverts) {
    for (std::int64_t k = 0; k < kRows; ++k) {
      const T* from = x.row<T>(r + k);
      R* to = rows + static_cast<std::size_t>(k) * length;
      std::size_t i = 0;
      for (; i + kLanes<R> <= length; i += kLanes<R>) hn::StoreU(Load(d, from + i), d, to + i);
      for (; i < length; ++i) to[i] = static_cast<R>(from[i]);
    }
    RowsToLanes(rows, tile.length, length, lanes);
  } else {
    RowsToLanes(x.row<T>(r), x.row_step, length, lanes);
  }
  LaneRows<R> group(lanes, length, candidates, static_cast<bool>(tile.support_size));
  if (!group.FindMax()) return false;
  group.Compute(power);
  WriteStatistics(tile, r, group, kRows);
  if (!y && !tile.support) return true;
  LanesToRows(lanes, length, rows, tile.length);
  for (std::int64_t k = 0; tile.support && k < kRows; ++k) {
    const R* from = rows + static_cast<std::size_t>(k) * length;
    for (std::size_t i = 0; i < length; i += kLanes<R>) {
      const auto p = LoadFirst(d, from + i, std::min(kLanes<R>, length - i));
      StoreBits(d, hn::Gt(p, hn::Zero(d)), i, length, tile.support.row<std::uint8_t>(r + k));
    }
  }
  if (!y) return true;
  const T* from = reinterpret_cast<const T*>(lanes);
  if constexpr (kConverts) {
    auto* to = reinterpret_cast<T*>(lanes);  // nobody needs what is there
    for (std::size_t i = 0; i < length * kLanes<R>; i += kLanes<R>) {
      Store(d, hn::Load(d, rows + i), to + i);
    }
  } else {
    from = rows;
  }
  const bool stream = tile.stream && y.data != tile.packed_y;
  const auto write = [&](T* to, const T* source, std::size_t count) {
    if (stream) {
      StreamBytes(reinterpret_cast<std::uint8_t*>(to),
                  reinterpret_cast<const std::uint8_t*>(source), count * sizeof(T));
    } else {
      std::memcpy(static_cast<void*>(to), source, count * sizeof(T));
    }
  };
  if (y.row_step == tile.length) {
    write(y.row<T>(r), from, length * kLanes<R>);
  } else {
    for (std::int64_t k = 0; k < kRows; ++k) {
      write(y.row<T>(r + k), from + static_cast<std::size_t>(k) * length, length);
    }
  }
  return true;
}

// Rows side by side in columns. False if one of them is degenerate; the packed rows then serve all.
template <class T, class P>
bool StripeInLanes(const ForwardTile& tile, const P& power) {
  using R = Real<T>;
  const LaneTag<R> d;
  constexpr std::int64_t kRowsAhead = 32, kLine = 64;
  constexpr auto kRows = static_cast<std::int64_t>(kLanes<R>);
  const auto length = static_cast<std::size_t>(tile.length);
  const auto bytes = tile.rows * static_cast<std::int64_t>(sizeof(T));
  R* const stripe = reinterpret_cast<R*>(tile.stripe);
  const auto at = [&](std::int64_t r, std::size_t i) {
    return stripe + (static_cast<std::size_t>(r) * length + i * kLanes<R>);
  };
  const auto highest = hn::Set(d, std::numeric_limits<R>::infinity());
  auto broken = hn::IsNaN(highest);
  const T* from = tile.x.row<T>(0);
  for (std::size_t i = 0; i < length; ++i, from += tile.x.step) {
    // The lines of neighbouring axis positions are far apart, which no hardware foresees.
    const auto ahead = reinterpret_cast<std::uintptr_t>(from) +
                       static_cast<std::uintptr_t>(kRowsAhead * tile.x.step) * sizeof(T);
    for (std::int64_t byte = 0; byte < bytes; byte += kLine) {
      __builtin_prefetch(reinterpret_cast<const void*>(ahead + static_cast<std::uintptr_t>(byte)),
                         0, 2);
    }
    std::int64_t r = 0;
    for (; r + kRows <= tile.rows; r += kRows) {
      const auto v = Load(d, from + r);
      broken = hn::Or(broken, hn::Not(hn::Lt(v, highest)));
      hn::StoreU(v, d, at(r, i));
    }
    if (r < tile.rows) {
      const auto v = LoadFirst(d, from + r, static_cast<std::size_t>(tile.rows - r));
      broken = hn::Or(broken, hn::Not(hn::Lt(v, highest)));
      hn::StoreU(v, d, at(r, i));
    }
  }
  const std::int64_t groups = (tile.rows + kRows - 1) / kRows;
  R* const candidates = at(groups * kRows, 0);
  if (!hn::AllFalse(d, broken)) return false;
  for (std::int64_t r = 0; r < tile.rows; r += kRows) {
    LaneRows<R> group(at(r, 0), length, candidates, static_cast<bool>(tile.support_size));
    if (!group.FindMax()) return false;
    group.Compute(power);
    WriteStatistics(tile, r, group, std::min(kRows, tile.rows - r));
  }
  if (!tile.y) return true;
  T* to = tile.y.row<T>(0);
  const bool stream = tile.stream && std::is_same_v<T, R> &&
                      reinterpret_cast<std::uintptr_t>(to) % (kLanes<R> * sizeof(R)) == 0 &&
                      tile.y.step % kRows == 0;
  for (std::size_t i = 0; i < length; ++i, to += tile.y.step) {
    std::int64_t r = 0;
    for (; r + kRows <= tile.rows; r += kRows) {
      const auto v = hn::LoadU(d, at(r, i));
      if constexpr (std::is_same_v<T, R>) {
        if (stream) {
          hn::Stream(v, d, to + r);
          continue;
        }
      }
      Store(d, v, to + r);
    }
    if (r < tile.rows) {
      StoreFirst(d, hn::LoadU(d, at(r, i)), to + r, static_cast<std::size_t>(tile.rows - r));
    }
  }
  return true;
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
