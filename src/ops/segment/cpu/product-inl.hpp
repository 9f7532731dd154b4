// Products of rows, and those of all other rows.

#if defined(PULLBACK_SEGMENT_PRODUCT_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_PRODUCT_INL_HPP
#undef PULLBACK_SEGMENT_PRODUCT_INL_HPP
#else
#define PULLBACK_SEGMENT_PRODUCT_INL_HPP
#endif

#include <cstring>

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

// to[r] = before[r] * after[r] * gradient_of(r), which is a vector.
template <class R, class Gradient>
HWY_INLINE void MultiplyOthers(const R* HWY_RESTRICT before, const R* HWY_RESTRICT after,
                               const Gradient& gradient_of, std::int64_t rows, R* HWY_RESTRICT to) {
  const hn::ScalableTag<R> d;
  ForColumns<R>(rows, [&](auto lanes, std::int64_t r) {
    const auto others = hn::Mul(hn::LoadU(d, before + r), hn::LoadU(d, after + r));
    lanes.Write(d, hn::Mul(others, gradient_of(r)), to + r);
  });
}

// Of each of `count` rows the product of those before it in its segment, or with kAfter of those
// after it, to `others`, which has room for whole vectors. Bit r of `borders` says that row r is
// the first of a segment (kAfter: the last); null: none is. `carry` is a factor of what comes
// before the first row (kAfter: after the last). Returns what it is for the rows to come.
template <bool kAfter, class R>
R ProductsOfOthers(const R* HWY_RESTRICT x, const std::uint64_t* borders, std::int64_t count,
                   R carry, R* HWY_RESTRICT others) {
  const hn::ScalableTag<R> d;
  const hn::RebindToSigned<decltype(d)> di;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  constexpr std::uint64_t kAll = (std::uint64_t{1} << kLanes) - 1;
  const auto mask_of = [=](std::uint64_t bits) HWY_ATTR {
    std::uint8_t bytes[8];
    std::memcpy(bytes, &bits, sizeof(bits));
    return hn::LoadMaskBits(d, bytes);
  };
  // The lanes k before, or after.
  const auto distant = [=](Int<R> k) HWY_ATTR {
    const auto lane = hn::Add(hn::Iota(di, 0), hn::Set(di, kAfter ? k : -k));
    return hn::IndicesFromVec(d, hn::And(lane, hn::Set(di, Int<R>{kLanes - 1})));
  };
  const auto by1 = distant(1), by2 = distant(2), by4 = distant(4), by8 = distant(8);
  const auto end_lane = hn::IndicesFromVec(d, hn::Set(di, Int<R>{kAfter ? 0 : kLanes - 1}));
  const auto near = mask_of(kAfter ? std::uint64_t{1} << (kLanes - 1) : 1);
  auto factor = hn::Set(d, carry);
  LinesAhead ahead(x);
  const std::int64_t vectors = (count + kLanes - 1) / kLanes;
  for (std::int64_t v = 0; v < vectors; ++v) {
    const std::int64_t i = (kAfter ? vectors - 1 - v : v) * kLanes;
    const auto left = static_cast<std::size_t>(std::min(kLanes, count - i));
    if constexpr (!kAfter) ahead.StepTo(x + i + kLanes);
    auto product = LoadFirst(d, x + i, left, R{1});
    const std::uint64_t here = borders == nullptr ? 0 : borders[i / 64] >> (i % 64) & kAll;
    // Each lane's product grows to twice as many rows, unless it has reached a border.
    std::uint64_t closed = here;
    const auto grow = [&](const auto& by, int k) HWY_ATTR {
      const std::uint64_t none = kAfter ? kAll & ~(kAll >> k) : (std::uint64_t{1} << k) - 1;
      const auto open = mask_of(kAll & ~(closed | none));
      const auto longer = hn::Mul(product, hn::TableLookupLanes(product, by));
      product = hn::IfThenElse(open, longer, product);
      closed |= kAfter ? closed >> k : closed << k & kAll;
    };
    if constexpr (kLanes > 1) grow(by1, 1);
    if constexpr (kLanes > 2) grow(by2, 2);
    if constexpr (kLanes > 4) grow(by4, 4);
    if constexpr (kLanes > 8) grow(by8, 8);
    product = hn::IfThenElse(mask_of(kAll & ~closed), hn::Mul(product, factor), product);
    const auto before = hn::IfThenElse(near, factor, hn::TableLookupLanes(product, by1));
    Store(d, hn::IfThenElse(mask_of(here), hn::Set(d, R{1}), before), others + i);
    factor = hn::TableLookupLanes(product, end_lane);
  }
  return hn::GetLane(factor);
}

