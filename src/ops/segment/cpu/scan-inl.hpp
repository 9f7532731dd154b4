// Folding the segments of a tensor with one column, at a cost that hardly depends on their lengths:
// of short segments no end can be foreseen.
//
// Where that is quicker they are folded in groups (group-inl.hpp). Else a block of rows is cut into
// as many chunks as a vector has lanes, and each lane walks down its chunk: it takes in a row, or
// begins anew with it where a segment ended before. The states after all rows are kept, so that a
// segment's result is found at its last row. Segments that reach over several chunks are joined
// from the states after the last rows of these, and those that reach over several blocks go on from
// what the block before left open.

#if defined(PULLBACK_SEGMENT_SCAN_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_SEGMENT_SCAN_INL_HPP
#undef PULLBACK_SEGMENT_SCAN_INL_HPP
#else
#define PULLBACK_SEGMENT_SCAN_INL_HPP
#endif

#include <bit>

#include "cpu/compress-inl.hpp"
#include "ops/segment/cpu/group-inl.hpp"
#include "ops/segment/cpu/scan_rules-inl.hpp"
#include "ops/segment/cpu/transpose-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::segment_cpu::HWY_NAMESPACE {

template <class R, class Rule>
class ColumnScan {
  using I = Int<R>;
  using B = typename Rule::B;
  using D = hn::ScalableTag<R>;
  using DI = hn::RebindToSigned<D>;
  using DB = hn::ScalableTag<B>;
  static constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(D()));
  static constexpr std::int64_t kStep = kRowsOfBlock<R>;
  static constexpr int kLaneBits = std::countr_zero(hn::MaxLanes(D())), kChunkBits = 6;
  static constexpr std::int64_t kChunk = 1 << kChunkBits;
  static constexpr bool kGroups = Rule::kGroups && GroupFold<R, Rule>::kQuick;

 public:
  static constexpr std::int64_t kRows = kLanes * kChunk;  // of a block; all arrays stay in L1
  static constexpr std::int64_t kGroup = 64;  // results that fill lines, whatever their type
  static constexpr std::int64_t kMostWaiting = kGroup + kRows;

  // `empty` is what segments without rows are folded to.
  explicit ColumnScan(Folded<R, B> empty) : empty_(empty) {
    slots_[kRows] = kRows;
    states_a_[kRows] = 0;
    states_b_[kRows] = 0;
  }

  // What the segments are folded to, in their order, until it is used. Places are those in the
  // segment.
  std::int64_t waiting = 0;
  HWY_ALIGN R a[kMostWaiting + kGroup];
  HWY_ALIGN B b[kMostWaiting + kGroup];

  void Used(std::int64_t count) {
    waiting -= count;
    if (waiting == 0) return;
    // All there may be: copies of a fixed size are quicker.
    std::copy_n(a + count, kGroup, a);
    if (Rule::kTwo) std::copy_n(b + count, kGroup, b);
  }

  // Takes rows [row, row + rows), kRows at most, which are at x, and the segments that end there:
  // `count` ones have these ends, and the first begins at ends[-1], maybe before `row`. Returns how
  // many those are, and sets `rows` to what was taken. `fetch`: x is in memory.
  std::int64_t Take(const R* HWY_RESTRICT x, std::int64_t row, std::int64_t& rows,
                    const SegmentEnds& ends, std::int64_t count, bool fetch = true) {
    // Without rows x may be null, or the end of the tensor: nothing is read from it then.
    const R* const from = rows > 0 ? x : own_;
    LinesAhead ahead(from);
    if (!fetch) ahead.Skip(from + kRows);
    if constexpr (kGroups) {
      by_groups_ = TakesGroups(from, row, rows, ends, std::min(count, kRows), ahead);
      if (by_groups_) {
        const std::int64_t taken = groups_.count();
        groups_.Fold(has_powers_ ? own_ : from, row, row + rows, empty_, shift_, a + waiting,
                     b + waiting, from, ahead);
        rows = ends[taken - 1] - row;
        waiting += taken;
        return taken;
      }
    }
    ClearMarks();
    const std::int64_t taken = Mark(row, rows, ends, std::min(count, kRows), from, ahead);
    GatherMarks();
    if (taken == kRows) rows = ends[taken - 1] - row;
    has_powers_ = Rule::kPowers && rows > 0 && TakePowers(from, rows, ahead);
    if (has_powers_) {
      WalkAs<Walk::powers>(own_, from, ahead);
    } else {
      if (rows < kRows) {
        std::copy_n(from, rows, own_);
        std::fill_n(own_ + rows, kRows - rows, R{0});
        x = own_;
      }
      if (!WalkAs<Walk::ordinary>(x, from, ahead)) WalkAs<Walk::any>(x, from, ahead);
    }
    if (has_powers_) {
      FindResults<true>(row, ends, taken, count, from, ahead);
    } else {
      FindResults<false>(row, ends, taken, count, from, ahead);
    }
    ahead.StepTo(from + rows);
    const auto open = static_cast<I>(ends[taken - 1] - row);
    if (open < rows) open_ = ResultOf(open, static_cast<I>(rows));
    waiting += taken;
    return taken;
  }

  // Calls f(lanes, r, values) for the rows row + r of the `taken` segments that were last taken,
  // each with the value of its segment. False, and f was not called, if a segment has no rows.
  template <class F>
  HWY_INLINE bool Spread([[maybe_unused]] std::int64_t row,
                         [[maybe_unused]] const SegmentEnds& ends,
                         [[maybe_unused]] std::int64_t taken,
                         [[maybe_unused]] const R* HWY_RESTRICT values,
                         [[maybe_unused]] const F& f) {
#if HWY_TARGET == HWY_SCALAR
    return false;
#else
    if constexpr (sizeof(R) == 8) {
      return false;
    } else {
      const std::int64_t rows = ends[taken - 1] - row;
      if (by_groups_) {
        ClearMarks();
        std::uint8_t* HWY_RESTRICT before = marks_ + kChunk - 1;
        ends.Visit([&](const auto& end_of) {
          for (std::int64_t k = 0; k < taken; ++k) before[end_of(k) - row] = 1;
        });
        GatherMarks();
      }
      if (marked_ != taken) return false;
      const D d;
      const DI di;
      const hn::Rebind<std::uint8_t, D> du8;
      const std::uint8_t* HWY_RESTRICT marks = marks_ + kChunk;
      ForColumns<R>(rows, [&](auto lanes, std::int64_t r) HWY_ATTR {
        // How many segments ended before, in the vector.
        const auto marked = hn::LoadU(du8, marks + r);
        auto rank = hn::ShiftLeftBytes<1>(du8, marked);
        rank = hn::Add(rank, hn::ShiftLeftBytes<1>(du8, rank));
        rank = hn::Add(rank, hn::ShiftLeftBytes<2>(du8, rank));
        if constexpr (kLanes > 4) rank = hn::Add(rank, hn::ShiftLeftBytes<4>(du8, rank));
        if constexpr (kLanes > 8) rank = hn::Add(rank, hn::ShiftLeftBytes<8>(du8, rank));
        const auto index = hn::IndicesFromVec(d, hn::PromoteTo(di, rank));
        f(lanes, r, hn::TableLookupLanes(hn::LoadU(d, values), index));
        const std::uint64_t bits = bits_[r >> kChunkBits] >> (r & (kChunk - 1));
        values += std::popcount(bits & ((std::uint64_t{1} << kLanes) - 1));
      });
      return true;
    }
#endif
  }

  // The powers of the rows that were last taken, all with the same shift; or null.
  const R* powers() const { return has_powers_ ? own_ : nullptr; }

  // All of a segment, or if it has `begun` the rest of it.
  void Add(const Folded<R, B>& folded, bool begun) {
    if (begun) {
      Join(open_, folded);
    } else {
      open_ = folded;
    }
    a[waiting] = open_.a;
    b[waiting++] = open_.b;
  }

 private:
  // Rows whose marks fit into a lane, and how often.
  static constexpr std::int64_t kWordRows = 8 * sizeof(I), kWords = kChunk / kWordRows;

  void ClearMarks() {
    // By vectors: compilers choose `rep stos`, whose beginning takes as long as the rest.
    const hn::CappedTag<std::uint8_t, kChunk> d;
    for (std::size_t i = 0; i < kChunk + kRows; i += hn::Lanes(d)) {
      hn::Store(hn::Zero(d), d, marks_ + i);
    }
  }

  // Whether groups of segments are to be folded. Then those are chosen, and powers are taken.
  bool TakesGroups(const R* HWY_RESTRICT x, std::int64_t row, std::int64_t rows,
                   const SegmentEnds& ends, std::int64_t most, LinesAhead& ahead) {
    static_assert(kRows <= GroupFold<R, Rule>::kMostRows);
    if (ends[-1] != row) return false;
    const std::int64_t taken = groups_.Choose(row + rows, ends, most);
    const std::int64_t taken_rows = taken > 0 ? ends[taken - 1] - row : 0;
    if (taken_rows == 0) return false;
    if constexpr (Rule::kPowers) {
      has_powers_ = TakePowers(x, taken_rows, ahead);
      return has_powers_;
    }
    return !Rule::kPlaces || AreOrdinary(x, taken_rows);
  }

  // What WalkAs tells of the rows.
  static bool AreOrdinary(const R* HWY_RESTRICT x, std::int64_t rows) {
    const D d;
    auto sum = hn::Zero(d), sum2 = sum;
    std::int64_t i = 0;
    for (; i + 2 * kLanes <= rows; i += 2 * kLanes) {
      sum = hn::Add(sum, hn::LoadU(d, x + i));
      sum2 = hn::Add(sum2, hn::LoadU(d, x + i + kLanes));
    }
    for (; i < rows; i += kLanes) {
      sum = hn::Add(sum, LoadFirst(d, x + i, static_cast<std::size_t>(std::min(kLanes, rows - i))));
    }
    return Rule::Ordinary(d, hn::Add(sum, sum2));
  }

  static void Join(Folded<R, B>& folded, const Folded<R, B>& later) {
    if constexpr (!Rule::kTwo) {
      folded.a += later.a;
    } else {
      const D d;
      const DB db;
      auto joined_a = hn::Set(d, folded.a);
      auto joined_b = hn::Set(db, folded.b);
      Rule::template JoinLanes<D, DB>(d, joined_a, joined_b, hn::Set(d, later.a),
                                      hn::Set(db, later.b));
      folded = {hn::GetLane(joined_a), hn::GetLane(joined_b)};
    }
  }

  // How many of `most` segments end in rows [row, row + rows); marks there.
  std::int64_t Mark(std::int64_t row, std::int64_t rows, const SegmentEnds& ends, std::int64_t most,
                    const R* x, LinesAhead& ahead) {
    constexpr std::int64_t kAtOnce = 8;
    const std::int64_t stop = row + rows;
    std::uint8_t* HWY_RESTRICT marks = marks_ + kChunk - 1;
    std::int64_t k = 0;
    LinesAhead ends_ahead(ends.in_place);
    ends.Visit([&](const auto& end_of) {
      for (; k + kAtOnce <= most && end_of(k + kAtOnce - 1) <= stop; k += kAtOnce) {
        for (std::int64_t i = 0; i < kAtOnce; ++i) marks[end_of(k + i) - row] = 1;
        if (ends.in_place != nullptr) ends_ahead.Step();
        ahead.StepTo(x + std::min(2 * k, kRows / 4));
      }
      for (; k < most && end_of(k) <= stop; ++k) marks[end_of(k) - row] = 1;
    });
    return k;
  }

  // Marks of a chunk become bits, one chunk a lane.
  void GatherMarks() {
    marked_ = 0;
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const std::uint8_t* marks = marks_ + (lane + 1) * kChunk;
      std::uint64_t bits = 0;
#if HWY_TARGET == HWY_SCALAR
      for (std::int64_t i = 0; i < kChunk; ++i) bits |= std::uint64_t{marks[i]} << i;
#else
      const hn::CappedTag<std::uint8_t, kChunk> d;
      std::uint8_t bytes[8];
      for (std::size_t i = 0; i < kChunk; i += hn::Lanes(d)) {
        hn::StoreMaskBits(d, hn::Ne(hn::LoadU(d, marks + i), hn::Zero(d)), bytes + i / 8);
      }
      std::memcpy(&bits, bytes, sizeof(bits));
#endif
      bits_[lane] = bits;
      marked_ += std::popcount(bits);
      for (std::int64_t word = 0; word < kWords; ++word) {
        words_[word * kLanes + lane] = static_cast<I>(bits >> (word * kWordRows));
      }
    }
  }

  // Where the state after a row of the block is kept: lanes side by side.
  static std::uint64_t SlotOf(std::uint64_t row) { return row % kChunk * kLanes + row / kChunk; }

  // exp(x - shift_) to own_; 0 behind the rows. False if one is not near the shift.
  HWY_NOINLINE bool TakePowers(const R* HWY_RESTRICT x, std::int64_t rows,
                               LinesAhead& lines_ahead) {
    const D d;
    LinesAhead ahead = lines_ahead;  // a copy, which stores to memory do not change
    const auto shift = NearShift(d, hn::Set(d, x[0]));
    shift_ = hn::GetLane(shift);
    Nearness<D> near;
    const auto power_of = [&](auto v) HWY_ATTR {
      const auto above = hn::Sub(v, shift);
      near.Add(above);
      return ExpOfNear(d, above);
    };
    std::int64_t i = 0;
    for (; i + kLanes <= rows; i += kLanes) {
      ahead.StepFarTo(x + i);
      hn::StoreU(power_of(hn::LoadU(d, x + i)), d, own_ + i);
    }
    lines_ahead = ahead;
    if (i < rows) {
      const auto left = static_cast<std::size_t>(rows - i);
      const auto rest = hn::FirstN(d, left);
      const auto power = power_of(hn::IfThenElse(rest, LoadFirst(d, x + i, left), shift));
      hn::StoreU(hn::IfThenElseZero(rest, power), d, own_ + i);
      i += kLanes;
    }
    for (; i < kRows; i += kLanes) hn::StoreU(hn::Zero(d), d, own_ + i);
    return near.All(shift);
  }

  // The states after all rows. False, and they mean nothing, if the rows are not so.
  template <Walk kWalk>
  bool WalkAs(const R* HWY_RESTRICT x, const R* from, LinesAhead& ahead) {
    const D d;
    const DI di;
    const DB db;
    R* HWY_RESTRICT states_a = states_a_;
    B* HWY_RESTRICT states_b = states_b_;
    auto state_a = hn::Set(d, shift_), sum = hn::Zero(d);
    auto state_b = hn::Zero(db);
    auto row = hn::ShiftLeft<kChunkBits>(hn::Iota(di, 0));
    auto starts = hn::FirstN(d, hn::Lanes(d));
    for (std::int64_t word = 0; word < kWords; ++word) {
      const auto marks = hn::LoadU(di, words_ + word * kLanes);
      auto bit = hn::Set(di, I{1});
      for (std::int64_t r = word * kWordRows; r < (word + 1) * kWordRows; r += kStep) {
        hn::Vec<D> next[kStep];
        LoadRows(
            d, [&](std::int64_t lane) HWY_ATTR { return x + r + lane * kChunk; }, next);
        ahead.StepTo(from + kRows / 4 + (r + kStep) * kLanes / 2);
        for (std::int64_t i = 0; i < kStep; ++i) {
          const std::int64_t slot = (r + i) * kLanes;
          Rule::template Step<kWalk, D, DB>(d, next[i], starts, row, state_a, state_b);
          if constexpr (kWalk == Walk::ordinary) sum = hn::Add(sum, next[i]);
          row = hn::Add(row, hn::Set(di, I{1}));
          if constexpr (kWalk != Walk::powers) hn::StoreU(state_a, d, states_a + slot);
          if constexpr (Rule::kTwo) hn::StoreU(state_b, db, states_b + slot);
          starts = hn::RebindMask(d, hn::TestBit(marks, bit));
          bit = hn::Add(bit, bit);
        }
      }
    }
    return kWalk != Walk::ordinary || Rule::Ordinary(d, sum);
  }

  // Of the segments that end in the block, `taken` of `count`. With powers all have the same `a`.
  template <bool kPowers>
  void FindResults(std::int64_t row, const SegmentEnds& ends, std::int64_t taken,
                   std::int64_t count, const R* x, LinesAhead& ahead) {
    const D d;
    const DI di;
    const DB db;
    std::int64_t near = 0, far = 0;
    auto number = hn::Iota(di, 0);
    for (std::int64_t k = 0; k < taken; k += kLanes) {
      const auto begin = ends.From(di, k - 1, count - k + 1, row);
      const auto end = ends.From(di, k, count - k, row);
      const auto inside = hn::FirstN(di, static_cast<std::size_t>(std::min(taken - k, kLanes)));
      const auto last = hn::Sub(end, hn::Set(di, I{1}));
      const auto in_chunk = hn::And(last, hn::Set(di, I{kChunk - 1}));
      const auto any = hn::And(inside, hn::Ne(begin, end));
      const auto none = hn::Not(any);
      const auto slot = hn::IfThenElse(
          any, hn::Add(hn::ShiftLeft<kLaneBits>(in_chunk), hn::ShiftRight<kChunkBits>(last)),
          hn::Set(di, I{kRows}));
      hn::StoreU(slot, di, slots_ + k);
      auto folded = hn::Set(d, shift_);
      if constexpr (!kPowers) folded = hn::GatherIndex(d, states_a_, slot);
      hn::StoreU(hn::IfThenElse(hn::RebindMask(d, none), hn::Set(d, empty_.a), folded), d,
                 a + waiting + k);
      if constexpr (Rule::kTwo) {
        auto other = hn::GatherIndex(db, states_b_, slot);
        if constexpr (Rule::kPlaces) other = hn::Sub(other, begin);
        hn::StoreU(hn::IfThenElse(hn::RebindMask(db, none), hn::Set(db, empty_.b), other), db,
                   b + waiting + k);
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
    for (std::int64_t i = 0; i < near; i += kLanes) JoinTwo<kPowers>(hn::LoadU(di, near_ + i));
    for (std::int64_t i = 0; i < far; ++i) {
      const I k = far_[i];
      const Folded<R, B> folded =
          ResultOf(static_cast<I>(ends[k - 1] - row), static_cast<I>(ends[k] - row));
      a[waiting + k] = folded.a;
      b[waiting + k] = folded.b;
    }
  }

  static HWY_INLINE hn::Vec<DI> ChunkOf(hn::Vec<DI> slot) {
    return hn::And(slot, hn::Set(DI(), I{kLanes - 1}));
  }

  template <class Mask>
  static HWY_INLINE std::int64_t Keep(hn::Vec<DI> numbers, Mask mask, I* to) {
    return static_cast<std::int64_t>(pullback::HWY_NAMESPACE::StoreActive(DI(), numbers, mask, to));
  }

  // Of segments in two chunks FindResults has left the result of the second one.
  template <bool kPowers>
  void JoinTwo(hn::Vec<DI> numbers) {
    const D d;
    const DI di;
    const DB db;
    const auto slot = hn::GatherIndex(di, slots_, numbers);
    const auto tail = hn::Add(ChunkOf(slot), hn::Set(di, I{(kChunk - 1) * kLanes - 1}));
    if constexpr (kPowers) {
      const auto sum =
          hn::Add(hn::GatherIndex(db, states_b_, tail), hn::GatherIndex(db, states_b_, slot));
      hn::ScatterIndex(sum, db, b + waiting, numbers);
      return;
    }
    auto joined_a = hn::GatherIndex(d, states_a_, tail);
    auto joined_b = hn::Zero(db), later_b = hn::Zero(db);
    if constexpr (Rule::kTwo) {
      joined_b = hn::GatherIndex(db, states_b_, tail);
      later_b = hn::GatherIndex(db, states_b_, slot);
    }
    Rule::template JoinLanes<D, DB>(d, joined_a, joined_b, hn::GatherIndex(d, states_a_, slot),
                                    later_b);
    hn::ScatterIndex(joined_a, d, a + waiting, numbers);
    if constexpr (Rule::kPlaces) {
      const auto place = hn::GatherIndex(db, b + waiting, numbers);
      joined_b = hn::Add(place, hn::Sub(joined_b, later_b));
    }
    if constexpr (Rule::kTwo) hn::ScatterIndex(joined_b, db, b + waiting, numbers);
  }

  // Of rows [begin, end) of the block, and of what lies before it if `begin` does.
  Folded<R, B> ResultOf(I begin, I end) const {
    const I last = (end - 1) >> kChunkBits;
    const auto in_chunk = [&](I chunk) -> Folded<R, B> {
      const I row = chunk == last ? end - 1 : static_cast<I>((chunk + 1) * kChunk - 1);
      const auto slot = SlotOf(static_cast<std::uint64_t>(row));
      Folded<R, B> folded{has_powers_ ? shift_ : states_a_[slot], B{0}};
      if (Rule::kTwo) folded.b = states_b_[slot];
      if (Rule::kPlaces) folded.b -= static_cast<B>(begin);
      return folded;
    };
    I chunk = begin >> kChunkBits;
    Folded<R, B> folded = open_;
    if (begin >= 0) {
      folded = in_chunk(chunk++);
    } else {
      chunk = 0;
    }
    for (; chunk <= last; ++chunk) Join(folded, in_chunk(chunk));
    return folded;
  }

  GroupFold<R, Rule> groups_;
  Folded<R, B> empty_, open_{};
  // Of row r: marks_[kChunk + r], 1 where a segment ends. The byte before is for segments without
  // rows that end where the block begins.
  HWY_ALIGN std::uint8_t marks_[kChunk + kRows];
  std::uint64_t bits_[kLanes];          // the same as bits, of each chunk
  HWY_ALIGN I words_[kWords * kLanes];  // and word by word, for all chunks
  std::int64_t marked_ = 0;             // how many there are
  HWY_ALIGN I slots_[kRows + kLanes];   // of the segments' last rows; kRows if they have none
  // Aligned, as a vector in two lines takes twice the time.
  HWY_ALIGN R states_a_[kRows + 1];  // by slot
  HWY_ALIGN B states_b_[kRows + 1];  // likewise; rows are counted from the block's first
  // Segments in two chunks, and others in several: each chunk ends in one of them at most.
  I near_[2 * kLanes], far_[2 * kLanes];
  HWY_ALIGN R own_[kRows];  // rows to which others were added, or powers
  R shift_ = 0;
  bool has_powers_ = false, by_groups_ = false;
};

}  // namespace pullback::segment_cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
