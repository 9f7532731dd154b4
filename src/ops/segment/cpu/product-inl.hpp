// Products of rows, and those of all other rows.

#if defined(PULLBACK_SEGMENT_PRODUCT_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_PRODUCT_INL_HPP
#undef PULLBACK_SEGMENT_PRODUCT_INL_HPP
#else
#define PULLBACK_SEGMENT_PRODUCT_INL_HPP
#endif

#include "ops/segment/cpu/rows-inl.hpp"
#include "ops/segment/cpu/task-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

// total[c] *= block[0][c] * block[1][c] * …, rounded once a block: a product of n factors in f32
// would carry the roundings of all n.
template <class R>
void MultiplyRows(const Block<R>& block, std::int64_t columns, R* HWY_RESTRICT total) {
  if constexpr (sizeof(R) == 8) {
    FoldRows(block, 0, columns, total, [](auto a, auto b) { return hn::Mul(a, b); });
  } else {
#if HWY_TARGET == HWY_SCALAR
    for (std::int64_t c = 0; c < columns; ++c) {
      double product = static_cast<double>(total[c]);
      for (std::int64_t r = 0; r < block.rows; ++r) product *= static_cast<double>(block.row(r)[c]);
      total[c] = static_cast<R>(product);
    }
#else
    const hn::ScalableTag<R> d;
    const hn::Half<decltype(d)> half;
    const hn::Rebind<double, decltype(half)> wide;
    LinesAhead ahead = RowsAhead(block, columns);
    ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
      const auto before = hn::LoadU(d, total + c);
      auto low = hn::PromoteTo(wide, hn::LowerHalf(half, before));
      auto high = hn::PromoteTo(wide, hn::UpperHalf(half, before));
      const R* from = block.data + c;
      for (std::int64_t r = 0; r < block.rows; ++r, from += block.stride) {
        const auto v = lanes.Read(d, from);
        ahead.Step();
        low = hn::Mul(low, hn::PromoteTo(wide, hn::LowerHalf(half, v)));
        high = hn::Mul(high, hn::PromoteTo(wide, hn::UpperHalf(half, v)));
      }
      Store(d, hn::Combine(d, hn::DemoteTo(half, high), hn::DemoteTo(half, low)), total + c);
    });
#endif
  }
}

template <class R>
R ProductOfRun(const R* HWY_RESTRICT from, std::int64_t count) {
  // In double: one rounding in all. As many chains as hide the wait of a multiplication.
  constexpr std::int64_t kChains = 64;
  double product = 1;
  std::int64_t i = 0;
  if (count >= kChains) {
    double products[kChains];
    std::fill_n(products, kChains, 1.0);
    LinesAhead ahead = RowsAhead(Block<R>{from, 1, count}, 1);
    for (; i + kChains <= count; i += kChains) {
      ahead.StepTo(from + i + kChains);
      for (std::int64_t k = 0; k < kChains; ++k) products[k] *= static_cast<double>(from[i + k]);
    }
    for (double factor : products) product *= factor;
  }
  for (; i < count; ++i) product *= static_cast<double>(from[i]);
  return static_cast<R>(product);
}

// output[r] = gradient * state.a * (product of the piece's rows before r) * (of those after r) *
// state.b.
template <class T, class R, class Output>
void WriteProducts(const Matrix<const T>& x, const Segments& segments, const Piece& piece,
                   const State<R>& state, const Task<R>& task, Output& output) {
  const hn::ScalableTag<R> d;
  const std::int64_t columns = task.columns, step = task.block_rows;
  const auto block_of = [&](std::int64_t first, std::int64_t rows) {
    return ReadBlock(x, segments, first, rows, task.column, columns, task.block);
  };
  // From the last row up: products[r] = product of all rows after r.
  R* HWY_RESTRICT running = task.value;
  std::copy_n(state.b, columns, running);
  for (std::int64_t end = piece.end; end > piece.begin;) {
    const std::int64_t first = piece.begin + (end - 1 - piece.begin) / step * step;
    const Block<R> block = block_of(first, end - first);
    LinesAhead ahead = RowsAhead(block, columns);
    R* HWY_RESTRICT after = task.products + (first - piece.begin) * columns;
    if (columns == 1) {
      R product = running[0];
      for (std::int64_t r = block.rows; r-- > 0;) {
        after[r] = product;
        product *= *block.row(r);
      }
      running[0] = product;
    } else {
      for (std::int64_t r = block.rows; r-- > 0;) {
        const R* row = block.row(r);
        ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
          ahead.Step();
          const auto product = hn::LoadU(d, running + c);
          lanes.Write(d, product, after + r * columns + c);
          Store(d, hn::Mul(product, lanes.Read(d, row + c)), running + c);
        });
      }
    }
    end = first;
  }
  std::copy_n(state.a, columns, running);
  output.Open(piece);
  ForBlocks(piece, step, [&](std::int64_t first, std::int64_t rows) {
    const Block<R> block = block_of(first, rows);
    const R* HWY_RESTRICT after = task.products + (first - piece.begin) * columns;
    if (columns == 1) {
      R product = running[0];
      for (std::int64_t r = 0; r < rows; ++r) {
        *output.Row(first + r) = product * after[r] * task.gradient[0];
        output.Done(first + r);
        product *= *block.row(r);
      }
      running[0] = product;
      return;
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      const R* row = block.row(r);
      R* HWY_RESTRICT to = output.Row(first + r);
      ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
        const auto before = hn::LoadU(d, running + c);
        const auto others = hn::Mul(before, lanes.Read(d, after + r * columns + c));
        Store(d, hn::Mul(before, lanes.Read(d, row + c)), running + c);
        lanes.Write(d, hn::Mul(others, hn::LoadU(d, task.gradient + c)), to + c);
      });
      output.Done(first + r);
    }
  });
}

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
