// SIMD helpers on Highway, compiled once per instruction set (hence -inl and the odd guard).
//
// A kernel file is written like this; docs/architecture.md explains the pattern:
//   #undef HWY_TARGET_INCLUDE
//   #define HWY_TARGET_INCLUDE "ops/entmax/cpu/forward.cpp"
//   #include <hwy/foreach_target.h>
//   #include "cpu/simd-inl.hpp"
//   HWY_BEFORE_NAMESPACE();
//   namespace pullback::HWY_NAMESPACE { … }  HWY_AFTER_NAMESPACE();
//   #if HWY_ONCE  … HWY_EXPORT, HWY_DYNAMIC_DISPATCH …  #endif
//
// Storage types are double, float, bfloat16, float16; all arithmetic is in Real<T>: double for
// double, float for the rest. One rounding, to nearest even, at the store.

#if defined(PULLBACK_CPU_SIMD_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_CPU_SIMD_INL_HPP
#undef PULLBACK_CPU_SIMD_INL_HPP
#else
#define PULLBACK_CPU_SIMD_INL_HPP
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/element.hpp"

// Before AVX2, Highway converts f16 in software, which reads infinities and NaN as numbers.
#undef PULLBACK_EMULATED_F16
#define PULLBACK_EMULATED_F16 (HWY_TARGET == HWY_SCALAR || (HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2))

// The target without lanes is the last that is compiled.
#if HWY_TARGET == HWY_SCALAR && defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("Os")
#endif

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Whether vectors have several lanes. On x86 they have not where there is no AVX2: that code is to
// be small, and does without what is for speed alone.
inline constexpr bool kHasLanes = HWY_TARGET != HWY_SCALAR;

template <class T>
using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;

// 16-bit storage types as the bits that they are.
template <class D>
using BitsTag = hn::Rebind<std::uint16_t, D>;

// The bits of 16-bit floats as Real, and back with one rounding; the last argument tells the type.
template <class D>
HWY_INLINE hn::Vec<D> Widen(D d, hn::Vec<BitsTag<D>> bits, bfloat16) {
  const hn::Rebind<std::uint32_t, D> d32;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}
template <class D>
HWY_INLINE hn::Vec<D> Widen([[maybe_unused]] D d, hn::Vec<BitsTag<D>> bits, float16) {
#if PULLBACK_EMULATED_F16
  float16 halves[hn::MaxLanes(d)];
  HWY_ALIGN float values[hn::MaxLanes(d)];
  hn::StoreU(bits, BitsTag<D>(), reinterpret_cast<std::uint16_t*>(halves));
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) values[i] = static_cast<float>(halves[i]);
  return hn::Load(d, values);
#else
  return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), bits));
#endif
}
template <class D>
HWY_INLINE hn::Vec<BitsTag<D>> Narrow(D, hn::Vec<D> value, bfloat16) {
  // Highway's DemoteTo may truncate; this rounds to nearest even and keeps NaN a quiet NaN.
  const hn::Rebind<std::uint32_t, D> d32;
  const auto bits = hn::BitCast(d32, value);
  const auto high = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(high, hn::Set(d32, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffu))));
  const auto quiet = hn::Or(high, hn::Set(d32, 0x40u));
  const auto nan = hn::RebindMask(d32, hn::IsNaN(value));
  const hn::Rebind<std::int32_t, D> ds32;
  const auto result = hn::IfThenElse(nan, quiet, rounded);
  // The signed source saturates at 65535, which no value exceeds.
  return hn::DemoteTo(BitsTag<D>(), hn::BitCast(ds32, result));
}
template <class D>
HWY_INLINE hn::Vec<BitsTag<D>> Narrow([[maybe_unused]] D d, hn::Vec<D> value, float16) {
#if PULLBACK_EMULATED_F16
  HWY_ALIGN float values[hn::MaxLanes(d)];
  float16 halves[hn::MaxLanes(d)];
  hn::Store(value, d, values);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) halves[i] = float16(values[i]);
  return hn::LoadU(BitsTag<D>(), reinterpret_cast<const std::uint16_t*>(halves));
