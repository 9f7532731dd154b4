// What a reduction and then a map of the same contiguous rows make: softmax, its gradient, and that
// of max and min with even ties. Rows are read once where segments lie within a tile.
//
// A block holds the rows of its tile (smxx_row_tile.cuh). Lanes walk the rows of a segment once for
// their state and again to put what they give in their place. Then the block stores the tile.
// Segments that reach over the tile's borders are only reduced, to the tile's two slots:
// smxx_combine.cuh puts these together, and reduce_map_border() reads such rows again.
#pragma once

#include "ops/segment/cuda/smxx_border.cuh"
#include "ops/segment/cuda/smxx_row_tile.cuh"

namespace pullback::segment_cuda {

// A lane's columns of a row of each input.
template <class T, int kVector, int kInputs>
struct InputRow {
  Values<T, kVector> piece[kInputs];
};
// What is read of a segment, from `column` on: nothing.
struct NothingGiven {
  static NothingGiven load(const Params&, int64_t, int64_t) { return {}; }
};

// As smxx_combine.cuh has stored them.
template <class R, int kVector>
void read_sums(const Params& p, int64_t s, int64_t column,
               typename Sum<R>::State (&state)[kVector]) {
  const auto sums = load_row<R, kVector>(p.result, s, column);
#pragma unroll
  for (int i = 0; i < kVector; ++i) state[i] = {sums.element[i]};
}

template <class T, int kVector>
struct SoftmaxForward {
  using R = Real<T>;
  using Op = SoftmaxSum<R>;
  using State = typename Op::State;
  static constexpr int kInputs = 1;
  using Row = InputRow<T, kVector, kInputs>;
  using Given = NothingGiven;
  struct Segment {
    SoftmaxPower<R> power[kVector];
  };

  // What enters the state, and what changes nothing there.
  static R entry(const Row& row, const Given&, int i) { return row.piece[0].real(i); }
  static R nothing(const Given&, int) { return -device::infinity<R>(); }
  static Segment of(const State (&state)[kVector], const Given&, const Params&, int64_t, int64_t) {
    Segment segment;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      segment.power[i] = SoftmaxPower<R>::of(state[i].shift, state[i].sum);
    }
    return segment;
  }
  static R value(const Segment& segment, const Row& row, int i) {
    return segment.power[i].value(row.piece[0].real(i));
  }
  // As smxx_combine.cuh has stored it.
  static void read(const Params& p, int64_t s, int64_t column, State (&state)[kVector]) {
    const auto shift = load_row<R, kVector>(p.result, s, column);
    const auto sum = load_row<R, kVector>(p.result2, s, column);
#pragma unroll
    for (int i = 0; i < kVector; ++i) state[i] = {shift.element[i], sum.element[i]};
  }
};

// y (d_y - sum of y d_y).
template <class T, int kVector>
struct SoftmaxBackward {
  using R = Real<T>;
  using Op = Sum<R>;
  using State = typename Op::State;
  static constexpr int kInputs = 2;
  using Row = InputRow<T, kVector, kInputs>;
  using Given = NothingGiven;
  struct Segment {
    R dot[kVector];
  };

  static R entry(const Row& row, const Given&, int i) {
    return row.piece[0].real(i) * row.piece[1].real(i);
  }
  static R nothing(const Given&, int) { return 0; }
  static Segment of(const State (&state)[kVector], const Given&, const Params&, int64_t, int64_t) {
    Segment segment;
#pragma unroll
    for (int i = 0; i < kVector; ++i) segment.dot[i] = state[i].sum;
    return segment;
  }
  static R value(const Segment& segment, const Row& row, int i) {
    return row.piece[0].real(i) * (row.piece[1].real(i) - segment.dot[i]);
  }
  static void read(const Params& p, int64_t s, int64_t column, State (&state)[kVector]) {
    read_sums<R>(p, s, column, state);
  }
};

// d_out / (number of rows that are the extreme) to each of these.
template <class T, int kVector>
struct TiesBackward {
  using R = Real<T>;
  using Op = Sum<R>;  // of ones
  using State = typename Op::State;
  static constexpr int kInputs = 1;
  using Row = InputRow<T, kVector, kInputs>;
  struct Given {
    Values<T, kVector> top;
    static Given load(const Params& p, int64_t s, int64_t column) {
      return {load_row<T, kVector>(p.out, s, column)};
    }
  };
  struct Segment {
    Values<T, kVector> top;
    R share[kVector];
  };

  static R entry(const Row& row, const Given& given, int i) {
    return tied(row.piece[0].real(i), given.top.real(i)) ? 1 : 0;
  }
  static R nothing(const Given& given, int i) {
    const R top = given.top.real(i);
    return top != top ? 0 : device::quiet_nan<R>();
  }
  // d_out is read here: before, it would take registers from the first walk.
  static Segment of(const State (&state)[kVector], const Given& given, const Params& p, int64_t s,
                    int64_t column) {
    const auto g = load_row<T, kVector>(p.d_out, s, column);
    Segment segment{given.top, {}};
#pragma unroll
    for (int i = 0; i < kVector; ++i) segment.share[i] = g.real(i) / state[i].sum;
    return segment;
  }
  static R value(const Segment& segment, const Row& row, int i) {
    return tied(row.piece[0].real(i), segment.top.real(i)) ? segment.share[i] : 0;
  }
  static void read(const Params& p, int64_t s, int64_t column, State (&state)[kVector]) {
    read_sums<R>(p, s, column, state);
  }
};

