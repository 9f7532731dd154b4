// The backward pass of short rows, as many at a time as a vector has lanes: <s, d_y> and S of a row
// are lanes of vectors, so that the rows share the latency of adding up lanes and of the quotient.

#if defined(PULLBACK_ENTMAX_BACKWARD_SHORT_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_BACKWARD_SHORT_INL_HPP
#undef PULLBACK_ENTMAX_BACKWARD_SHORT_INL_HPP
#else
#define PULLBACK_ENTMAX_BACKWARD_SHORT_INL_HPP
#endif

#include "ops/entmax/cpu/backward_tile.hpp"
#include "ops/entmax/cpu/forward_row-inl.hpp"
#include "ops/entmax/cpu/lanes-inl.hpp"
#include "ops/entmax/cpu/stream-inl.hpp"
#include "ops/entmax/cpu/weights-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// weights_of(row) says where s of a row comes from.
template <bool kFromY, class T, class WeightsOf>
class ShortGradients {
 public:
  using R = Real<T>;

  ShortGradients(std::int64_t length, const WeightsOf& weights_of)
      : weights_of_(weights_of), length_(static_cast<std::size_t>(length)) {}

  // The rows from `begin` on of a tile whose tensors have unit stride along the axis.
  void Compute(const entmax::BackwardTile& tile, std::int64_t begin = 0) {
    constexpr auto kRows = static_cast<std::int64_t>(kLanes<R>);
    [[maybe_unused]] FourLinesAhead y_ahead(tile.y.data);
    FourLinesAhead d_y_ahead(tile.d_y.data);
    for (std::int64_t r = begin; r < tile.rows; r += kRows) {
      const std::int64_t rows = std::min(kRows, tile.rows - r);
      const auto step_d_y = [&](std::int64_t row) {
        if (tile.d_y.row_step == tile.length) d_y_ahead.StepTo(tile.d_y.row<T>(row));
      };
      if constexpr (!kFromY) {  // from the mask there is little else to wait for
        const auto nothing = [](std::int64_t) {};
        step_d_y(r + rows);
        FindMeans(tile, r, rows, nothing);
        Write(tile, r, rows, nothing);
      } else {
        // Row by row: all lines of a group at once would have to wait for each other.
        FindMeans(tile, r, rows, [&](std::int64_t row) { step_d_y(row + 1); });
        Write(tile, r, rows, [&](std::int64_t row) {
          if (tile.y.row_step == tile.length) y_ahead.StepTo(tile.y.row<T>(row + 1));
        });
      }
    }
  }

 private:
  static constexpr std::size_t kPitch = kLaneLength + HWY_MAX_BYTES / sizeof(R);

  // Here and below, after(row) is called of every row.
  template <class After>
  void FindMeans(const entmax::BackwardTile& tile, std::int64_t r, std::int64_t rows,
                 const After& after) {
    const LaneTag<R> d;
    HWY_ALIGN R sums[kLanes<R> * kLanes<R>];
    HWY_ALIGN R dots[kLanes<R> * kLanes<R>];
    const auto count = static_cast<std::size_t>(rows);
    for (std::size_t k = 0; k < count; ++k) {
      const auto row = r + static_cast<std::int64_t>(k);
      const auto weights = weights_of_(row);
      const T* d_y = tile.d_y.row<T>(row);
      auto sum = hn::Zero(d), dot = sum;
      for (std::size_t i = 0; i < length_; i += kLanes<R>) {
        const std::size_t n = std::min(kLanes<R>, length_ - i);
        if constexpr (kFromY) {
          const auto w = weights.Load(d, i, n);
          const auto active = weights.Active(d, w);
          const auto s = hn::IfThenElseZero(active, weights.Weight(d, w));
          const auto g = hn::IfThenElseZero(active, LoadSome(d, d_y + i, n));
          sum = hn::Add(sum, s);
          dot = hn::MulAdd(s, g, dot);
          hn::StoreU(s, d, s_ + k * kPitch + i);
        } else {
          const auto active = weights.MaskAt(d, i, n);
          dot = hn::Add(dot, hn::IfThenElseZero(active, LoadSome(d, d_y + i, n)));
        }
      }
      if constexpr (kFromY) {
        hn::Store(sum, d, sums + k * kLanes<R>);
      } else {
        // NaN in all of a row of NaN, which has that weight.
        sums[k] = weights.weight() * static_cast<R>(*tile.support_size.row<std::int32_t>(row));
      }
      hn::Store(dot, d, dots + k * kLanes<R>);
      after(row);
    }
    for (std::size_t k = count; k < kLanes<R>; ++k) {
      hn::Store(hn::Zero(d), d, dots + k * kLanes<R>);
      if constexpr (kFromY) hn::Store(hn::Zero(d), d, sums + k * kLanes<R>);
      if constexpr (!kFromY) sums[k] = 1;
    }
    const auto total = kFromY ? SumsOfRows(sums) : hn::Load(d, sums);
    hn::Store(hn::Div(SumsOfRows(dots), total), d, means_);
  }

