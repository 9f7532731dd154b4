// The two arithmetics of the CPU kernels, with one interface: SimdEngine computes products in Real
// on Highway, Bf16Engine rounds their operands to bf16 and computes on AVX-512 BF16 or AMX with f32
// sums. The loops over tiles, masks, softmax, dropout and reductions are the same code for both.
//
// For a tile of queries x keys, an engine multiplies
//   Scores        S[q,k]  = L[q,d] · X[k,d]ᵀ         L = left(Q or d_out), X = transposed(K or V)
//   MultiplyRows  C[q,d] (+)= P[q,k] · X[k,d]        X = right(V or K)
//   AddColumns    C[k,d]  += P[q,k]ᵀ · Y[q,d]        Y = columns(d_out or Q)
// Rows of X and Y with NaN or infinity would reach entries that do not see them, as 0 · NaN. They
// are packed as zeros and listed, and AddNonFiniteRows() adds them where they are seen.

#if defined(PULLBACK_OPS_ATTENTION_CPU_ENGINE_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_OPS_ATTENTION_CPU_ENGINE_INL_HPP
#undef PULLBACK_OPS_ATTENTION_CPU_ENGINE_INL_HPP
#else
#define PULLBACK_OPS_ATTENTION_CPU_ENGINE_INL_HPP
#endif

#include <hwy/cache_control.h>

#include <bit>
#include <type_traits>

#include "cpu/tile_matmul_bf16.hpp"
#include "cpu/tile_pack-inl.hpp"
#include "ops/attention/cpu/layout.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::attention::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace pb = pullback::HWY_NAMESPACE;

// Rows of a tile that hold a NaN or an infinity.
struct NonFiniteRows {
  std::int32_t* rows = nullptr;
  std::int32_t count = 0;
};

// Reads element j of the source's row.
template <class Real>
HWY_INLINE Real ReadElement(const TileSource& source, std::ptrdiff_t row, std::ptrdiff_t j) {
  return static_cast<Real>(load_element(source.dtype, source.data,
                                        source.offset + row * source.row + j * source.element));
}

// A row later than the r-th one: rows of a head lie apart, which the hardware does not foresee.
template <class T>
HWY_INLINE void PrefetchAhead(const T* first, std::ptrdiff_t r, const TileSource& source) {
  if (source.element != 1) return;
  constexpr std::ptrdiff_t kRowsAhead = 16;
  constexpr auto kLine = static_cast<std::ptrdiff_t>(64 / sizeof(T));
  const T* const row = first + std::min(r + kRowsAhead, source.rows - 1) * source.row;
  for (std::ptrdiff_t d = 0; d < source.columns; d += kLine) hwy::Prefetch(row + d);
}

// Is this the -0 that scores-inl.hpp writes for "not seen"?
HWY_INLINE bool HiddenZero(float x) { return std::bit_cast<std::uint32_t>(x) == 1u << 31; }
HWY_INLINE bool HiddenZero(double x) {
  return std::bit_cast<std::uint64_t>(x) == std::uint64_t{1} << 63;
}

// c(i, :) += weight(i, j) · source(j, :) for the listed rows j. Rare, so plain.
template <class Real>
HWY_NOINLINE void AddNonFiniteRows(StridedTile<const Real> weights, std::ptrdiff_t rows,
                                   const TileSource& source, const NonFiniteRows& listed,
                                   StridedTile<Real> c) {
  for (std::int32_t n = 0; n < listed.count; ++n) {
    const std::ptrdiff_t j = listed.rows[n];
    for (std::ptrdiff_t i = 0; i < rows; ++i) {
      const Real weight = weights.data[i * weights.row + j * weights.column];
      if (HiddenZero(weight)) continue;
      for (std::ptrdiff_t d = 0; d < source.columns; ++d) {
        c.data[i * c.row + d * c.column] += weight * ReadElement<Real>(source, j, d);
      }
    }
  }
}

template <class Real_>
class SimdEngine {
 public:
  using Real = Real_;
  // What a task keeps while it runs.
  struct Scope {};

  explicit SimdEngine(const EngineScratch<Real>& scratch) : tile_(scratch.rows) {}

  // Columns of score tiles are padded to a multiple of it.
  static std::ptrdiff_t KeyMultiple() {
    return static_cast<std::ptrdiff_t>(hn::Lanes(pb::TileVector<Real>()));
  }

  // `columns` may be null.
  void PackQueries(const TileSource& source, Real* left, Real* columns,
                   NonFiniteRows& non_finite) const {
    Read(source, left, non_finite);
    if (columns) PackRight(left, source, columns, non_finite);
  }
  // Either may be null.
  void PackKeys(const TileSource& source, Real* transposed, Real* right,
                NonFiniteRows& non_finite) const {
    Read(source, tile_, non_finite);
    if (transposed) {
      pb::PackTransposedPanels(tile_, source.rows, source.columns, transposed);
    }
    if (right) PackRight(tile_, source, right, non_finite);
  }

