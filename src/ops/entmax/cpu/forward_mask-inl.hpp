// x with -inf where the mask hides it: copies of rows, on which the pass without a mask works.

#if defined(PULLBACK_ENTMAX_FORWARD_MASK_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_ENTMAX_FORWARD_MASK_INL_HPP
#undef PULLBACK_ENTMAX_FORWARD_MASK_INL_HPP
#else
#define PULLBACK_ENTMAX_FORWARD_MASK_INL_HPP
#endif

#include "cpu/simd-inl.hpp"
#include "ops/entmax/cpu/forward_tile.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

template <class T>
inline T Hidden() {
  return T(-std::numeric_limits<Real<T>>::infinity());
}

// A storage type as integers, by whole vectors of those and the mask's bytes.
template <class T>
void HideRow(const T* x, const std::uint8_t* mask, std::int64_t length, T* HWY_RESTRICT to) {
  using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                                  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;
  const hn::ScalableTag<Bits> d;
  const hn::Rebind<std::uint8_t, decltype(d)> bytes;
  const auto hidden = hn::Set(d, std::bit_cast<Bits>(Hidden<T>()));
  const auto promote = [&](auto v) HWY_ATTR {
    if constexpr (sizeof(Bits) == 8) {
      return hn::PromoteTo(d, hn::PromoteTo(hn::Rebind<std::uint32_t, decltype(d)>(), v));
    } else {
      return hn::PromoteTo(d, v);
    }
  };
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= length; i += lanes) {
    const auto shown = hn::Ne(promote(hn::LoadU(bytes, mask + i)), hn::Zero(d));
    const auto v = hn::LoadU(d, reinterpret_cast<const Bits*>(x + i));
    hn::StoreU(hn::IfThenElse(shown, v, hidden), d, reinterpret_cast<Bits*>(to + i));
  }
  for (; i < length; ++i) to[i] = mask[i] != 0 ? x[i] : Hidden<T>();
}

template <class T>
void MaskedCopy(const entmax::ForwardTile& tile, const entmax::TensorRows& copy) {
  const std::int64_t rows = tile.rows, length = tile.length;
  const entmax::TensorRows& x = tile.x;
  const entmax::TensorRows& mask = tile.mask;
  if (!x.contiguous() || !mask.contiguous()) {
    entmax::packed_copy<T>(x, rows, length, copy);
    entmax::for_each_blocked(rows, length, [&](std::int64_t r, std::int64_t i) {
      if (mask.row<std::uint8_t>(r)[i * mask.step] == 0) copy.row<T>(r)[i] = Hidden<T>();
    });
  } else if (x.row_step == length && mask.row_step == length && copy.row_step == length) {
    HideRow(x.row<T>(0), mask.row<std::uint8_t>(0), rows * length, copy.row<T>(0));
  } else {
    for (std::int64_t r = 0; r < rows; ++r) {
      HideRow(x.row<T>(r), mask.row<std::uint8_t>(r), length, copy.row<T>(r));
    }
  }
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