// The same as below of a tensor with one column.
template <class T, class R, class Output>
void WriteProductsOfRun(const Matrix<const T>& x, const Segments& segments, const Piece& piece,
                        const State<R>& state, const Task<R>& task, Output& output) {
  const hn::ScalableTag<R> d;
  R carry = state.b[0];
  for (std::int64_t end = piece.end; end > piece.begin;) {
    const std::int64_t rows = (end - 1 - piece.begin) % kBlockElements + 1;
    end -= rows;
    carry = ProductsOfOthers<true>(ReadRun(x, segments, end, rows, task.block), nullptr, rows,
                                   carry, task.products + (end - piece.begin));
  }
  carry = state.a[0];
  ForRuns(piece, [&](std::int64_t first, std::int64_t rows) {
    carry = ProductsOfOthers<false>(ReadRun(x, segments, first, rows, task.block), nullptr, rows,
                                    carry, task.block2);
    output.Open(Piece{piece.segment, first, first + rows, false, false});
    MultiplyOthers(
        task.block2, task.products + (first - piece.begin),
        [&](std::int64_t) { return hn::Set(d, task.gradient[0]); }, rows, output.Run(first));
    output.DrainLines();
  });
}

// Gradients of a few rows, column by column in registers, straight to rows to(r). `products` has
// room for a vector of each row.
template <bool kStream, class R, class To>
void ProductGradientOfFewRows(const Block<R>& x, std::int64_t columns,
                              const R* HWY_RESTRICT gradient, R* HWY_RESTRICT products,
                              const To& to) {
  const hn::ScalableTag<R> d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  LinesAhead ahead = RowsAhead(x, columns);
  ForColumns<R, kStream>(columns, [&](auto lanes, std::int64_t c) {
    auto after = hn::Set(d, R{1}), before = after;
    for (std::int64_t r = x.rows; r-- > 0;) {
      ahead.Step();
      Store(d, after, products + r * step);
      after = hn::Mul(after, lanes.Read(d, x.row(r) + c));
    }
    const auto g = hn::LoadU(d, gradient + c);
    for (std::int64_t r = 0; r < x.rows; ++r) {
      const auto others = hn::Mul(before, hn::LoadU(d, products + r * step));
      before = hn::Mul(before, lanes.Read(d, x.row(r) + c));
      lanes.Write(d, hn::Mul(others, g), to(r) + c);
    }
  });
}

// output[r] = gradient * state.a * (product of the piece's rows before r) * (of those after r) *
// state.b.
template <class T, class R, class Output>
void WriteProducts(const Matrix<const T>& x, const Segments& segments, const Piece& piece,
                   const State<R>& state, const Task<R>& task, Output& output) {
  if (output.one_column()) return WriteProductsOfRun(x, segments, piece, state, task, output);
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
    for (std::int64_t r = block.rows; r-- > 0;) {
      const R* row = block.row(r);
      ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
        ahead.Step();
        const auto product = hn::LoadU(d, running + c);
        lanes.Write(d, product, after + r * columns + c);
        Store(d, hn::Mul(product, lanes.Read(d, row + c)), running + c);
      });
    }
    end = first;
  }
  std::copy_n(state.a, columns, running);
  output.Open(piece);
  ForBlocks(piece, step, [&](std::int64_t first, std::int64_t rows) {
    const Block<R> block = block_of(first, rows);
    const R* HWY_RESTRICT after = task.products + (first - piece.begin) * columns;
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
