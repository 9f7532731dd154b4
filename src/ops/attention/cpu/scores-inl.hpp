// One row of a score tile: from q·k to probabilities (forward) and to the gradient of q·k
// (backward), with scale, softcap, bias, band mask and dropout.
//
//   s = c tanh(scale q·k / c) + bias      p = exp(s - m)  forward: m is the running row maximum
//                                         p = exp(s - lse)  backward
//   dp = keep · (d_out·v)                 ds = p (dp - delta)     da = ds (1 - tanh²)
//
// Entries that the query does not see (outside the band, in an absent block, or a score of -inf)
// and, where p is multiplied by a dropped key's factor, dropped ones, are written as -0. A visible
// entry that is zero is +0: so the rare path for rows with NaN or infinity (HiddenZero in
// engine-inl.hpp) can tell "skip" from "multiply by zero", and products need no mask.

#if defined(PULLBACK_OPS_ATTENTION_CPU_SCORES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_OPS_ATTENTION_CPU_SCORES_INL_HPP
#undef PULLBACK_OPS_ATTENTION_CPU_SCORES_INL_HPP
#else
#define PULLBACK_OPS_ATTENTION_CPU_SCORES_INL_HPP
#endif

#include <cstdint>
#include <limits>

#include "cpu/exp-inl.hpp"
#include "cpu/tile_pack-inl.hpp"
#include "ops/attention/cpu/layout.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::attention::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using pullback::HWY_NAMESPACE::TileVector;

template <class Real>
inline constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

template <class Real>
HWY_INLINE Real ExpOf(Real x) {
  const TileVector<Real> d;
  return hn::GetLane(pullback::HWY_NAMESPACE::ExpNonPositive(d, hn::Set(d, x)));
}

// What the scores of a row are made with. `bias` and `keep` are rows of the tile, or null.
template <class Real>
struct ScoreTerms {
  Real scale = 1;
  Real softcap = 0;            // 0: none
  const Real* bias = nullptr;  // already in Real
  const Real* keep = nullptr;  // 0 = dropped, else the factor of the kept
};

// Columns [begin, end) of the tile that the query sees; the tile is `padded` columns wide, a
// multiple of the vector length.
struct Columns {
  std::ptrdiff_t begin = 0, end = 0, padded = 0;
};

template <class Real>
HWY_INLINE void Hide(Real* row, std::ptrdiff_t begin, std::ptrdiff_t end) {
  std::fill(row + begin, row + end, Real{-0.0});
}

// The softcapped and biased score; slope is 1 - tanh².
template <bool kPlain, class D, class Real>
HWY_INLINE hn::Vec<D> Score(D d, const ScoreTerms<Real>& terms, hn::Vec<D> dot, std::ptrdiff_t j,
                            hn::Vec<D>& slope) {
  auto s = hn::Mul(dot, hn::Set(d, terms.scale));
  if constexpr (!kPlain) {
    if (terms.softcap > 0) {
      const auto ratio = hn::Div(s, hn::Set(d, terms.softcap));
      const auto tanh = hn::IfThenElse(hn::IsNaN(ratio), ratio, hn::Tanh(d, ratio));
      slope = hn::NegMulAdd(tanh, tanh, hn::Set(d, Real{1}));
      s = hn::Mul(tanh, hn::Set(d, terms.softcap));
    }
    if (terms.bias) {
      const auto bias = hn::LoadU(d, terms.bias + j);
      const auto hidden = hn::Set(d, -kInfinity<Real>);
      // A bias of -inf hides the key whatever q and k hold.
      s = hn::IfThenElse(hn::Eq(bias, hidden), hidden, hn::Add(s, bias));
    }
  }
  return s;
}

template <class D>
HWY_INLINE hn::Mask<D> InColumns(D d, const Columns& columns, std::ptrdiff_t j) {
  using Real = hn::TFromD<D>;
  const auto position = hn::Iota(d, static_cast<Real>(j));
  return hn::And(hn::Ge(position, hn::Set(d, static_cast<Real>(columns.begin))),
                 hn::Lt(position, hn::Set(d, static_cast<Real>(columns.end))));
}

