// The backward pass of a row of sparsemax from the mask of its support.

#if defined(PULLBACK_ENTMAX_BACKWARD_SUPPORT_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_BACKWARD_SUPPORT_INL_HPP
#undef PULLBACK_ENTMAX_BACKWARD_SUPPORT_INL_HPP
#else
#define PULLBACK_ENTMAX_BACKWARD_SUPPORT_INL_HPP
#endif

#include <bit>
#include <cstring>

#include "ops/entmax/cpu/backward_row-inl.hpp"
#include "ops/entmax/cpu/backward_tile.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// From the mask of a row whose support is small: 64 zeros at a time, and the gradients one by one.
template <class R, class T>
void GradientOfFew(const std::uint8_t* bits, const T* d_y, T* d_x, std::size_t length,
                   bool stream) {
  static_assert(std::endian::native == std::endian::little);
  constexpr std::size_t kBits = 64;
  const hn::ScalableTag<R> d;
  const std::size_t lanes = hn::Lanes(d);
  const auto word_at = [&](std::size_t i, std::size_t count) {
    std::uint64_t word = 0;
    std::memcpy(&word, bits + i / 8, (count + 7) / 8);
    return count < kBits ? word & ((std::uint64_t{1} << count) - 1) : word;
  };
  double dot = 0;
  std::int64_t support = 0;
  for (std::size_t i = 0; i < length; i += kBits) {
    for (std::uint64_t word = word_at(i, std::min(kBits, length - i)); word != 0; ++support) {
      dot += static_cast<double>(
          static_cast<R>(d_y[i + static_cast<std::size_t>(std::countr_zero(word))]));
      word &= word - 1;
    }
  }
  const R mean = static_cast<R>(dot / static_cast<double>(support));
  const auto fill = [&](T* to, std::size_t begin, std::size_t count) HWY_ATTR {
    for (std::size_t i = 0; i < count; i += kBits) {
      const std::size_t n = std::min(kBits, count - i);
      const std::uint64_t word = word_at(begin + i, n);
      // Before the zeros, as d_x may be d_y's memory.
      R gradients[kBits];
      std::size_t k = 0;
      for (std::uint64_t rest = word; rest != 0; rest &= rest - 1) {
        const auto bit = static_cast<std::size_t>(std::countr_zero(rest));
        gradients[k++] = static_cast<R>(d_y[begin + i + bit]) - mean;
      }
      if (n == kBits) {
        for (std::size_t zero = 0; zero < kBits; zero += lanes) {
          StoreAs(d, hn::Zero(d), to + i + zero);
        }
      } else {
        std::fill_n(to + i, n, T(R{0}));
      }
      k = 0;
      for (std::uint64_t rest = word; rest != 0; rest &= rest - 1) {
        to[i + static_cast<std::size_t>(std::countr_zero(rest))] = T(gradients[k++]);
      }
    }
  };
  // Not straight to the row: numbers are put among zeros that have just been stored.
  stream ? WriteStaged(d_x, length, fill) : fill(d_x, 0, length);
}

template <class T>
void GradientFromSupport(const entmax::BackwardTile& tile, std::int64_t r,
                         const entmax::TensorRows& d_y_rows, T* d_x, bool stream) {
  const auto length = static_cast<std::size_t>(tile.length);
  const T* d_y = d_y_rows.row<T>(r);
  const std::int64_t support_size = *tile.support_size.row<std::int32_t>(r);
  if (support_size < 0) return FillNaN(d_x, length);
  const std::uint8_t* bits = tile.support.row<std::uint8_t>(r);
  if (!tile.support.contiguous()) {
    for (std::int64_t i = 0; i < (tile.length + 7) / 8; ++i) {
      tile.bits[i] = bits[i * tile.support.step];
    }
    bits = tile.bits;
  }
  // Lines of d_y that a later row needs, which no hardware foresees.
  constexpr std::int64_t kRowsAhead = 2;
  if (tile.support.contiguous() && r + kRowsAhead < tile.rows && tile.length <= 4096) {
    const std::uint8_t* later = tile.support.row<std::uint8_t>(r + kRowsAhead);
    const T* later_d_y = d_y_rows.row<T>(r + kRowsAhead);
    for (std::size_t i = 0; i + 8 <= length / 8; i += 8) {
      std::uint64_t word;
      std::memcpy(&word, later + i, sizeof(word));
      for (; word != 0; word &= word - 1) {
        hwy::Prefetch(later_d_y + i * 8 + static_cast<std::size_t>(std::countr_zero(word)));
      }
    }
  }
  // A search takes longer than vectors where more of the row is in the support.
  if (support_size * 8 <= std::max<std::int64_t>(tile.length, 64)) {
    return GradientOfFew<Real<T>>(bits, d_y, d_x, length, stream);
  }
  Gradient<Real<T>>(MaskWeights<Real<T>>(bits), static_cast<const T*>(nullptr), d_y, d_x, length,
                    stream);
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
