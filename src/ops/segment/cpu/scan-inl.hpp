// Folding the segments of a tensor with one column, at a cost that does not depend on their
// lengths: of short segments no end can be foreseen.
//
// A block of rows is cut into as many chunks as a vector has lanes, and each lane walks down its
// chunk: it takes in a row, or begins anew with it where a segment ended before. The states after
// all rows are kept, so that a segment's result is found at its last row. Segments that reach over
// several chunks are joined from the states after the last rows of these, and those that reach over
// several blocks go on from what the block before left open.

#if defined(PULLBACK_SEGMENT_SCAN_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_SCAN_INL_HPP
#undef PULLBACK_SEGMENT_SCAN_INL_HPP
#else
#define PULLBACK_SEGMENT_SCAN_INL_HPP
#endif

#include <bit>

#include "ops/segment/cpu/extreme-inl.hpp"
#include "ops/segment/cpu/rows-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

// Result of some rows of a segment; for extremes also the row, counted from the segment's first.
template <class R>
struct RunResult {
  R value;
  Int<R> place;
};

template <class R>
struct SumRule {
  static constexpr bool kPlaces = false;
  static void Join(RunResult<R>& result, const RunResult<R>& later) { result.value += later.value; }
};

template <class R, bool kMax, bool kLast>
struct ExtremeRule {
  static constexpr bool kPlaces = true, kIsMax = kMax, kIsLast = kLast;
  static void Join(RunResult<R>& result, const RunResult<R>& later) {
    const R value = later.value, best = result.value;
    const bool beats = (kMax ? value > best : value < best) || (kLast && value == best) ||
                       (std::isnan(value) && !std::isnan(best));
    if (beats) result = later;
  }
};

// Where segments end.
struct SegmentEnds {
  SegmentEnds(const Segments& segments_, std::int64_t first_) : segments(segments_), first(first_) {
    const IndexView& offsets = segments.offsets;
    if (offsets.wide && offsets.stride == 1) {
      in_place = static_cast<const std::int64_t*>(offsets.data) + first + 1;
    }
  }
  HWY_INLINE std::int64_t operator[](std::int64_t k) const {
    return in_place != nullptr ? in_place[k] : segments.end(first + k);
  }

  const Segments& segments;
  std::int64_t first;
  const std::int64_t* in_place = nullptr;
};

template <class R, class Rule>
class ColumnScan {
  using I = Int<R>;
  using D = hn::ScalableTag<R>;
  using DI = hn::RebindToSigned<D>;
  static constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
  static constexpr int kLaneBits = std::countr_zero(hn::MaxLanes(D())), kChunkBits = 6;
  static constexpr std::int64_t kChunk = 1 << kChunkBits;

 public:
  static constexpr std::int64_t kRows = kLanes * kChunk;  // of a block; all arrays stay in L1
  static constexpr std::int64_t kGroup = 64;  // results that fill lines, whatever their type
  static constexpr std::int64_t kMostWaiting = kGroup + kRows;

  ColumnScan(bool mean, R empty) : mean_(mean), empty_(empty) {
    ClearMarks();
    slots_[kRows] = kRows;
    states_[kRows] = 0;
    rows_[kRows] = 0;
  }

  // Results, in the order of the segments, that wait to be written; places are -1 for no rows.
  std::int64_t waiting = 0;
  R values[kMostWaiting + kGroup];
  I places[kMostWaiting + kGroup];

  void Written(std::int64_t count) {
    waiting -= count;
    if (waiting == 0) return;
    // All there may be: copies of a fixed size are quicker.
    std::copy_n(values + count, kGroup, values);
    if (Rule::kPlaces) std::copy_n(places + count, kGroup, places);
  }

  // Takes rows [row, row + rows), kRows at most, which are at x, and the segments that end there:
  // `count` ones have these ends, and the first begins at ends[-1], maybe before `row`. Returns how
  // many those are, and sets `rows` to what was taken.
  std::int64_t Take(const R* HWY_RESTRICT x, std::int64_t row, std::int64_t& rows,
                    const SegmentEnds& ends, std::int64_t count) {
    const R* const from = x;
    LinesAhead ahead(from);
    const std::int64_t taken = FindSlots(row, rows, ends, std::min(count, kRows), from, ahead);
    if (taken == kRows) rows = ends[taken - 1] - row;
    if (rows < kRows) {
      std::copy_n(from, rows, padded_);
      std::fill_n(padded_ + rows, kRows - rows, R{0});
      x = padded_;
    }
    if (!Walk<false>(x, from, ahead)) Walk<true>(x, from, ahead);
    ClearMarks();
    FindResults(row, ends, taken, count, from, ahead);
    ahead.StepTo(from + rows);
    const auto open = static_cast<I>(ends[taken - 1] - row);
    if (open < rows) open_ = ResultOf(open, static_cast<I>(rows));
    waiting += taken;
    return taken;
  }

