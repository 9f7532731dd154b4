// How backward makes d_x, and what the forward of max and min saved for it: arg, arg_mask, or
// nothing. Neither is trusted.

#if defined(PULLBACK_SEGMENT_SAVED_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_SAVED_INL_HPP
#undef PULLBACK_SEGMENT_SAVED_INL_HPP
#else
#define PULLBACK_SEGMENT_SAVED_INL_HPP
#endif

#include "ops/segment/cpu/extreme-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

enum class Rule { spread, place, mask, equal, power, product, softmax };

inline Rule RuleOf(const SegmentProblem& problem, SegmentSaved saved) {
  switch (problem.reduce) {
    case SegmentReduce::sum:
    case SegmentReduce::mean:
      return Rule::spread;
    case SegmentReduce::max:
    case SegmentReduce::min:
      if (saved == SegmentSaved::arg_mask) return Rule::mask;
      return saved == SegmentSaved::nothing && problem.ties == Ties::even ? Rule::equal
                                                                          : Rule::place;
    case SegmentReduce::prod:
      return Rule::product;
    case SegmentReduce::logsumexp:
      return Rule::power;
    case SegmentReduce::softmax:
      break;
  }
  return Rule::softmax;
}

// Whether rows have to be reduced before d_x is written.
inline bool Folds(const SegmentProblem& problem, const SegmentTensors& tensors) {
  if (is_extreme(problem.reduce)) {
    return problem.ties == Ties::even || saved_of(problem, tensors) == SegmentSaved::nothing;
  }
  if (problem.reduce == SegmentReduce::logsumexp) return !has_lse(problem, tensors);
  return problem.reduce == SegmentReduce::prod || problem.reduce == SegmentReduce::softmax;
}

// places[c] = `place` + the first or last row of the block whose element c is value[c], of NaN the
// first, unless one was found before. `place` is that of the block's first row.
template <class R>
void FindPlaces(const Block<R>& block, Int<R> place, std::int64_t columns,
                const R* HWY_RESTRICT value, bool last, Int<R>* HWY_RESTRICT places) {
  const hn::ScalableTag<R> d;
  const hn::RebindToSigned<decltype(d)> di;
  LinesAhead ahead = RowsAhead(block, columns);
  for (std::int64_t r = 0; r < block.rows; ++r) {
    const R* row = block.row(r);
    const auto place_of_row = hn::Set(di, static_cast<Int<R>>(place + r));
    ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
      ahead.Step();
      const auto x = lanes.Read(d, row + c);
      const auto before = hn::LoadU(di, places + c);
      auto open = hn::RebindMask(d, hn::Lt(before, hn::Zero(di)));
      if (last) open = hn::Or(open, hn::Not(hn::IsNaN(x)));
      const auto take = hn::And(Tied(x, hn::LoadU(d, value + c)), open);
      hn::StoreU(hn::IfThenElse(hn::RebindMask(di, take), place_of_row, before), di, places + c);
    });
  }
}

// Adds how many rows of the block tie with value[c].
template <class R>
void CountTies(const Block<R>& block, std::int64_t columns, const R* HWY_RESTRICT value,
               Int<R>* HWY_RESTRICT counts) {
  const hn::ScalableTag<R> d;
  const hn::RebindToSigned<decltype(d)> di;
  for (std::int64_t r = 0; r < block.rows; ++r) {
    const R* row = block.row(r);
    ForColumns<R>(columns, [&](auto lanes, std::int64_t c) {
      const auto equal = Tied(lanes.Read(d, row + c), hn::LoadU(d, value + c));
      const auto before = hn::LoadU(di, counts + c);
      // A mask is -1 in each lane that it holds for.
      hn::StoreU(hn::Sub(before, hn::VecFromMask(di, hn::RebindMask(di, equal))), di, counts + c);
    });
  }
}

// Shares of a few rows, column by column in registers, straight to rows to(r).
template <bool kStream, class R, class To>
void TiesGradientOfFewRows(const Block<R>& x, std::int64_t columns, const R* HWY_RESTRICT value,
                           const R* HWY_RESTRICT gradient, const To& to) {
  const hn::ScalableTag<R> d;
  LinesAhead ahead = RowsAhead(x, columns);
  ForColumns<R, kStream>(columns, [&](auto lanes, std::int64_t c) {
    const auto extreme = hn::LoadU(d, value + c);
    auto count = hn::Zero(d);
    for (std::int64_t r = 0; r < x.rows; ++r) {
      ahead.Step();
      const auto tied = Tied(lanes.Read(d, x.row(r) + c), extreme);
      count = hn::Add(count, hn::IfThenElseZero(tied, hn::Set(d, R{1})));
    }
    const auto share = hn::Div(hn::LoadU(d, gradient + c), count);
    for (std::int64_t r = 0; r < x.rows; ++r) {
      const auto tied = Tied(lanes.Read(d, x.row(r) + c), extreme);
      lanes.Write(d, hn::IfThenElseZero(tied, share), to(r) + c);
    }
  });
}

