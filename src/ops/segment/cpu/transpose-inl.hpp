// From rows in memory or in vectors to lanes of vectors.

#if defined(PULLBACK_SEGMENT_TRANSPOSE_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_TRANSPOSE_INL_HPP
#undef PULLBACK_SEGMENT_TRANSPOSE_INL_HPP
#else
#define PULLBACK_SEGMENT_TRANSPOSE_INL_HPP
#endif

#include "ops/segment/cpu/rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR
template <class R>
inline constexpr std::int64_t kRowsOfBlock = 1;

template <class D, class At>
HWY_INLINE void LoadRows(D d, const At& at, hn::Vec<D>* rows) {
  rows[0] = hn::LoadU(d, at(0));
}

#else
// In 16 bytes.
template <class R>
inline constexpr std::int64_t kRowsOfBlock = 16 / sizeof(R);

// 16 bytes for all blocks; as integers, since GCC 12 with ThreadSanitizer dies of a masked
// broadcast of doubles.
template <class D>
HWY_INLINE hn::Vec<D> RepeatedBlock(D d, const hn::TFromD<D>* HWY_RESTRICT x) {
  const hn::Repartition<std::int32_t, D> words;
  return hn::BitCast(d, hn::LoadDup128(words, reinterpret_cast<const std::int32_t*>(x)));
}

// Lane k of rows[i] is at(k)[i], for kRowsOfBlock rows.
template <class D, class At>
HWY_INLINE void LoadRows(D d, const At& at, hn::Vec<D>* rows) {
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  constexpr std::int64_t kRows = kRowsOfBlock<hn::TFromD<D> >;
  // Of lanes kRows apart. Blends of repeated blocks leave alone the one port that shuffles.
  const auto blocks_of = [&](std::int64_t first) HWY_ATTR {
    auto blocks = RepeatedBlock(d, at(first));
    for (std::int64_t lane = kRows; lane < kLanes; lane += kRows) {
      const auto before = hn::FirstN(d, static_cast<std::size_t>(lane));
      blocks = hn::IfThenElse(before, blocks, RepeatedBlock(d, at(first + lane)));
    }
    return blocks;
  };
  const auto a = blocks_of(0), b = blocks_of(1);
  if constexpr (kRows == 2) {
    rows[0] = hn::InterleaveLower(d, a, b);
    rows[1] = hn::InterleaveUpper(d, a, b);
  } else {
    const hn::RepartitionToWide<D> wide;
    const auto c = blocks_of(2), e = blocks_of(3);
    const auto low = hn::BitCast(wide, hn::InterleaveLower(d, a, b));
    const auto low2 = hn::BitCast(wide, hn::InterleaveLower(d, c, e));
    const auto high = hn::BitCast(wide, hn::InterleaveUpper(d, a, b));
    const auto high2 = hn::BitCast(wide, hn::InterleaveUpper(d, c, e));
    rows[0] = hn::BitCast(d, hn::InterleaveLower(wide, low, low2));
    rows[1] = hn::BitCast(d, hn::InterleaveUpper(wide, low, low2));
    rows[2] = hn::BitCast(d, hn::InterleaveLower(wide, high, high2));
    rows[3] = hn::BitCast(d, hn::InterleaveUpper(wide, high, high2));
  }
}

// Lane i of the result folds the lanes of v[i]; there are as many as there are lanes.
template <class D, class Op>
HWY_INLINE hn::Vec<D> FoldEach(D d, hn::Vec<D>* v, const Op& op) {
  constexpr std::size_t kLanes = hn::MaxLanes(d), kInBlock = 16 / sizeof(hn::TFromD<D>);
  constexpr std::size_t kBlocks = kLanes / kInBlock;
  // Within blocks of 16 bytes: of each kInBlock vectors one is left.
  const auto in_block = [&](const hn::Vec<D>* from) HWY_ATTR {
    const auto pair = [&](auto a, auto b) HWY_ATTR {
      return op(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
    };
    if constexpr (kInBlock == 2) {
      return pair(from[0], from[1]);
    } else {
      const hn::RepartitionToWide<D> wide;
      const auto a = hn::BitCast(wide, pair(from[0], from[1]));
      const auto b = hn::BitCast(wide, pair(from[2], from[3]));
      return op(hn::BitCast(d, hn::InterleaveLower(wide, a, b)),
                hn::BitCast(d, hn::InterleaveUpper(wide, a, b)));
    }
  };
  hn::Vec<D> block[kBlocks];
  for (std::size_t i = 0; i < kBlocks; ++i) block[i] = in_block(v + i * kInBlock);
  // What is left: block j of `block[i]` is a part of what becomes block i of the result.
  const auto neighbors = [&](auto a, auto b) HWY_ATTR {
    const auto apart = hn::SwapAdjacentBlocks(hn::OddEvenBlocks(a, b));
    return op(hn::OddEvenBlocks(b, a), apart);
  };
  const auto halves = [&](auto a, auto b) HWY_ATTR {
    return op(hn::ConcatLowerLower(d, b, a), hn::ConcatUpperUpper(d, b, a));
  };
  if constexpr (kBlocks == 1) {
    return block[0];
  } else if constexpr (kBlocks == 2) {
    return neighbors(block[0], block[1]);
  } else {
    static_assert(kBlocks == 4);
    return neighbors(halves(block[0], block[2]), halves(block[1], block[3]));
  }
}

#endif

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