// Turns q·k into probabilities relative to the running maximum m, which it updates with the running
// sum l. Returns the factor for what was summed before.
template <bool kPlain, class Real>
HWY_INLINE Real SoftmaxRow(const ScoreTerms<Real>& terms, const Columns& columns, Real* row,
                           Real& m, Real& l) {
  const TileVector<Real> d;
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(d));
  if (columns.begin >= columns.end) {
    Hide(row, 0, columns.padded);
    return 1;
  }
  const std::ptrdiff_t first = columns.begin / lanes * lanes;
  const std::ptrdiff_t last = (columns.end + lanes - 1) / lanes * lanes;
  const auto hidden = hn::Set(d, -kInfinity<Real>);
  auto slope = hn::Zero(d);
  auto largest = hidden;
  for (std::ptrdiff_t j = first; j < last; j += lanes) {
    auto s = Score<kPlain>(d, terms, hn::LoadU(d, row + j), j, slope);
    if (j < columns.begin || j + lanes > columns.end) {
      s = hn::IfThenElse(InColumns(d, columns, j), s, hidden);
    }
    hn::StoreU(s, d, row + j);
    largest = hn::Max(largest, s);
  }
  const Real m_before = m;
  m = std::max(m, hn::GetLane(hn::MaxOfLanes(d, largest)));
  const Real finite_m = m == -kInfinity<Real> ? Real{0} : m;
  const auto shift = hn::Set(d, finite_m);
  const auto minus_zero = hn::Set(d, Real{-0.0});
  auto sum = hn::Zero(d);
  for (std::ptrdiff_t j = first; j < last; j += lanes) {
    const auto s = hn::LoadU(d, row + j);
    auto p = pullback::HWY_NAMESPACE::ExpNonPositive(d, hn::Sub(s, shift));
    sum = hn::Add(sum, p);
    if constexpr (!kPlain) {
      if (terms.keep) {
        const auto keep = hn::LoadU(d, terms.keep + j);
        p = hn::IfThenElse(hn::Eq(keep, hn::Zero(d)), minus_zero, hn::Mul(p, keep));
      }
      p = hn::IfThenElse(hn::Eq(s, hidden), minus_zero, p);
    }
    hn::StoreU(p, d, row + j);
  }
  Hide(row, 0, first);
  Hide(row, last, columns.padded);
  const Real factor = m == m_before ? Real{1} : ExpOf(m_before - finite_m);
  l = l * factor + hn::GetLane(hn::SumOfLanes(d, sum));
  return factor;
}

// Backward: `row` holds q·k and becomes p (with dropout's factors), `d_row` holds d_out·v and
// becomes da. With d_row null only p is made. `d_bias`, unless null, receives ds.
template <bool kPlain, class Real>
HWY_INLINE void GradientRow(const ScoreTerms<Real>& terms, const Columns& columns, Real lse,
                            Real delta, Real* row, Real* d_row, Real* d_bias) {
  const TileVector<Real> d;
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(d));
  std::ptrdiff_t first = columns.begin / lanes * lanes;
  std::ptrdiff_t last = (columns.end + lanes - 1) / lanes * lanes;
  if (columns.begin >= columns.end || lse == -kInfinity<Real>) first = last = 0;
  const auto minus_zero = hn::Set(d, Real{-0.0});
  const auto shift = hn::Set(d, lse), deltas = hn::Set(d, delta);
  for (std::ptrdiff_t j = first; j < last; j += lanes) {
    auto slope = hn::Zero(d);
    const auto s = Score<kPlain>(d, terms, hn::LoadU(d, row + j), j, slope);
    const auto p = pullback::HWY_NAMESPACE::ExpNonPositive(d, hn::Sub(s, shift));
    auto p_kept = p;
    auto dp = d_row ? hn::LoadU(d, d_row + j) : hn::Zero(d);
    auto hidden = hn::Eq(s, hn::Set(d, -kInfinity<Real>));
    const bool edge = j < columns.begin || j + lanes > columns.end;
    if (edge) hidden = hn::Or(hidden, hn::Not(InColumns(d, columns, j)));
    if constexpr (!kPlain) {
      if (terms.keep) {
        const auto keep = hn::LoadU(d, terms.keep + j);
        const auto dropped = hn::Eq(keep, hn::Zero(d));
        p_kept = hn::IfThenElse(dropped, minus_zero, hn::Mul(p, keep));
        dp = hn::IfThenZeroElse(dropped, hn::Mul(dp, keep));
      }
    }
    p_kept = hn::IfThenElse(hidden, minus_zero, p_kept);
    hn::StoreU(p_kept, d, row + j);
    if (d_row == nullptr) continue;
    auto ds = hn::Mul(p, hn::Sub(dp, deltas));
    if constexpr (!kPlain) {
      if (d_bias) hn::StoreU(hn::IfThenZeroElse(hidden, ds), d, d_bias + j);
      if (terms.softcap > 0) ds = hn::Mul(ds, slope);
      ds = hn::Add(ds, hn::Zero(d));  // -0 would mean hidden
    }
    // p is 0 there, but dp may be infinite.
    ds = hn::IfThenElse(hidden, minus_zero, ds);
    hn::StoreU(ds, d, d_row + j);
  }
  Hide(row, 0, first);
  Hide(row, last, columns.padded);
  if (d_row == nullptr) return;
  Hide(d_row, 0, first);
  Hide(d_row, last, columns.padded);
  if (d_bias) {
    std::fill(d_bias, d_bias + first, Real{0});
    std::fill(d_bias + last, d_bias + columns.padded, Real{0});
  }
}

