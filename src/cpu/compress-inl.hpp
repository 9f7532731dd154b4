// Elements of a mask side by side, and back to their places.

#if defined(PULLBACK_CPU_COMPRESS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_CPU_COMPRESS_INL_HPP
#undef PULLBACK_CPU_COMPRESS_INL_HPP
#else
#define PULLBACK_CPU_COMPRESS_INL_HPP
#endif

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "cpu/simd-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

#if HWY_ARCH_X86 && HWY_TARGET == HWY_AVX2
// Highway has one of the two, whose table GCC copies to the stack for each vector.
struct CompressTables {
  // Of each mask: the lanes that it has, in order; and of each lane how many of those precede it,
  // and 128 more where the mask does not have it.
  std::array<std::uint64_t, 256> lanes{}, ranks{};

  constexpr CompressTables() {
    for (unsigned mask = 0; mask < 256; ++mask) {
      int count = 0;
      for (int lane = 0; lane < 8; ++lane) {
        const bool has = (mask >> lane & 1) != 0;
        if (has) lanes[mask] |= static_cast<std::uint64_t>(lane) << 8 * count;
        ranks[mask] |= static_cast<std::uint64_t>(has ? count : 128 + count % 8) << 8 * lane;
        count += has;
      }
    }
  }
};
inline constexpr CompressTables kCompressTables;

// Lane i of the result is lane index i of v; of doubles, halves of them.
template <class D>
HWY_INLINE hn::Vec<D> PermuteFloats(D d, hn::Vec<D> v, __m256i index) {
  const hn::Repartition<float, D> floats;
  const auto permuted = _mm256_permutevar8x32_ps(hn::BitCast(floats, v).raw, index);
  return hn::BitCast(d, hn::Vec<decltype(floats)>{permuted});
}
#endif

// Stores the active lanes side by side, and something behind them up to a whole vector. To store no
// more than those (CompressStore) takes a hundred cycles on some CPUs. Returns how many they are.
template <class D>
HWY_INLINE std::size_t StoreActive(D d, hn::Vec<D> v, hn::Mask<D> active, hn::TFromD<D>* to) {
#if HWY_ARCH_X86 && HWY_TARGET == HWY_AVX2
  constexpr std::size_t kFloats = sizeof(hn::TFromD<D>) / 4;  // of a lane, which have a bit each
  const hn::Repartition<float, D> floats;
  const auto bits = static_cast<unsigned>(
      _mm256_movemask_ps(hn::BitCast(floats, hn::VecFromMask(d, active)).raw));
  const auto* lanes = reinterpret_cast<const __m128i*>(&kCompressTables.lanes[bits]);
  hn::StoreU(PermuteFloats(d, v, _mm256_cvtepu8_epi32(_mm_loadl_epi64(lanes))), d, to);
  return static_cast<std::size_t>(std::popcount(bits)) / kFloats;
#else
  hn::StoreU(hn::Compress(v, active), d, to);
  return hn::CountTrue(d, active);
#endif
}

// Lane i is, where the mask whose bits begin at `places` has it, the next of the elements at
// `from`, else 0. Whole vectors may be read. `from` moves on to those that come after.
template <class D>
HWY_INLINE hn::Vec<D> Spread(D d, const std::uint8_t* places, const hn::TFromD<D>*& from) {
  using R = hn::TFromD<D>;
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
  const auto mask = hn::LoadMaskBits(d, places);
  const auto next = hn::LoadU(d, from);
  from += hn::CountTrue(d, mask);
  if constexpr (sizeof(R) == 4) return hn::Vec<D>{_mm512_maskz_expand_ps(mask.raw, next.raw)};
  if constexpr (sizeof(R) == 8) return hn::Vec<D>{_mm512_maskz_expand_pd(mask.raw, next.raw)};
#elif HWY_ARCH_X86 && HWY_TARGET == HWY_AVX2
  const unsigned bits = sizeof(R) == 4 ? *places : _pdep_u32(*places, 0x55) * 3;
  const auto* ranks = reinterpret_cast<const __m128i*>(&kCompressTables.ranks[bits]);
  const auto rank = _mm256_cvtepi8_epi32(_mm_loadl_epi64(ranks));
  const auto next = PermuteFloats(d, hn::LoadU(d, from), rank);
  from += std::popcount(*places);
  const hn::Repartition<std::int32_t, D> di;
  const hn::Vec<decltype(di)> absent{_mm256_srai_epi32(rank, 31)};
  return hn::AndNot(hn::BitCast(d, absent), next);
#else
  HWY_ALIGN R lanes[hn::MaxLanes(d)] = {};
  for (unsigned bits = BitsOf(d, hn::LoadMaskBits(d, places)); bits != 0; bits &= bits - 1) {
    lanes[std::countr_zero(bits)] = *from++;
  }
  return hn::Load(d, lanes);
#endif
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