template <class R>
class Saved {
  using I = Int<R>;

 public:
  Saved(const SegmentProblem& problem, const SegmentTensors& tensors, const Segments& segments)
      : kind(saved_of(problem, tensors)),
        problem_(problem),
        tensors_(tensors),
        segments_(segments) {}

  const SegmentSaved kind;

  // Whether places are those in x and not those in the piece.
  bool by_row() const {
    return kind == SegmentSaved::arg && segments_.permuted() && problem_.arg.dtype != DType::u8;
  }

  // What LoadPlaces' places of the chosen rows are compared with: the row's place in the piece, or
  // under a permutation the low bits of its number in x (unique, as complete() bounds N).
  I Key(const Piece& piece, std::int64_t r) const {
    return static_cast<I>(by_row() ? segments_.readable_row(r) : r - piece.begin);
  }

  void LoadPlaces(const Piece& piece, std::int64_t column, std::int64_t columns, I* places) const {
    const bool by_row = segments_.permuted();
    const std::int64_t rows = piece.end - piece.begin;
    const std::int64_t begin = by_row ? 0 : piece.begin;
    const std::int64_t count = by_row ? segments_.rows : rows;
    if (problem_.arg.dtype == DType::u8) {
      const std::int64_t before = piece.begin - segments_.begin(piece.segment);
      LoadPlacesAs<std::uint8_t>(piece.segment, before, rows, column, columns, places);
    } else if (problem_.arg.dtype == DType::i32) {
      LoadPlacesAs<std::int32_t>(piece.segment, begin, count, column, columns, places);
    } else {
      LoadPlacesAs<std::int64_t>(piece.segment, begin, count, column, columns, places);
    }
  }

  // The row that arg means in the only column; negative for none.
  std::int64_t Row(std::int64_t s) const {
    if (problem_.arg.dtype == DType::i64) return *Arg<std::int64_t>().at(s, 0);
    if (problem_.arg.dtype == DType::i32) return *Arg<std::int32_t>().at(s, 0);
    return segments_.begin(s) + *Arg<std::uint8_t>().at(s, 0);
  }

  // Where the row that arg means is, under a permutation, among the places from `begin` to `end`;
  // -1 if it is not there.
  std::int64_t PlaceOfRow(std::int64_t s, std::int64_t begin, std::int64_t end) const {
    const std::int64_t wanted = Row(s);
    for (std::int64_t r = begin; r < end; ++r) {
      if (segments_.permutation[r] == wanted) return r;
    }
    return -1;
  }

  // The mask bits of row r, one byte each; up to a multiple of 8 of them.
  void ReadBits(std::int64_t r, std::int64_t column, std::int64_t columns,
                std::uint8_t* HWY_RESTRICT bits) const {
    const Matrix<const std::uint8_t> mask(problem_.arg_mask, tensors_.arg_mask);
    const std::uint8_t* from = mask.at(segments_.readable_row(r), column / 8);
    for (std::int64_t c = 0; c < columns; c += 8) {
      const unsigned byte = from[c / 8 * mask.column_stride];
      for (unsigned k = 0; k < 8; ++k) bits[c + k] = static_cast<std::uint8_t>(byte >> k & 1u);
    }
  }

  template <class A>
  Matrix<const A> Arg() const {
    return Matrix<const A>(problem_.arg, tensors_.arg);
  }

 private:
  // arg - begin where that is in [0, count), else -1.
  template <class A>
  void LoadPlacesAs(std::int64_t s, std::int64_t begin, std::int64_t count, std::int64_t column,
                    std::int64_t columns, I* HWY_RESTRICT places) const {
    const Matrix<const A> arg = Arg<A>();
    const A* HWY_RESTRICT from = arg.at(s, column);
    const auto place_of = [=](A value) {
      const auto place = static_cast<std::uint64_t>(static_cast<std::int64_t>(value)) -
                         static_cast<std::uint64_t>(begin);
      return place < static_cast<std::uint64_t>(count) ? static_cast<I>(place) : I{-1};
    };
    if (arg.column_stride == 1) {
      for (std::int64_t c = 0; c < columns; ++c) places[c] = place_of(from[c]);
    } else {
      for (std::int64_t c = 0; c < columns; ++c) places[c] = place_of(from[c * arg.column_stride]);
    }
  }

  const SegmentProblem& problem_;
  const SegmentTensors& tensors_;
  const Segments& segments_;
};

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
