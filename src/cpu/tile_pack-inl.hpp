// Rows of strided tensors of any storage type to and from tiles of Real, and the layouts of
// tile_matmul-inl.hpp made of them.
//
// A row tile is row-major with rows padded to whole vectors (RowStride); the padding is zero.

#if defined(PULLBACK_CPU_TILE_PACK_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_CPU_TILE_PACK_INL_HPP
#undef PULLBACK_CPU_TILE_PACK_INL_HPP
#else
#define PULLBACK_CPU_TILE_PACK_INL_HPP
#endif

#include "cpu/tile_matmul-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

template <class Real>
HWY_INLINE std::ptrdiff_t RowStride(std::ptrdiff_t columns) {
  return VectorsFor<Real>(columns) * static_cast<std::ptrdiff_t>(hn::Lanes(TileVector<Real>()));
}

// Calls f.template operator()<T>() with the storage type among those that compute in Real.
template <class Real, class F>
HWY_INLINE void ForStorage(DType dtype, const F& f) {
  if constexpr (std::is_same_v<Real, double>) {
    f.template operator()<double>();
  } else if (dtype == DType::f32) {
    f.template operator()<float>();
  } else if (dtype == DType::bf16) {
    f.template operator()<bfloat16>();
  } else {
    f.template operator()<float16>();
  }
}

// Reads `count` elements `stride` apart; `to` is padded with zeros to whole vectors. True when all
// are finite.
template <class T, class Real>
HWY_INLINE bool ReadRow(const T* from, std::ptrdiff_t stride, std::ptrdiff_t count, Real* to) {
  const TileVector<Real> d;
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(d));
  // 0 · x is 0 for finite x, else NaN.
  auto zeros = hn::Zero(d);
  std::ptrdiff_t i = 0;
  if (stride == 1) {
    for (; i + lanes <= count; i += lanes) {
      const auto value = Load(d, from + i);
      hn::StoreU(value, d, to + i);
      zeros = hn::MulAdd(value, hn::Zero(d), zeros);
    }
    if (i < count) {
      const auto value = LoadFirst(d, from + i, static_cast<std::size_t>(count - i));
      hn::StoreU(value, d, to + i);
      zeros = hn::MulAdd(value, hn::Zero(d), zeros);
    }
  } else {
    const std::ptrdiff_t padded = RowStride<Real>(count);
    for (; i < count; ++i) to[i] = static_cast<Real>(from[i * stride]);
    for (; i < padded; ++i) to[i] = 0;
    for (i = 0; i < count; i += lanes) {
      zeros = hn::MulAdd(hn::LoadU(d, to + i), hn::Zero(d), zeros);
    }
  }
  return hn::AllTrue(d, hn::Eq(zeros, hn::Zero(d)));
}

// Writes factor · from[i] / divisor, rounded once.
template <class T, class Real>
HWY_INLINE void WriteRow(const Real* from, Real factor, Real divisor, T* to, std::ptrdiff_t stride,
                         std::ptrdiff_t count) {
  const TileVector<Real> d;
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(d));
  const auto f = hn::Set(d, factor), by = hn::Set(d, divisor);
  HWY_ALIGN Real values[hn::MaxLanes(d)];
  for (std::ptrdiff_t i = 0; i < count; i += lanes) {
    const std::ptrdiff_t n = std::min(lanes, count - i);
    const auto whole =
        n == lanes ? hn::LoadU(d, from + i) : LoadFirst(d, from + i, static_cast<std::size_t>(n));
    auto value = hn::Mul(whole, f);
    if (divisor != 1) value = hn::Div(value, by);
    if (stride == 1 && n == lanes) {
      Store(d, value, to + i);
    } else if (stride == 1) {
      StoreFirst(d, value, to + i, static_cast<std::size_t>(n));
    } else {
      hn::Store(value, d, values);
      for (std::ptrdiff_t j = 0; j < n; ++j) to[(i + j) * stride] = T(values[j]);
    }
  }
}