// What every row of a segment gives, from the values of the rows.
template <class Rule, class T, int kVector>
Values<T, kVector> row_values(const typename Rule::Segment& segment,
                              const typename Rule::Row& row) {
  Real<T> values[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = Rule::value(segment, row, i);
  return Values<T, kVector>::of(values);
}

template <template <class, int> class RuleOf, class T, int kVector>
void reduce_map_tile(const Params& p) {
  using Rule = RuleOf<T, kVector>;
  using Op = typename Rule::Op;
  using Row = typename Rule::Row;
  using Piece = Values<T, kVector>;
  using R = Real<T>;
  constexpr int kInputs = Rule::kInputs;
  constexpr int kAtOnce = row_tile_at_once(kInputs * kVector);
  extern __shared__ __align__(128) unsigned char memory[];

  const Segments segments = make_segments(p);
  device::allow_next_kernel();
  RowTile rows(p, make_tile(p, blockIdx.x), sizeof(T));
  const int image_bytes = rows.image_bytes();
  const RowImage image{memory};
#pragma unroll
  for (int input = 0; input < kInputs; ++input) {
    rows.copy_rows({memory + input * image_bytes}, input == 0 ? p.x.data : p.y.data);
  }
  async_commit();
  rows.find_ends(segments, memory + kInputs * image_bytes);
  async_wait<0>();

  rows.share_out<kVector, Parts::none>(
      [&](int k, int column, int begin, int end, int rank, int step, int lanes, int) {
        const uint32_t first =
            rows.skew + begin * rows.row_bytes + column * static_cast<int>(sizeof(T));
        const int many = end - begin;
        const auto row_at = [&](int at) {
          Row row;
#pragma unroll
          for (int input = 0; input < kInputs; ++input) {
            const RowImage of{memory + input * image_bytes};
            row.piece[input] = of.load<Piece>(first + at * rows.row_bytes);
          }
          return row;
        };
        if (!rows.in_problem(k)) {
          for (int at = rank; at < many; at += step) {
            image.store(first + at * rows.row_bytes, Piece{});
          }
          return;
        }
        const int64_t s = Tile::problem_segment(rows.tile.first + k);
        typename Rule::Given given{};
        if (column < p.columns) given = Rule::Given::load(p, s, column);
        R none[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) none[i] = Rule::nothing(given, i);
        Row nothing;
#pragma unroll
        for (int input = 0; input < kInputs; ++input) nothing.piece[input] = Piece::of(none);
        typename Rule::State state[kVector];
        add_tile_rows<Op, kAtOnce, R>(
            state, row_at, nothing,
            [&](const Row& row, int i) { return Rule::entry(row, given, i); }, begin, many, rank,
            step, lanes);
        if (rows.reaches_out(k)) {
          if (rank != 0 || many <= 0) return;
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            slot_of<Op>(p, blockIdx.x, k == rows.end_count)[column + i] = state[i];
          }
          return;
        }
        if (many <= 0) return;
        const typename Rule::Segment segment = Rule::of(state, given, p, s, column);
#pragma unroll 2
        for (int at = rank; at < many; at += step) {
          image.store(first + at * rows.row_bytes,
                      row_values<Rule, T, kVector>(segment, row_at(at)));
        }
      },
      [](int, int, int, int) {});
  __syncthreads();

  const int begin = rows.begins_before ? rows.end_of(0) : 0;
  const int stop = rows.in_problem(rows.end_count) ? rows.begin_of(rows.end_count) : rows.row_count;
  rows.store<T>(image, p.d_x.data, rows.skew + begin * rows.row_bytes,
                rows.skew + stop * rows.row_bytes);
}

// Rows of segments that reach over the borders of tiles. A block looks at some tiles.
template <template <class, int> class RuleOf, class T, int kVector>
void reduce_map_border(const Params& p) {
  using Rule = RuleOf<T, kVector>;
  constexpr int kAtOnce = kVector < 8 ? 4 : 2;  // rows on their way, as registers allow
  __shared__ BorderRun runs[kBorderRuns];

  const Segments segments = make_segments(p);
  find_border_runs(p, segments, runs);

  const int lanes = 1 << p.lane_bits, groups = kThreads >> p.lane_bits;
  const int thread = threadIdx.x, group = thread >> p.lane_bits;
  const int column = (thread & (lanes - 1)) * kVector;
  if (column >= p.columns) return;
#pragma unroll 1
  for (int i = 0; i < kBorderRuns; ++i) {
    const BorderRun run = runs[i];
    if (run.begin >= run.end) continue;
    typename Rule::State state[kVector];
    const int64_t s = Tile::problem_segment(run.segment);
    Rule::read(p, s, column, state);
    const typename Rule::Segment segment =
        Rule::of(state, Rule::Given::load(p, s, column), p, s, column);
    const int64_t first = (run.begin + group) * p.columns + column, step = groups * p.columns;
    const T* x = static_cast<const T*>(p.x.data) + first;
    const T* y = static_cast<const T*>(p.y.data) + first;
    T* d_x = static_cast<T*>(p.d_x.data) + first;
#pragma unroll 1
    for (int64_t row = run.begin + group; row < run.end; row += kAtOnce * groups) {
      typename Rule::Row data[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (row + k * groups >= run.end) continue;
        data[k].piece[0] = load_once<T, kVector>(x + k * step);
        if constexpr (Rule::kInputs == 2) {
          data[k].piece[1] = load_once<T, kVector>(y + k * step);
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (row + k * groups >= run.end) continue;
        store_once(d_x + k * step, row_values<Rule, T, kVector>(segment, data[k]));
      }
      x += kAtOnce * step;
      if constexpr (Rule::kInputs == 2) y += kAtOnce * step;
      d_x += kAtOnce * step;
    }
  }
}

}  // namespace pullback::segment_cuda