  // The result of the rest of a segment of `rows` rows, or if not `begun` of all of it.
  void Add(RunResult<R> result, bool begun, std::int64_t rows) {
    if (begun) {
      Rule::Join(open_, result);
      result = open_;
    }
    values[waiting] = Finished(result.value, rows);
    places[waiting++] = result.place;
  }

 private:
  void ClearMarks() {
    const DI di;
    for (std::int64_t i = 0; i < kRows; i += kLanes) hn::StoreU(hn::Zero(di), di, marks_ + i);
  }

  R Finished(R value, std::int64_t rows) const {
    return mean_ ? value / static_cast<R>(rows) : value;
  }

  // The first vector of ends[k], ..., from `row` on, of which `count` may be read.
  static HWY_INLINE hn::Vec<DI> EndsFrom(const SegmentEnds& ends, std::int64_t k,
                                         std::int64_t count, std::int64_t row) {
    const DI di;
#if HWY_TARGET != HWY_SCALAR
    if (HWY_LIKELY(ends.in_place != nullptr && count >= kLanes)) {
      const hn::ScalableTag<std::int64_t> wide;
      const auto from = hn::Set(di, static_cast<I>(row));
      const auto first = hn::BitCast(di, hn::LoadU(wide, ends.in_place + k));
      if constexpr (sizeof(I) == 8) {
        return hn::Sub(first, from);
      } else {
        const auto second = hn::LoadU(wide, ends.in_place + k + kLanes / 2);
        return hn::Sub(hn::ConcatEven(di, hn::BitCast(di, second), first), from);
      }
    }
#endif
    I buffer[kLanes] = {};
    for (std::int64_t i = 0; i < std::min(count, kLanes); ++i) {
      buffer[i] = static_cast<I>(ends[k + i] - row);
    }
    return hn::LoadU(di, buffer);
  }

  // How many of `most` segments end in rows [row, row + rows); marks there, and the slots of those
  // that have rows.
  std::int64_t FindSlots(std::int64_t row, std::int64_t rows, const SegmentEnds& ends,
                         std::int64_t most, const R* x, LinesAhead& ahead) {
    const DI di;
    LinesAhead ends_ahead(ends.in_place);
    const auto stop = hn::Set(di, static_cast<I>(rows));
    I* HWY_RESTRICT slots = slots_;
    I* HWY_RESTRICT marks = marks_;
    for (std::int64_t k = 0; k < most; k += kLanes) {
      const auto begin = EndsFrom(ends, k - 1, most - k + 1, row);
      const auto end = EndsFrom(ends, k, most - k, row);
      const auto inside = hn::AndNot(
          hn::Gt(end, stop), hn::FirstN(di, static_cast<std::size_t>(std::min(most - k, kLanes))));
      const auto last = hn::Sub(end, hn::Set(di, I{1}));
      const auto in_chunk = hn::And(last, hn::Set(di, I{kChunk - 1}));
      const auto slot =
          hn::Add(hn::ShiftLeft<kLaneBits>(in_chunk), hn::ShiftRight<kChunkBits>(last));
      const auto kept =
          hn::IfThenElse(hn::And(inside, hn::Ne(begin, end)), slot, hn::Set(di, I{kRows}));
      hn::StoreU(kept, di, slots + k);
      hn::ScatterIndex(hn::Set(di, I{-1}), di, marks, kept);
      ahead.StepTo(x + std::min(2 * k, kRows / 4));
      if (ends.in_place != nullptr) ends_ahead.StepTo(ends.in_place + k + kLanes);
      const auto found = static_cast<std::int64_t>(hn::CountTrue(di, inside));
      if (found < kLanes) return k + found;
    }
    return most;
  }

  // Where the state after a row of the block is kept: lanes side by side.
  static std::uint64_t SlotOf(std::uint64_t row) { return row % kChunk * kLanes + row / kChunk; }

#if HWY_TARGET != HWY_SCALAR
  static constexpr std::int64_t kStep = 16 / sizeof(R);

  // 16 bytes for all blocks; as integers, since GCC 12 with ThreadSanitizer dies of a masked
  // broadcast of doubles.
  static HWY_INLINE hn::Vec<D> RepeatedBlock(D d, const R* HWY_RESTRICT x) {
    const hn::Repartition<std::int32_t, D> words;
    return hn::BitCast(d, hn::LoadDup128(words, reinterpret_cast<const std::int32_t*>(x)));
  }

