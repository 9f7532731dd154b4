// Matrix products of tiles that fit the L2 cache: C[rows, columns] (+)= A[rows, depth] · B[depth,
// columns], all in Real (float or double).
//
// A is read one element at a time and broadcast, so any strides do: a transposed tile costs
// nothing.
//
// B is packed in panels: columns are cut into panels of PanelVectors() vectors; a panel holds its
// `depth` rows one after the other. RowMajorMatmul takes B row-major instead.
//
// C is row-major, rows padded to whole vectors.
//
// A register block holds BlockRows(NV) x NV accumulators; for each step of depth it loads NV
// vectors of B and broadcasts one element of A per row (the outer-product kernel of Goto and van de
// Geijn 2008). The number of rows is padded to whole register blocks: A must be readable and C
// writable up to padded_rows(rows), what is there does not matter. A row's bits depend on neither
// the other rows nor their number.

#if defined(PULLBACK_CPU_TILE_MATMUL_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_CPU_TILE_MATMUL_INL_HPP
#undef PULLBACK_CPU_TILE_MATMUL_INL_HPP
#else
#define PULLBACK_CPU_TILE_MATMUL_INL_HPP
#endif

#include <algorithm>
#include <cstddef>

#include "cpu/simd-inl.hpp"
#include "cpu/tile_matmul.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// Accumulators + NV vectors of B + one broadcast fill the register file: 32 registers with AVX-512,
// else 16.
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
inline constexpr int kPanelVectors = 4;
inline constexpr int kAccumulators = 24;
#else
inline constexpr int kPanelVectors = 2;
inline constexpr int kAccumulators = 12;
#endif
// The highest block of so many vectors that divides `multiple`.
constexpr int BlockRows(int multiple, int vectors) {
  int rows = std::min(16, kAccumulators / vectors);
  while (multiple % rows != 0) --rows;
  return rows;
}

// Depth of a pass over C: 128 rows of a panel (32 KB in f32) stay in a 48 KB L1 cache beside A.
inline constexpr std::ptrdiff_t kDepthBlock = 128;

template <class Real>
using TileVector = hn::ScalableTag<Real>;

template <class Real>
HWY_INLINE std::ptrdiff_t VectorsFor(std::ptrdiff_t columns) {
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(TileVector<Real>()));
  return (columns + lanes - 1) / lanes;
}

// Width of B's panels, all but the last: as equal as can be, so that no narrow one is left over.
HWY_INLINE std::ptrdiff_t PanelVectors(std::ptrdiff_t vectors) {
  const std::ptrdiff_t panels = (vectors + kPanelVectors - 1) / kPanelVectors;
  return panels == 0 ? 1 : (vectors + panels - 1) / panels;
}

template <int kRows, int kVectors, class Real>
HWY_NOINLINE void RegisterBlock(std::ptrdiff_t depth, const Real* HWY_RESTRICT a,
                                std::ptrdiff_t a_row, std::ptrdiff_t a_depth,
                                const Real* HWY_RESTRICT b, std::ptrdiff_t b_depth,
                                Real* HWY_RESTRICT c, std::ptrdiff_t c_row, bool add) {
  const TileVector<Real> d;
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(d));
  hn::Vec<decltype(d)> sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = add ? hn::LoadU(d, c + r * c_row + v * lanes) : hn::Zero(d);
    }
  }
  for (std::ptrdiff_t k = 0; k < depth; ++k) {
    hn::Vec<decltype(d)> b_vector[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) b_vector[v] = hn::LoadU(d, b + v * lanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto a_value = hn::Set(d, a[r * a_row]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(a_value, b_vector[v], sum[r][v]);
    }
    a += a_depth;
    b += b_depth;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sum[r][v], d, c + r * c_row + v * lanes);
  }
}

template <int kMultiple, int kVectors, class Real>
HWY_INLINE void PanelMatmul(std::ptrdiff_t rows, std::ptrdiff_t depth, StridedTile<const Real> a,
                            const Real* b, std::ptrdiff_t b_depth, Real* c, std::ptrdiff_t c_row,
                            bool add) {
  constexpr int kRows = BlockRows(kMultiple, kVectors);
  for (std::ptrdiff_t row = 0; row < rows; row += kRows) {
    RegisterBlock<kRows, kVectors>(depth, a.data + row * a.row, a.row, a.column, b, b_depth,
                                   c + row * c_row, c_row, add);
  }
}

// A panel of B `vectors` wide, its rows b_depth apart. Rows of A and C are padded to kMultiple.
template <int kMultiple, class Real>
HWY_INLINE void PanelMatmul(std::ptrdiff_t vectors, std::ptrdiff_t rows, std::ptrdiff_t depth,
                            StridedTile<const Real> a, const Real* b, std::ptrdiff_t b_depth,
                            Real* c, std::ptrdiff_t c_row, bool add) {
  switch (vectors) {
    case 1:
      return PanelMatmul<kMultiple, 1>(rows, depth, a, b, b_depth, c, c_row, add);
    case 2:
      return PanelMatmul<kMultiple, 2>(rows, depth, a, b, b_depth, c, c_row, add);
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
    case 3:
      return PanelMatmul<kMultiple, 3>(rows, depth, a, b, b_depth, c, c_row, add);
    case 4:
      return PanelMatmul<kMultiple, 4>(rows, depth, a, b, b_depth, c, c_row, add);
#endif
  }
}

// `b` as packed above. With `add`, C is added to.
template <class Real>
HWY_INLINE void TileMatmul(std::ptrdiff_t rows, std::ptrdiff_t columns, std::ptrdiff_t depth,
                           StridedTile<const Real> a, const Real* b, Real* c, std::ptrdiff_t c_row,
                           bool add) {
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(TileVector<Real>()));
  const std::ptrdiff_t vectors = VectorsFor<Real>(columns);
  const std::ptrdiff_t panel = PanelVectors(vectors);
  for (std::ptrdiff_t first = 0; first < vectors; first += panel) {
    const std::ptrdiff_t width = std::min(panel, vectors - first);
    const std::ptrdiff_t b_depth = width * lanes;
    const Real* panel_b = b + first * lanes * depth;
    Real* panel_c = c + first * lanes;
    std::ptrdiff_t k = 0;
    do {
      const std::ptrdiff_t step = std::min(kDepthBlock, depth - k);
      const StridedTile<const Real> block{a.data + k * a.column, a.row, a.column};
      const Real* block_b = panel_b + k * b_depth;
      const bool adding = add || k > 0;
      PanelMatmul<kTileRowMultiple>(width, rows, step, block, block_b, b_depth, panel_c, c_row,
                                    adding);
      k += step;
    } while (k < depth);
  }
}

// B row-major with rows b_row apart, readable up to whole vectors; depth up to about kDepthBlock.
// `rows` is a multiple of kMultiple, and neither A nor C are touched past it.
template <int kMultiple, class Real>
HWY_INLINE void RowMajorMatmul(std::ptrdiff_t rows, std::ptrdiff_t columns, std::ptrdiff_t depth,
                               StridedTile<const Real> a, const Real* b, std::ptrdiff_t b_row,
                               Real* c, std::ptrdiff_t c_row, bool add) {
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(TileVector<Real>()));
  const std::ptrdiff_t vectors = VectorsFor<Real>(columns);
  const std::ptrdiff_t panel = PanelVectors(vectors);
  for (std::ptrdiff_t first = 0; first < vectors; first += panel) {
    PanelMatmul<kMultiple>(std::min(panel, vectors - first), rows, depth, a, b + first * lanes,
                           b_row, c + first * lanes, c_row, add);
  }
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
