// The backward pass of rows in columns whose support is small. A wide strip of columns is read
// position by position along the axis. Of y, vectors with an element of the support are kept, in
// their order, and of d_y only their lines are read. In the end d_x is zeros and their gradients.
// Where nearly all is in the support, narrower strips are faster, which stay in L2.

#if defined(PULLBACK_ENTMAX_BACKWARD_COLUMNS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_BACKWARD_COLUMNS_INL_HPP
#undef PULLBACK_ENTMAX_BACKWARD_COLUMNS_INL_HPP
#else
#define PULLBACK_ENTMAX_BACKWARD_COLUMNS_INL_HPP
#endif

#include "ops/entmax/cpu/backward_tile.hpp"
#include "ops/entmax/cpu/lanes-inl.hpp"
#include "ops/entmax/cpu/weights-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

template <Family kFamily, class T>
class SparseGradients {
 public:
  using R = Real<T>;

  explicit SparseGradients(const entmax::BackwardTile& tile)
      : tile_(tile),
        slope_(tile.alpha),
        length_(static_cast<std::size_t>(tile.length)),
        rows_(static_cast<std::size_t>(tile.rows)),
        group_count_((rows_ + kLanes<R> - 1) / kLanes<R>),
        kept_(reinterpret_cast<R*>(tile.stripe)),
        places_(reinterpret_cast<std::uint32_t*>(
            kept_ + 2 * kLanes<R> * (most_kept(length_) + kChunk * group_count_ + 1))) {}

  // False, with nothing written, if too much would have to be kept.
  bool Compute() {
    for (std::size_t i = 0; i < length_; i += kChunk) {
      const std::size_t begin = count_, end = std::min(length_, i + kChunk);
      Find(i, end);
      if (count_ > most_kept(end)) return false;
      Add(begin);
    }
    Write();
    return true;
  }

 private:
  static constexpr std::size_t kMostGroups = entmax::kSparseColumns / kLanes<R>;
  static constexpr std::size_t kChunk = entmax::kColumnsChunk;

  std::size_t most_kept(std::size_t positions) const {
    return static_cast<std::size_t>(entmax::most_kept(static_cast<std::int64_t>(positions))) *
           group_count_;
  }

  // Vectors of y with an element of the support in positions [begin, end).
  void Find(std::size_t begin, std::size_t end) {
    const LaneTag<R> d;
    constexpr std::int64_t kPositionsAhead = 16;
    constexpr std::size_t kLine = 64;
    const std::size_t whole = rows_ / kLanes<R>;
    const T* from = tile_.y.row<T>(0) + static_cast<std::int64_t>(begin) * tile_.y.step;
    const T* d_y = tile_.d_y.row<T>(0) + static_cast<std::int64_t>(begin) * tile_.d_y.step;
    R* vectors = kept_ + 2 * count_ * kLanes<R>;
    std::uint32_t* places = places_ + count_;
    const auto take = [&](Lane<R> v, std::size_t i, std::size_t g) HWY_ATTR {
      hn::StoreU(v, d, vectors);
      *places = static_cast<std::uint32_t>(i * kMostGroups + g);
      const std::size_t more = hn::AllTrue(d, hn::Eq(v, hn::Zero(d))) ? 0 : 1;  // NaN is
      vectors += 2 * more * kLanes<R>;
      places += more;
    };
    for (std::size_t i = begin; i < end; ++i, from += tile_.y.step, d_y += tile_.d_y.step) {
      // The lines of neighbouring positions are far apart, which no hardware foresees.
      const auto ahead = reinterpret_cast<std::uintptr_t>(from) +
                         static_cast<std::uintptr_t>(kPositionsAhead * tile_.y.step) * sizeof(T);
      for (std::size_t byte = 0; byte < rows_ * sizeof(T); byte += kLine) {
        __builtin_prefetch(reinterpret_cast<const void*>(ahead + byte), 0, 2);
      }
      const std::uint32_t* const first = places;
      for (std::size_t g = 0; g < whole; ++g) take(LoadAs(d, from + g * kLanes<R>), i, g);
      if (whole < group_count_) {
        const std::size_t r = whole * kLanes<R>;
        take(LoadFirstAs(d, from + r, rows_ - r, Real<T>{0}), i, whole);
      }
      for (const std::uint32_t* place = first; place < places; ++place) {
        __builtin_prefetch(d_y + *place % kMostGroups * kLanes<R>, 0, 2);
      }
    }
    count_ = static_cast<std::size_t>(places - places_);
  }