  // Blocks of 16 bytes from chunks kStep apart. Blends of repeated blocks leave alone the one port
  // that shuffles.
  static HWY_INLINE hn::Vec<D> BlocksOf(D d, const R* HWY_RESTRICT x) {
    auto blocks = RepeatedBlock(d, x);
    for (std::int64_t lane = kStep; lane < kLanes; lane += kStep) {
      const auto before = hn::FirstN(d, static_cast<std::size_t>(lane));
      blocks = hn::IfThenElse(before, blocks, RepeatedBlock(d, x + lane * kChunk));
    }
    return blocks;
  }

  // rows[i] = row i of all chunks.
  static HWY_INLINE void LoadRows(D d, const R* HWY_RESTRICT x, hn::Vec<D>* rows) {
    const auto a = BlocksOf(d, x), b = BlocksOf(d, x + kChunk);
    if constexpr (kStep == 2) {
      rows[0] = hn::InterleaveLower(d, a, b);
      rows[1] = hn::InterleaveUpper(d, a, b);
    } else {
      const hn::RepartitionToWide<D> wide;
      const auto c = BlocksOf(d, x + 2 * kChunk), e = BlocksOf(d, x + 3 * kChunk);
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
#else
  static constexpr std::int64_t kStep = 1;
  static HWY_INLINE void LoadRows(D d, const R* x, hn::Vec<D>* rows) { rows[0] = hn::LoadU(d, x); }
#endif

  // The states after all rows. False, and they mean nothing, if there is a NaN that kNan had to be
  // set for.
  template <bool kNan>
  bool Walk(const R* HWY_RESTRICT x, const R* from, LinesAhead& ahead) {
    const D d;
    const DI di;
    R* HWY_RESTRICT states = states_;
    I* HWY_RESTRICT rows = rows_;
    auto state = hn::Zero(d), sum = hn::Zero(d);  // a sum with a NaN is NaN
    auto where = hn::Zero(di), row = hn::ShiftLeft<kChunkBits>(hn::Iota(di, 0));
    auto starts = hn::FirstN(d, hn::Lanes(d));
    for (std::int64_t r = 0; r < kChunk; r += kStep) {
      hn::Vec<D> next[kStep];
      LoadRows(d, x + r, next);
      ahead.StepTo(from + kRows / 4 + (r + kStep) * kLanes / 2);
      for (std::int64_t i = 0; i < kStep; ++i) {
        const std::int64_t slot = (r + i) * kLanes;
        if constexpr (Rule::kPlaces) {
          auto beats = hn::Or(starts, Beats<Rule::kIsMax, Rule::kIsLast>(next[i], state));
          if constexpr (kNan) {
            beats = hn::Or(beats, hn::AndNot(hn::IsNaN(state), hn::IsNaN(next[i])));
          } else {
            sum = hn::Add(sum, next[i]);
          }
          state = hn::IfThenElse(beats, next[i], state);
          where = hn::IfThenElse(hn::RebindMask(di, beats), row, where);
          row = hn::Add(row, hn::Set(di, I{1}));
          hn::StoreU(where, di, rows + slot);
        } else {
          state = hn::IfThenElse(starts, next[i], hn::Add(state, next[i]));
        }
        hn::StoreU(state, d, states + slot);
        starts = hn::RebindMask(d, hn::MaskFromVec(hn::LoadU(di, marks_ + slot)));
      }
    }
    return !Rule::kPlaces || kNan || hn::AllFalse(d, hn::IsNaN(sum));
  }

  // Of the segments that end in the block, `taken` of `count`.
  void FindResults(std::int64_t row, const SegmentEnds& ends, std::int64_t taken,
                   std::int64_t count, const R* x, LinesAhead& ahead) {
    const D d;
    const DI di;
    std::int64_t near = 0, far = 0;
    auto number = hn::Iota(di, 0);
    for (std::int64_t k = 0; k < taken; k += kLanes) {
      const auto begin = EndsFrom(ends, k - 1, count - k + 1, row);
      const auto slot = hn::LoadU(di, slots_ + k);
      const auto none = hn::Eq(slot, hn::Set(di, I{kRows}));
      const auto value = hn::GatherIndex(d, states_, slot);
      hn::StoreU(hn::IfThenElse(hn::RebindMask(d, none), hn::Set(d, empty_), value), d,
                 values + waiting + k);
      if constexpr (Rule::kPlaces) {
        const auto place = hn::Sub(hn::GatherIndex(di, rows_, slot), begin);
        hn::StoreU(hn::IfThenElse(none, hn::Set(di, I{-1}), place), di, places + waiting + k);
      }
      const auto before = hn::Sub(ChunkOf(slot), hn::ShiftRight<kChunkBits>(begin));
      const auto joined = hn::AndNot(none, hn::Ne(before, hn::Zero(di)));
      const auto two = hn::AndNot(hn::Lt(begin, hn::Zero(di)), hn::Eq(before, hn::Set(di, I{1})));
      near += Keep(number, hn::And(joined, two), near_ + near);
      far += Keep(number, hn::AndNot(two, joined), far_ + far);
      number = hn::Add(number, hn::Set(di, I{kLanes}));
      ahead.StepTo(x + kRows * 3 / 4 + std::min(2 * k, kRows / 4));
    }
    hn::StoreU(hn::Set(di, I{kRows}), di, near_ + near);  // a segment that nobody asks for
    for (std::int64_t i = 0; i < near; i += kLanes) JoinTwo(hn::LoadU(di, near_ + i));
    for (std::int64_t i = 0; i < far; ++i) {
      const I k = far_[i];
      const RunResult<R> result =
          ResultOf(static_cast<I>(ends[k - 1] - row), static_cast<I>(ends[k] - row));
      values[waiting + k] = result.value;
      places[waiting + k] = result.place;
    }
    if (!mean_) return;
    for (std::int64_t k = 0; k < taken; ++k) {
      R& value = values[waiting + k];
      value = slots_[k] == kRows ? value : Finished(value, ends[k] - ends[k - 1]);
    }
  }

  static HWY_INLINE hn::Vec<DI> ChunkOf(hn::Vec<DI> slot) {
    return hn::And(slot, hn::Set(DI(), I{kLanes - 1}));
  }

  template <class Mask>
  static HWY_INLINE std::int64_t Keep(hn::Vec<DI> numbers, Mask mask, I* to) {
    hn::StoreU(hn::Compress(numbers, mask), DI(), to);
    return static_cast<std::int64_t>(hn::CountTrue(DI(), mask));
  }

  // Of segments in two chunks FindResults has left the result of the second one.
  void JoinTwo(hn::Vec<DI> numbers) {
    const D d;
    const DI di;
    const auto slot = hn::GatherIndex(di, slots_, numbers);
    const auto tail = hn::Add(ChunkOf(slot), hn::Set(di, I{(kChunk - 1) * kLanes - 1}));
    const auto first = hn::GatherIndex(d, states_, tail);
    const auto second = hn::GatherIndex(d, states_, slot);
    if constexpr (Rule::kPlaces) {
      const auto beats = hn::Or(Beats<Rule::kIsMax, Rule::kIsLast>(second, first),
                                hn::AndNot(hn::IsNaN(first), hn::IsNaN(second)));
      const auto place = hn::GatherIndex(di, places + waiting, numbers);
      const auto back = hn::Sub(hn::GatherIndex(di, rows_, slot), hn::GatherIndex(di, rows_, tail));
      hn::ScatterIndex(hn::IfThenElse(beats, second, first), d, values + waiting, numbers);
      hn::ScatterIndex(hn::Sub(place, hn::IfThenZeroElse(hn::RebindMask(di, beats), back)), di,
                       places + waiting, numbers);
    } else {
      hn::ScatterIndex(hn::Add(first, second), d, values + waiting, numbers);
    }
  }

  // Of rows [begin, end) of the block, and of what lies before it if `begin` does.
  RunResult<R> ResultOf(I begin, I end) const {
    const I last = (end - 1) >> kChunkBits;
    const auto in_chunk = [&](I chunk) -> RunResult<R> {
      const I row = chunk == last ? end - 1 : static_cast<I>((chunk + 1) * kChunk - 1);
      const auto slot = SlotOf(static_cast<std::uint64_t>(row));
      return {states_[slot], Rule::kPlaces ? static_cast<I>(rows_[slot] - begin) : I{0}};
    };
    I chunk = begin >> kChunkBits;
    RunResult<R> result = open_;
    if (begin >= 0) {
      result = in_chunk(chunk++);
    } else {
      chunk = 0;
    }
    for (; chunk <= last; ++chunk) Rule::Join(result, in_chunk(chunk));
    return result;
  }

  bool mean_;
  R empty_;
  RunResult<R> open_{};
  I marks_[kRows + 1];       // by slot: -1 where a segment ends; all 0 between blocks
  I slots_[kRows + kLanes];  // of the segments' last rows; kRows if they have none
  R states_[kRows + 1];      // by slot
  I rows_[kRows + 1];        // likewise: of extremes, from the block's first
  // Segments in two chunks, and others in several: each chunk ends in one of them at most.
  I near_[2 * kLanes], far_[2 * kLanes];
  R padded_[kRows];
};

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