#else
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::BitCast(BitsTag<D>(), hn::DemoteTo(d16, value));
#endif
}

// Load(d, from) loads Lanes(d) elements of any storage type as Real, from any address. An object
// and not a function: an unqualified call would else find Highway's Load, which needs alignment.
struct LoadFunction {
  template <class D, class T>
  HWY_INLINE hn::Vec<D> operator()(D d, const T* from) const {
    if constexpr (std::is_same_v<T, hn::TFromD<D>>) {
      return hn::LoadU(d, from);
    } else {
      const auto* bits = reinterpret_cast<const std::uint16_t*>(from);
      return Widen(d, hn::LoadU(BitsTag<D>(), bits), T{});
    }
  }
};
inline constexpr LoadFunction Load{};

template <class D, class T>
HWY_INLINE void Store(D d, hn::Vec<D> value, T* to) {
  if constexpr (std::is_same_v<T, hn::TFromD<D>>) {
    hn::StoreU(value, d, to);
  } else {
    hn::StoreU(Narrow(d, value, T{}), BitsTag<D>(), reinterpret_cast<std::uint16_t*>(to));
  }
}

// Without instructions for it, Highway's masked loads and stores touch whole vectors.
template <class T>
inline constexpr bool kMasksElements =
    HWY_ARCH_X86 && HWY_TARGET <= (sizeof(T) == 2 ? HWY_AVX3 : HWY_AVX2);

// The first `count` <= Lanes(d) elements; the others read as `fill`. Touches no memory past them.
template <class D, class T>
HWY_INLINE hn::Vec<D> LoadFirst(D d, const T* from, std::size_t count,
                                hn::TFromD<D> fill = hn::TFromD<D>{0}) {
  const auto first = [&](auto v) HWY_ATTR {
    return hn::IfThenElse(hn::FirstN(d, count), v, hn::Set(d, fill));
  };
  if constexpr (kMasksElements<T> && std::is_same_v<T, hn::TFromD<D>>) {
    return first(hn::MaskedLoad(hn::FirstN(d, count), d, from));
  } else if constexpr (kMasksElements<T>) {
    const BitsTag<D> d16;
    const auto* bits = reinterpret_cast<const std::uint16_t*>(from);
    return first(Widen(d, hn::MaskedLoad(hn::FirstN(d16, count), d16, bits), T{}));
  } else {
    T buffer[hn::MaxLanes(d)] = {};
    std::memcpy(static_cast<void*>(buffer), from, count * sizeof(T));
    return first(Load(d, buffer));
  }
}

template <class D, class T>
HWY_INLINE void StoreFirst(D d, hn::Vec<D> value, T* to, std::size_t count) {
  if constexpr (std::is_same_v<T, hn::TFromD<D>>) {
    hn::BlendedStore(value, hn::FirstN(d, count), d, to);
  } else if constexpr (kMasksElements<T>) {
    const BitsTag<D> d16;
    hn::BlendedStore(Narrow(d, value, T{}), hn::FirstN(d16, count), d16,
                     reinterpret_cast<std::uint16_t*>(to));
  } else {
    T buffer[hn::MaxLanes(d)];
    Store(d, value, buffer);
    std::memcpy(static_cast<void*>(to), buffer, count * sizeof(T));
  }
}

// Bit i: lane i of the mask.
template <class D>
HWY_INLINE unsigned BitsOf(D d, hn::Mask<D> mask) {
  // As many bytes as are stored: compilers leave them in a register.
  constexpr std::size_t kBytes = (hn::MaxLanes(d) + 7) / 8;
  std::uint8_t bytes[8];
  hn::StoreMaskBits(d, mask, bytes);
  std::conditional_t<kBytes == 1, std::uint8_t,
                     std::conditional_t<kBytes == 2, std::uint16_t, std::uint32_t>>
      bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return bits;
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