// Panels of `tile` as the B of a product whose depth is the tile's rows.
template <class Real>
HWY_INLINE void PackPanels(const Real* tile, std::ptrdiff_t rows, std::ptrdiff_t columns,
                           Real* panels) {
  const TileVector<Real> d;
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(d));
  const std::ptrdiff_t vectors = VectorsFor<Real>(columns);
  const std::ptrdiff_t panel = PanelVectors(vectors);
  for (std::ptrdiff_t first = 0; first < vectors; first += panel) {
    const std::ptrdiff_t width = std::min(panel, vectors - first);
    for (std::ptrdiff_t r = 0; r < rows; ++r) {
      const Real* from = tile + (r * vectors + first) * lanes;
      for (std::ptrdiff_t v = 0; v < width; ++v, panels += lanes) {
        hn::StoreU(hn::LoadU(d, from + v * lanes), d, panels);
      }
    }
  }
}

// Side of the square blocks that are transposed in registers: 16 bytes.
template <class Real>
inline constexpr std::ptrdiff_t kTransposeBlock = HWY_TARGET == HWY_SCALAR ? 1 : 16 / sizeof(Real);

// to[c][r] = from[r][c] for one block.
template <class Real>
HWY_INLINE void TransposeBlock(const Real* from, std::ptrdiff_t from_row, Real* to,
                               std::ptrdiff_t to_row) {
#if HWY_TARGET == HWY_SCALAR
  (void)from_row, (void)to_row;
  *to = *from;
#else
  const hn::CappedTag<Real, 16 / sizeof(Real)> d;
  const auto row = [&](int r) { return hn::LoadU(d, from + r * from_row); };
  const auto store = [&](auto value, int c) { hn::StoreU(value, d, to + c * to_row); };
  if constexpr (sizeof(Real) == 8) {
    store(hn::InterleaveLower(d, row(0), row(1)), 0);
    store(hn::InterleaveUpper(d, row(0), row(1)), 1);
  } else {
    const auto low02 = hn::InterleaveLower(d, row(0), row(2));
    const auto low13 = hn::InterleaveLower(d, row(1), row(3));
    const auto high02 = hn::InterleaveUpper(d, row(0), row(2));
    const auto high13 = hn::InterleaveUpper(d, row(1), row(3));
    store(hn::InterleaveLower(d, low02, low13), 0);
    store(hn::InterleaveUpper(d, low02, low13), 1);
    store(hn::InterleaveLower(d, high02, high13), 2);
    store(hn::InterleaveUpper(d, high02, high13), 3);
  }
#endif
}

// Panels of the transposed tile, as the B of a product whose depth is the tile's columns. Reads
// rows up to whole vectors past `rows` (what they hold does not matter) and writes up to 3 rows of
// a panel too many.
template <class Real>
HWY_INLINE void PackTransposedPanels(const Real* tile, std::ptrdiff_t rows, std::ptrdiff_t columns,
                                     Real* panels) {
  constexpr std::ptrdiff_t kBlock = kTransposeBlock<Real>;
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(TileVector<Real>()));
  const std::ptrdiff_t tile_row = RowStride<Real>(columns);
  const std::ptrdiff_t vectors = VectorsFor<Real>(rows);
  const std::ptrdiff_t panel = PanelVectors(vectors);
  for (std::ptrdiff_t first = 0; first < vectors; first += panel) {
    const std::ptrdiff_t width = std::min(panel, vectors - first) * lanes;
    const Real* from = tile + first * lanes * tile_row;
    for (std::ptrdiff_t r = 0; r < width; r += kBlock) {
      // The last block may reach past `columns`, into the next panel: that one is written later.
      for (std::ptrdiff_t c = 0; c < columns; c += kBlock) {
        TransposeBlock(from + r * tile_row + c, tile_row, panels + c * width + r, width);
      }
    }
    panels += columns * width;
  }
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