  template <class After>
  void Write(const entmax::BackwardTile& tile, std::int64_t r, std::int64_t rows,
             const After& after) {
    // Where the rows of d_x follow each other they are streamed as one; in place they are cached.
    const bool streams = tile.stream && tile.d_x.data != tile.d_y.data;
    if constexpr (std::is_same_v<T, R>) {
      constexpr std::size_t kVector = kLanes<R> * sizeof(R);
      if (streams && length_ % kLanes<R> == 0 &&
          reinterpret_cast<std::uintptr_t>(tile.d_x.data) % kVector == 0 &&
          tile.d_x.row_step % static_cast<std::int64_t>(kLanes<R>) == 0) {
        return WriteTo(tile, r, rows, after, StreamStore(),
                       [&](std::size_t k) { return tile.d_x.row<T>(r) + to_step(tile, k); });
      }
    }
    if (!streams) {
      return WriteTo(tile, r, rows, after, PlainStore(),
                     [&](std::size_t k) { return tile.d_x.row<T>(r) + to_step(tile, k); });
    }
    WriteTo(tile, r, rows, after, PlainStore(),
            [&](std::size_t k) { return stage_ + k * length_; });
    const auto stream = [&](std::int64_t row, const T* from, std::size_t count) {
      StreamBytes(reinterpret_cast<std::uint8_t*>(tile.d_x.row<T>(row)),
                  reinterpret_cast<const std::uint8_t*>(from), count * sizeof(T));
    };
    if (tile.d_x.row_step == tile.length) {
      return stream(r, stage_, static_cast<std::size_t>(rows) * length_);
    }
    for (std::int64_t k = 0; k < rows; ++k) {
      stream(r + k, stage_ + static_cast<std::size_t>(k) * length_, length_);
    }
  }

  static std::int64_t to_step(const entmax::BackwardTile& tile, std::size_t k) {
    return static_cast<std::int64_t>(k) * tile.d_x.row_step;
  }

  // Row k goes to to(k).
  template <class After, class Store, class To>
  HWY_INLINE void WriteTo(const entmax::BackwardTile& tile, std::int64_t r, std::int64_t rows,
                          const After& after, const Store& store, const To& to_row) {
    const LaneTag<R> d;
    for (std::size_t k = 0; k < static_cast<std::size_t>(rows); ++k) {
      const auto row = r + static_cast<std::int64_t>(k);
      const T* d_y = tile.d_y.row<T>(row);
      T* to = to_row(k);
      const auto weights = weights_of_(row);
      const auto mean = hn::Set(d, means_[k]);
      for (std::size_t i = 0; i < length_; i += kLanes<R>) {
        const std::size_t n = std::min(kLanes<R>, length_ - i);
        auto gradient = hn::Sub(LoadSome(d, d_y + i, n), mean);
        if constexpr (kFromY) {
          const auto s = hn::LoadU(d, s_ + k * kPitch + i);
          gradient = hn::IfThenElseZero(hn::Not(hn::Eq(s, hn::Zero(d))), hn::Mul(s, gradient));
        } else {
          gradient = hn::IfThenElseZero(weights.MaskAt(d, i, n), gradient);
        }
        if (n == kLanes<R>) {
          store(d, gradient, to + i);
        } else {
          StoreFirstAs(d, gradient, to + i, n);
        }
      }
      after(row);
    }
  }