  void Scores(std::ptrdiff_t queries, std::ptrdiff_t keys, std::ptrdiff_t depth, const Real* left,
              const Real* transposed, Real* s, std::ptrdiff_t s_row) const {
    pb::TileMatmul<Real>(queries, keys, depth, {left, pb::RowStride<Real>(depth), 1}, transposed, s,
                         s_row, false);
  }
  void MultiplyRows(std::ptrdiff_t queries, std::ptrdiff_t columns, std::ptrdiff_t keys,
                    const Real* p, std::ptrdiff_t p_row, const Real* right, Real* c,
                    std::ptrdiff_t c_row, bool add) const {
    pb::TileMatmul<Real>(queries, columns, keys, {p, p_row, 1}, right, c, c_row, add);
  }
  // C is what Accumulator() says.
  void AddColumns(std::ptrdiff_t keys, std::ptrdiff_t columns, std::ptrdiff_t queries,
                  const Real* p, std::ptrdiff_t p_row, const Real* packed, Real* c) const {
    pb::TileMatmul<Real>(keys, columns, queries, {p, 1, p_row}, packed, c,
                         pb::RowStride<Real>(columns), true);
  }
  static StridedTile<Real> Accumulator(Real* c, std::ptrdiff_t, std::ptrdiff_t columns) {
    return {c, pb::RowStride<Real>(columns), 1};
  }
  static void ClearAccumulator(Real* c, std::ptrdiff_t keys, std::ptrdiff_t columns) {
    std::fill_n(c, padded_rows(keys) * pb::RowStride<Real>(columns), Real{0});
  }

 private:
  static void Read(const TileSource& source, Real* tile, NonFiniteRows& non_finite) {
    non_finite.count = 0;
    const std::ptrdiff_t row = pb::RowStride<Real>(source.columns);
    pb::ForStorage<Real>(source.dtype, [&]<class T>() {
      const T* const from = static_cast<const T*>(source.data) + source.offset;
      for (std::ptrdiff_t r = 0; r < source.rows; ++r) {
        PrefetchAhead(from, r, source);
        const bool finite =
            pb::ReadRow(from + r * source.row, source.element, source.columns, tile + r * row);
        if (!finite) non_finite.rows[non_finite.count++] = static_cast<std::int32_t>(r);
      }
    });
    // Products go over these rows, too. Integers that a workspace held would be denormals, which
    // take a hundred times as long.
    std::fill(tile + source.rows * row, tile + padded_rows(source.rows) * row, Real{0});
  }

  // The listed rows become zeros in the panels.
  static void PackRight(const Real* tile, const TileSource& source, Real* panels,
                        const NonFiniteRows& non_finite) {
    pb::PackPanels(tile, source.rows, source.columns, panels);
    const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(pb::TileVector<Real>()));
    const std::ptrdiff_t vectors = pb::VectorsFor<Real>(source.columns);
    const std::ptrdiff_t panel = pb::PanelVectors(vectors);
    for (std::int32_t n = 0; n < non_finite.count; ++n) {
      for (std::ptrdiff_t first = 0; first < vectors; first += panel) {
        const std::ptrdiff_t width = std::min(panel, vectors - first) * lanes;
        std::fill_n(panels + first * lanes * source.rows + non_finite.rows[n] * width, width,
                    Real{0});
      }
    }
  }

  Real* tile_;
};

// Packed operands are bf16 in buffers that were sized for as many floats.
template <CpuIsa kIsa>
class Bf16Engine {
 public:
  using Real = float;
  struct Nothing {};
  using Scope = std::conditional_t<kIsa == CpuIsa::amx_bf16, bf16_tiles::AmxScope, Nothing>;

  explicit Bf16Engine(const EngineScratch<float>& scratch)
      : tile_(half(scratch.rows)),
        pairs_(half(scratch.pairs)),
        left_(half(scratch.converted)),
        right_(left_ + scratch.converted_size) {}

  static constexpr std::ptrdiff_t KeyMultiple() { return bf16_tiles::kMultiple; }

  void PackQueries(const TileSource& source, float* left, float* columns,
                   NonFiniteRows& non_finite) const {
    Read(source, half(left), non_finite);
    if (columns == nullptr) return;
    bf16_tiles::pack_pairs(Cleared(half(left), source, non_finite), source.rows, source.columns,
                           pairs_);
    bf16_tiles::transpose_pairs(pairs_, source.rows, source.columns, half(columns));
  }
  void PackKeys(const TileSource& source, float* transposed, float* right,
                NonFiniteRows& non_finite) const {
    Read(source, tile_, non_finite);
    if (transposed) {
      bf16_tiles::pack_transposed_pairs(tile_, source.rows, source.columns, half(transposed));
    }
    if (right) {
      bf16_tiles::pack_pairs(Cleared(tile_, source, non_finite), source.rows, source.columns,
                             half(right));
    }
  }