// keep[j] for the keys first_key + j, j < count; first_key is a multiple of 8. `draws` has room for
// `count` rounded up to whole vectors of 8 draws a lane.
template <class Real>
HWY_INLINE void KeepRow(const Dropout& dropout, std::uint64_t plane, std::int64_t query,
                        std::int64_t first_key, std::ptrdiff_t count, std::uint16_t* draws,
                        Real* keep) {
  const auto block = static_cast<std::uint32_t>(first_key / Dropout::kKeysPerCall);
  const auto blocks =
      static_cast<std::uint32_t>((count + Dropout::kKeysPerCall - 1) / Dropout::kKeysPerCall);
#if HWY_TARGET == HWY_SCALAR
  for (std::uint32_t i = 0; i < blocks; ++i) {
    const PhiloxWords words = dropout.draws(plane, static_cast<std::uint32_t>(query), block + i);
    for (int w = 0; w < 4; ++w) {
      draws[8 * i + 2 * w] = static_cast<std::uint16_t>(words.word[w]);
      draws[8 * i + 2 * w + 1] = static_cast<std::uint16_t>(words.word[w] >> 16);
    }
  }
#else
  // Philox with one 32-bit word of the counter in the low half of each 64-bit lane: the product's
  // halves are then where they are needed. High halves hold garbage between rounds.
  const hn::ScalableTag<std::uint64_t> d;
  const hn::Repartition<std::uint32_t, decltype(d)> d32;
  const auto multiply = [&](hn::Vec<decltype(d)> word, std::uint32_t by) {
    return hn::MulEven(hn::BitCast(d32, word), hn::Set(d32, by));
  };
  const auto lanes = static_cast<std::uint32_t>(hn::Lanes(d));
  for (std::uint32_t i = 0; i < blocks; i += lanes) {
    auto word0 = hn::Iota(d, std::uint64_t{block} + i);
    auto word1 = hn::Set(d, static_cast<std::uint64_t>(query));
    auto word2 = hn::Set(d, plane);
    auto word3 = hn::Set(d, plane >> 32);
    std::uint32_t key0 = dropout.seed_low, key1 = dropout.seed_high;
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const auto a = multiply(word0, kPhiloxMultiplier0);
      const auto b = multiply(word2, kPhiloxMultiplier1);
      word0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(b), word1), hn::Set(d, std::uint64_t{key0}));
      word2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(a), word3), hn::Set(d, std::uint64_t{key1}));
      word1 = b;
      word3 = a;
      key0 += kPhiloxWeyl0;
      key1 += kPhiloxWeyl1;
    }
    const auto low = hn::Set(d, std::uint64_t{0xffffffffu});
    const auto words01 = hn::Or(hn::And(word0, low), hn::ShiftLeft<32>(word1));
    const auto words23 = hn::Or(hn::And(word2, low), hn::ShiftLeft<32>(word3));
    HWY_ALIGN std::uint64_t pairs[2 * hn::MaxLanes(d)];
    hn::StoreInterleaved2(words01, words23, d, pairs);
    std::memcpy(draws + 8 * i, pairs, sizeof(std::uint64_t) * 2 * lanes);
  }
#endif
  const Real scale = static_cast<Real>(dropout.scale());
  const std::uint32_t threshold = dropout.threshold;
  for (std::ptrdiff_t j = 0; j < count; ++j) {
    keep[j] = draws[j] >= threshold ? scale : Real{0};
  }
}