  const WeightsOf& weights_of_;
  const std::size_t length_;
  HWY_ALIGN R means_[kLanes<R>];
  HWY_ALIGN R s_[kLanes<R> * kPitch];
  HWY_ALIGN T stage_[kLanes<R> * static_cast<std::size_t>(kLaneLength)];
};

// From y, of rows in the lanes: of those that are shorter than a vector.
template <Family kFamily, class T>
class LaneGradients {
 public:
  using R = Real<T>;

  explicit LaneGradients(const entmax::BackwardTile& tile)
      : tile_(tile), slope_(tile.alpha), length_(static_cast<std::size_t>(tile.length)) {}

  // Returns how many of the tile's rows it has done.
  std::int64_t Compute() {
    constexpr auto kRows = static_cast<std::int64_t>(kLanes<R>);
    const bool stream = tile_.stream && tile_.d_x.data != tile_.d_y.data;
    FourLinesAhead y_ahead(tile_.y.data), d_y_ahead(tile_.d_y.data);
    std::int64_t r = 0;
    for (; r + kRows <= tile_.rows; r += kRows) {
      if (tile_.y.row_step == tile_.length) y_ahead.StepTo(tile_.y.row<T>(r));
      if (tile_.d_y.row_step == tile_.length) d_y_ahead.StepTo(tile_.d_y.row<T>(r));
      Read(r);
      const LaneTag<R> d;
      const auto mean = hn::Div(dot_, sum_);
      HWY_ALIGN R d_x[kRoom];
      LanesToRows(length_, d_x, [&](std::size_t i) HWY_ATTR {
        const auto s = hn::Load(d, s_ + i * kLanes<R>);
        const auto difference = hn::Sub(hn::Load(d, d_y_ + i * kLanes<R>), mean);
        return hn::IfThenElseZero(hn::Not(hn::Eq(s, hn::Zero(d))), hn::Mul(s, difference));
      });
      WriteRows(d_x, length_, tile_.d_x.row<T>(r), tile_.d_x.row_step, stream);
    }
    return r;
  }

 private:
  static constexpr std::size_t kRoom = (kLanes<R> + 4) * kLanes<R>;

  // s and d_y, and their sums.
  void Read(std::int64_t r) {
    const LaneTag<R> d;
    const ShortRowsToRead<T> y(tile_.y.row<T>(r), tile_.y.row_step, length_);
    const ShortRowsToRead<T> d_y(tile_.d_y.row<T>(r), tile_.d_y.row_step, length_);
    RowsToLanes(y.from, y.step, length_, s_);
    RowsToLanes(d_y.from, d_y.step, length_, d_y_);
    auto sum0 = hn::Zero(d), sum1 = sum0, dot0 = sum0, dot1 = sum0;
    const auto add = [&](std::size_t i, auto& sum, auto& dot) HWY_ATTR {
      const auto w = hn::Load(d, s_ + i * kLanes<R>);
      const auto active = hn::Not(hn::Eq(w, hn::Zero(d)));
      const auto s = hn::IfThenElseZero(active, slope_(d, w));
      const auto g = hn::IfThenElseZero(active, hn::Load(d, d_y_ + i * kLanes<R>));
      sum = hn::Add(sum, s);
      dot = hn::MulAdd(s, g, dot);
      hn::Store(s, d, s_ + i * kLanes<R>);
    };
    std::size_t i = 0;
    for (; i + 2 <= length_; i += 2) {
      add(i, sum0, dot0);
      add(i + 1, sum1, dot1);
    }
    if (i < length_) add(i, sum0, dot0);
    sum_ = hn::Add(sum0, sum1);
    dot_ = hn::Add(dot0, dot1);
  }

  const entmax::BackwardTile& tile_;
  const Slope<kFamily, R> slope_;
  const std::size_t length_;
  Lane<R> sum_, dot_;
  HWY_ALIGN R s_[kRoom];
  HWY_ALIGN R d_y_[kRoom];
};

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