  void Scores(std::ptrdiff_t queries, std::ptrdiff_t keys, std::ptrdiff_t depth, const float* left,
              const float* transposed, float* s, std::ptrdiff_t s_row) const {
    multiply(bf16_tiles::padded(queries), bf16_tiles::padded(keys), bf16_tiles::padded(depth),
             half(left), half(transposed), s, s_row, false);
  }
  void MultiplyRows(std::ptrdiff_t queries, std::ptrdiff_t columns, std::ptrdiff_t keys,
                    const float* p, std::ptrdiff_t p_row, const float* right, float* c,
                    std::ptrdiff_t c_row, bool add) const {
    bf16_tiles::convert_rows(p, p_row, queries, keys, left_);
    multiply(bf16_tiles::padded(queries), bf16_tiles::padded(columns), bf16_tiles::padded(keys),
             left_, half(right), c, c_row, add);
  }
  // Computed as C^T = Y^T P: P is then the operand in pairs of rows, which needs no transposition.
  void AddColumns(std::ptrdiff_t keys, std::ptrdiff_t columns, std::ptrdiff_t queries,
                  const float* p, std::ptrdiff_t p_row, const float* packed, float* c) const {
    bf16_tiles::convert_pairs(p, p_row, queries, keys, right_);
    multiply(bf16_tiles::padded(columns), bf16_tiles::padded(keys), bf16_tiles::padded(queries),
             half(packed), right_, c, bf16_tiles::padded(keys), true);
  }
  static StridedTile<float> Accumulator(float* c, std::ptrdiff_t keys, std::ptrdiff_t) {
    return {c, 1, bf16_tiles::padded(keys)};
  }
  static void ClearAccumulator(float* c, std::ptrdiff_t keys, std::ptrdiff_t columns) {
    std::fill_n(c, bf16_tiles::padded(keys) * bf16_tiles::padded(columns), 0.0f);
  }

 private:
  static constexpr auto multiply =
      kIsa == CpuIsa::amx_bf16 ? &bf16_tiles::multiply_amx : &bf16_tiles::multiply_avx512;

  static bfloat16* half(float* buffer) { return reinterpret_cast<bfloat16*>(buffer); }
  static const bfloat16* half(const float* buffer) {
    return reinterpret_cast<const bfloat16*>(buffer);
  }

  static void Read(const TileSource& source, bfloat16* tile, NonFiniteRows& non_finite) {
    non_finite.count = 0;
    const std::ptrdiff_t row = bf16_tiles::padded(source.columns);
    const bfloat16* const from = static_cast<const bfloat16*>(source.data) + source.offset;
    for (std::ptrdiff_t r = 0; r < source.rows; ++r) {
      bfloat16* const to = tile + r * row;
      const bfloat16* const row_from = from + r * source.row;
      PrefetchAhead(from, r, source);
      if (source.element == 1) {
        std::copy_n(row_from, source.columns, to);
      } else {
        for (std::ptrdiff_t d = 0; d < source.columns; ++d) to[d] = row_from[d * source.element];
      }
      std::fill(to + source.columns, to + row, bfloat16());
      std::uint16_t exponent = 0;  // the largest one
      for (std::ptrdiff_t d = 0; d < row; ++d) {
        exponent = std::max<std::uint16_t>(exponent, to[d].bits & 0x7f80u);
      }
      if (exponent == 0x7f80u) non_finite.rows[non_finite.count++] = static_cast<std::int32_t>(r);
    }
    std::fill(tile + source.rows * row, tile + bf16_tiles::padded(source.rows) * row, bfloat16());
  }

  // `tile`, or a copy in which the listed rows are zeros.
  const bfloat16* Cleared(const bfloat16* tile, const TileSource& source,
                          const NonFiniteRows& non_finite) const {
    if (non_finite.count == 0) return tile;
    const std::ptrdiff_t row = bf16_tiles::padded(source.columns);
    if (tile != tile_) std::copy_n(tile, bf16_tiles::padded(source.rows) * row, tile_);
    for (std::int32_t n = 0; n < non_finite.count; ++n) {
      std::fill_n(tile_ + non_finite.rows[n] * row, row, bfloat16());
    }
    return tile_;
  }

  bfloat16 *tile_, *pairs_, *left_, *right_;
};

}  // namespace pullback::attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