// The terms of the rows of one score tile.
template <class Real>
class TileTerms {
 public:
  // Keys first_key … first_key + keys - 1 of batch item b and head h.
  TileTerms(const CpuRun& run, const RowScratch<Real>& scratch, const Sequence& sequence,
            std::int64_t b, std::int64_t h, std::int64_t first_key, std::int64_t keys)
      : run_(run), scratch_(scratch), sequence_(sequence), first_key_(first_key), keys_(keys) {
    const AttentionProblem& problem = run.layout.problem;
    terms_.scale = static_cast<Real>(*problem.scale);
    terms_.softcap = static_cast<Real>(problem.softcap);
    if (problem.bias.given()) {
      bias_ = bias_strides(problem.bias);
      bias_offset_ = b * bias_.batch + h * bias_.head + first_key * bias_.key;
    }
    b_ = b;
    h_ = h;
    if (problem.bias.given() || run.layout.seen_blocks.given()) {
      terms_.bias = scratch.bias;
      ReadBias(0);
    }
    if (run.dropout.active()) {
      plane_ = static_cast<std::uint64_t>(b * run.layout.sizes.heads + h);
      terms_.keep = scratch.keep;
    }
  }

  // Only scale: SoftmaxRow<true> and GradientRow<true> will do, unless q, k, v or d_out have NaN or
  // infinities.
  bool plain() const { return terms_.softcap == 0 && !terms_.bias && !terms_.keep; }

  // Of query i; they hold until the next call.
  const ScoreTerms<Real>& row(std::int64_t i) {
    if (terms_.bias && (bias_.query != 0 || !SameBlocks(i))) ReadBias(i);
    if (terms_.keep) {
      KeepRow(run_.dropout, plane_, i, first_key_, static_cast<std::ptrdiff_t>(keys_),
              scratch_.draws, scratch_.keep);
    }
    return terms_;
  }

  // The columns that query i sees.
  Columns columns(std::int64_t i, std::ptrdiff_t padded) const {
    const Range keys = visible_keys(run_.layout.problem.mask, sequence_, i);
    const auto column = [&](std::int64_t key) {
      return static_cast<std::ptrdiff_t>(std::clamp<std::int64_t>(key - first_key_, 0, keys_));
    };
    return {column(keys.begin), column(keys.end), padded};
  }

 private:
  bool SameBlocks(std::int64_t i) const {
    const SeenBlocks& blocks = run_.layout.seen_blocks;
    return !blocks.given() || i / blocks.block() == read_query_ / blocks.block();
  }

  // Keys in absent blocks have a bias of -inf.
  void ReadBias(std::int64_t i) {
    const AttentionProblem& problem = run_.layout.problem;
    const auto count = static_cast<std::ptrdiff_t>(keys_);
    const auto fill = [&](Real value) {
      std::fill_n(scratch_.bias, pullback::HWY_NAMESPACE::RowStride<Real>(count), value);
    };
    if (!problem.bias.given()) {
      fill(0);
    } else {
      pullback::HWY_NAMESPACE::ForStorage<Real>(problem.bias.dtype, [&]<class T>() {
        const T* const from =
            static_cast<const T*>(run_.tensors.bias) + bias_offset_ + i * bias_.query;
        if (bias_.key == 0) {
          fill(static_cast<Real>(*from));
        } else {
          pullback::HWY_NAMESPACE::ReadRow(from, bias_.key, count, scratch_.bias);
        }
      });
    }
    read_query_ = i;
    if (run_.layout.seen_blocks.given()) HideAbsentBlocks(i);
  }

  void HideAbsentBlocks(std::int64_t i) {
    const SeenBlocks& blocks = run_.layout.seen_blocks;
    std::int64_t key = first_key_;
    const std::int64_t end = first_key_ + keys_;
    const auto hide_until = [&](std::int64_t seen) {
      for (; key < std::min(seen, end); ++key) scratch_.bias[key - first_key_] = -kInfinity<Real>;
    };
    for (const auto& block : blocks.row(b_, h_, i, key)) {
      hide_until(block.column * blocks.block());
      key = std::max(key, (block.column + 1) * blocks.block());
      if (key >= end) return;
    }
    hide_until(end);
  }

  const CpuRun& run_;
  const RowScratch<Real>& scratch_;
  const Sequence& sequence_;
  std::int64_t first_key_, keys_;
  std::int64_t b_ = 0, h_ = 0, read_query_ = 0;
  ScoreTerms<Real> terms_;
  BiasStrides bias_;
  std::int64_t bias_offset_ = 0;
  std::uint64_t plane_ = 0;
};

}  // namespace pullback::attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