  // s and d_y of what is kept from `begin` on, and their sums.
  void Add(std::size_t begin) {
    const LaneTag<R> d;
    for (std::size_t k = begin; k < count_; ++k) {
      const std::size_t g = places_[k] % kMostGroups, r = g * kLanes<R>;
      R* const pair = kept_ + 2 * k * kLanes<R>;
      const T* d_y = tile_.d_y.row<T>(0) +
                     static_cast<std::int64_t>(places_[k] / kMostGroups) * tile_.d_y.step + r;
      const auto y = hn::LoadU(d, pair);
      const auto active = hn::Not(hn::Eq(y, hn::Zero(d)));
      const auto s = hn::IfThenElseZero(active, slope_(d, y));
      const auto gradient =
          hn::IfThenElseZero(active, LoadSome(d, d_y, std::min(kLanes<R>, rows_ - r)));
      hn::StoreU(s, d, pair);
      hn::StoreU(gradient, d, pair + kLanes<R>);
      hn::Store(hn::Add(hn::Load(d, sums_ + r), s), d, sums_ + r);
      hn::Store(hn::MulAdd(s, gradient, hn::Load(d, dots_ + r)), d, dots_ + r);
    }
    for (std::size_t r = 0; r < group_count_ * kLanes<R>; ++r) {
      totals_[r] += static_cast<double>(std::exchange(sums_[r], R{0}));
      total_dots_[r] += static_cast<double>(std::exchange(dots_[r], R{0}));
    }
  }

  void Write() {
    const LaneTag<R> d;
    R* const means = sums_;
    for (std::size_t r = 0; r < rows_; ++r) {
      means[r] = static_cast<R>(total_dots_[r] / totals_[r]);
    }
    T* to = tile_.d_x.row<T>(0);
    const bool stream = tile_.stream && std::is_same_v<T, R> && rows_ % kLanes<R> == 0 &&
                        tile_.d_x.data != tile_.d_y.data &&
                        reinterpret_cast<std::uintptr_t>(to) % (kLanes<R> * sizeof(R)) == 0 &&
                        tile_.d_x.step % static_cast<std::int64_t>(kLanes<R>) == 0;
    places_[count_] = std::numeric_limits<std::uint32_t>::max();
    const R* pair = kept_;
    const std::uint32_t* place = places_;
    const auto next = [&](std::size_t here) HWY_ATTR {
      if (*place != here) return hn::Zero(d);
      const std::size_t r = here % kMostGroups * kLanes<R>;
      const auto s = hn::LoadU(d, pair);
      const auto difference = hn::Sub(hn::LoadU(d, pair + kLanes<R>), hn::Load(d, means + r));
      pair += 2 * kLanes<R>;
      ++place;
      return hn::IfThenElseZero(hn::Not(hn::Eq(s, hn::Zero(d))), hn::Mul(s, difference));
    };
    for (std::size_t i = 0; i < length_; ++i, to += tile_.d_x.step) {
      if constexpr (std::is_same_v<T, R>) {
        if (stream) {
          for (std::size_t g = 0; g < group_count_; ++g) {
            hn::Stream(next(i * kMostGroups + g), d, to + g * kLanes<R>);
          }
          continue;
        }
      }
      for (std::size_t g = 0; g < group_count_; ++g) {
        const std::size_t r = g * kLanes<R>;
        StoreFirstAs(d, next(i * kMostGroups + g), to + r, rows_ - r);
      }
    }
  }

  const entmax::BackwardTile& tile_;
  const Slope<kFamily, R> slope_;
  const std::size_t length_, rows_, group_count_;
  R* const kept_;                // y, then s, and d_y
  std::uint32_t* const places_;  // position * kMostGroups + group
  std::size_t count_ = 0;
  HWY_ALIGN R sums_[entmax::kSparseColumns] = {};
  HWY_ALIGN R dots_[entmax::kSparseColumns] = {};
  double totals_[entmax::kSparseColumns] = {};
  double total_dots_[entmax::kSparseColumns] = {};
};

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
