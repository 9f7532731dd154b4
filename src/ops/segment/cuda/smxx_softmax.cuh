// softmax of contiguous rows, and its gradient, for which x (backward: y and d_y) is read once
// where segments lie within a tile.
//
// A block copies the rows of its tile to shared memory as they lie. A lane takes a few columns of a
// short segment, walks its rows once for their state and again to put what they give in their
// place; the lanes of a warp share the rows of a longer one. Then the block stores the tile.
// Segments that reach over the tile's borders are only reduced, to the tile's two slots:
// smxx_combine.cuh puts these together, and softmax_border() reads such rows again.
#pragma once

#include "ops/segment/cuda/smxx_ops.cuh"
#include "ops/segment/cuda/softmax_tuning.cuh"

namespace pullback::segment_cuda {

// A lane's columns of a row of each input.
template <class T, int kVector, int kInputs>
struct SoftmaxRow {
  Values<T, kVector> piece[kInputs];
};

// exp(x - shift) / sum.
template <class T, int kVector>
struct SoftmaxForward {
  using R = Real<T>;
  using Op = SoftmaxSum<R>;
  using State = typename Op::State;
  static constexpr int kInputs = 1;
  using Row = SoftmaxRow<T, kVector, kInputs>;
  struct Segment {
    R shift[kVector], inverse[kVector];
  };

  // What enters the state, and what changes nothing there.
  static R entry(const Row& row, int i) { return row.piece[0].real(i); }
  static R nothing() { return -device::infinity<R>(); }
  static Segment of(const State (&state)[kVector]) {
    Segment segment;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const R shift = state[i].shift, infinity = device::infinity<R>();
      // Of nothing but -inf, x - 0 gives 0, and NaN where the sum is NaN.
      segment.shift[i] = shift == -infinity ? 0 : shift;
      segment.inverse[i] = shift == infinity ? device::quiet_nan<R>() : R{1} / state[i].sum;
    }
    return segment;
  }
  static R value(const Segment& segment, const Row& row, int i) {
    return exponential(row.piece[0].real(i) - segment.shift[i]) * segment.inverse[i];
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
  using Row = SoftmaxRow<T, kVector, kInputs>;
  struct Segment {
    R dot[kVector];
  };

  static R entry(const Row& row, int i) { return row.piece[0].real(i) * row.piece[1].real(i); }
  static R nothing() { return 0; }
  static Segment of(const State (&state)[kVector]) {
    Segment segment;
#pragma unroll
    for (int i = 0; i < kVector; ++i) segment.dot[i] = state[i].sum;
    return segment;
  }
  static R value(const Segment& segment, const Row& row, int i) {
    return row.piece[0].real(i) * (row.piece[1].real(i) - segment.dot[i]);
  }
  static void read(const Params& p, int64_t s, int64_t column, State (&state)[kVector]) {
    const auto dot = load_row<R, kVector>(p.result, s, column);
#pragma unroll
    for (int i = 0; i < kVector; ++i) state[i] = {dot.element[i]};
  }
};

// What every row of a segment gives, from the values of the rows.
template <class Rule, class T, int kVector>
Values<T, kVector> softmax_values(const typename Rule::Segment& segment,
                                  const typename Rule::Row& row) {
  Real<T> values[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = Rule::value(segment, row, i);
  return Values<T, kVector>::of(values);
}

// The bytes of a tile's rows in shared memory. Pieces of 16 are exchanged so that those 128 bytes
// apart, as lanes read them where segments are of equal lengths, are in different banks.
struct RowImage {
  unsigned char* bytes;

  static uint32_t turned(uint32_t at) { return at ^ (at >> 3 & 0x70); }
  template <class V>
  V load(uint32_t at) const {
    const unsigned char* from = bytes + turned(at);
    if constexpr (sizeof(V) >= 4) {
      return load_shared<V>(shared_address(from));
    } else {
      return *reinterpret_cast<const V*>(from);
    }
  }
  template <class V>
  void store(uint32_t at, const V& values) const {
    unsigned char* to = bytes + turned(at);
    if constexpr (sizeof(V) == 16) {
      struct alignas(16) Words {
        uint32_t word[4];
      };
      union {
        V values;
        Words words;
      } piece = {values};
      *reinterpret_cast<Words*>(to) = piece.words;
    } else if constexpr (kIsWord<V>) {
      const PieceWord<V> piece = {values};
      *reinterpret_cast<decltype(PieceWord<V>::word)*>(to) = piece.word;
    } else {
      *reinterpret_cast<V*>(to) = values;
    }
  }
};

template <template <class, int> class RuleOf, class T, int kVector>
void softmax_tile(const Params& p) {
  using Rule = RuleOf<T, kVector>;
  using Op = typename Rule::Op;
  using State = typename Rule::State;
  using Row = typename Rule::Row;
  using Piece = Values<T, kVector>;
  using R = Real<T>;
  constexpr int kInputs = Rule::kInputs;
  constexpr int kAtOnce = softmax_at_once(kInputs * kVector);
  constexpr int kWarps = kThreads / device::kWarpSize;
  constexpr int kPieceBytes = 16, kStep = kThreads * kPieceBytes;
  __shared__ uint16_t longs[kSoftmaxLongs];  // segments for whole warps, in no order
  __shared__ int long_count;
  extern __shared__ __align__(128) unsigned char memory[];

  device::allow_next_kernel();
  const Segments segments = make_segments(p);
  const Tile tile = make_tile(p, blockIdx.x);
  const int thread = threadIdx.x, columns = static_cast<int>(p.columns);
  const int items = static_cast<int>(p.tile_items);
  const int most_rows = items + p.snap_rows, row_bytes = columns * static_cast<int>(sizeof(T));
  const int rows = static_cast<int>(clamped(tile.row_stop - tile.row, 0, most_rows));
  const int count = static_cast<int>(clamped(tile.stop - tile.first, 0, softmax_ends(items)));
  const int image_bytes = softmax_image_bytes(most_rows, row_bytes);
  const RowImage image{memory};
  // Where the tile's segments end, after its first row.
  uint16_t* const ends = reinterpret_cast<uint16_t*>(memory + kInputs * image_bytes);

  // From the last multiple of 16 bytes on; rows begin `skew` bytes behind it.
  const int64_t first_byte = tile.row * row_bytes & -kPieceBytes;
  const int skew = static_cast<int>(tile.row * row_bytes - first_byte);
  const int64_t bytes_left = p.rows * row_bytes - first_byte;
#pragma unroll
  for (int input = 0; input < kInputs; ++input) {
    const auto* from = static_cast<const char*>(input == 0 ? p.x.data : p.y.data) + first_byte;
    const uint32_t to = shared_address(memory + input * image_bytes);
#pragma unroll 4
    for (int at = thread * kPieceBytes; at < skew + rows * row_bytes; at += kStep) {
      const uint32_t place = to + RowImage::turned(at);
      if (bytes_left - at >= kPieceBytes) {
        async_copy<kPieceBytes>(place, from + at);
      } else {
        device::async_copy_padded(place, from + at, static_cast<int>(bytes_left - at));
      }
    }
  }
  async_commit();
  for (int k = thread; k < count; k += kThreads) {
    ends[k] = static_cast<uint16_t>(clamped(segments.end(tile.first + k) - tile.row, 0, rows));
  }
  const auto in_problem = [&](int64_t j) { return j >= 1 && j <= p.segments; };
  const bool begins_before =
      count > 0 && in_problem(tile.first) && segments.begin(tile.first) < tile.row;
  if (thread == 0) long_count = 0;
  async_wait<0>();
  __syncthreads();

  // Of the tile's segments. Number `count` is the one that goes on behind the tile.
  const auto begin_of = [&](int k) { return k > 0 ? ends[k - 1] : 0; };
  const auto end_of = [&](int k) { return k < count ? ends[k] : rows; };
  // For some columns of segment k, and of its rows from the `rank`-th on every `step`-th one; the
  // lanes `lanes` apart, up to a warp's, have the others where step > 1.
  const auto serve = [&](int k, int column, int begin, int end, int rank, int step, int lanes) {
    const uint32_t first = skew + begin * row_bytes + column * static_cast<int>(sizeof(T));
    const int many = end - begin;
    const auto row_at = [&](int at) {
      Row row;
#pragma unroll
      for (int input = 0; input < kInputs; ++input) {
        const RowImage of{memory + input * image_bytes};
        row.piece[input] = of.load<Piece>(first + at * row_bytes);
      }
      return row;
    };
    if (!in_problem(tile.first + k)) {
      for (int at = rank; at < many; at += step) image.store(first + at * row_bytes, Piece{});
      return;
    }
    State state[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) state[i] = Op::start();
    R none[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) none[i] = Rule::nothing();
    Row nothing;
#pragma unroll
    for (int input = 0; input < kInputs; ++input) nothing.piece[input] = Piece::of(none);
    if constexpr (kAims<Op>) {
      // All lanes at one row, so that their states are put together without an exponential.
      if (many > 0) {
        const Row row = row_at(0);
#pragma unroll
        for (int i = 0; i < kVector; ++i) Op::aim(state[i], Rule::entry(row, i));
      }
    }
#pragma unroll 1
    for (int at = rank; at < many; at += kAtOnce * step) {
      Row row[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        row[j] = nothing;
        if (at + j * step < many) row[j] = row_at(at + j * step);
      }
      if (add_rows<Op, R, kAtOnce>(
              state, [&](int i, int j) { return Rule::entry(row[j], i); }, 0)) {
        continue;
      }
#pragma unroll 1
      for (int j = 0; j < kAtOnce && at + j * step < many; ++j) {
        const Row row = row_at(at + j * step);
#pragma unroll
        for (int i = 0; i < kVector; ++i) Op::add(state[i], Rule::entry(row, i), 0);
      }
    }
    if (step > 1) {
#pragma unroll 1
      for (int apart = lanes; apart < device::kWarpSize; apart *= 2) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) unite<Op>(state[i], shuffle_xor(state[i], apart));
      }
    }
    const bool goes_on = k == count;
    if (goes_on || (k == 0 && begins_before)) {
      if (rank != 0 || many <= 0) return;
#pragma unroll
      for (int i = 0; i < kVector; ++i) slot_of<Op>(p, blockIdx.x, goes_on)[column + i] = state[i];
      return;
    }
    const typename Rule::Segment segment = Rule::of(state);
#pragma unroll 2
    for (int at = rank; at < many; at += step) {
      image.store(first + at * row_bytes, softmax_values<Rule, T, kVector>(segment, row_at(at)));
    }
  };

  const int pieces = columns / kVector;
  const bool shifts = pieces == 1 << p.lane_bits;  // where a division would take longer
#pragma unroll 1
  for (int item = thread; item < (count + 1) * pieces; item += kThreads) {
    const int k = shifts ? item >> p.lane_bits : item / pieces, piece = item - k * pieces;
    const int begin = begin_of(k), end = end_of(k);
    if (end - begin <= kSoftmaxAloneRows) {
      serve(k, piece * kVector, begin, end, 0, 1, 0);
    } else if (piece == 0) {
      const int at = atomicAdd(&long_count, 1);
      if (at < kSoftmaxLongs) longs[at] = static_cast<uint16_t>(k);
    }
  }
  __syncthreads();
  const int warp = thread / device::kWarpSize, lane = thread % device::kWarpSize;
  const int bits = p.lane_bits < 5 ? p.lane_bits : 5, lanes = 1 << bits;
  const int parts = (pieces + lanes - 1) / lanes;  // of a row, a warp's
#pragma unroll 1
  for (int item = warp; item < long_count * parts; item += kWarps) {
    const int k = longs[item / parts];
    const int piece = item % parts * lanes + (lane & (lanes - 1));
    const int begin = begin_of(k), end = piece < pieces ? end_of(k) : begin;
    serve(k, piece * kVector, begin, end, lane >> bits, device::kWarpSize >> bits, lanes);
  }
  __syncthreads();

  const int from = skew + (begins_before ? ends[0] : 0) * row_bytes;
  const int stop = skew + (in_problem(tile.stop) ? begin_of(count) : rows) * row_bytes;
  T* const d_x = static_cast<T*>(p.d_x.data) + first_byte / static_cast<int>(sizeof(T));
  constexpr int kElements = kPieceBytes / static_cast<int>(sizeof(T));
#pragma unroll 4
  for (int at = (from & -kPieceBytes) + thread * kPieceBytes; at < stop; at += kStep) {
    const auto values = image.load<Values<T, kElements>>(at);
    T* const to = d_x + at / static_cast<int>(sizeof(T));
    if (at >= from && at + kPieceBytes <= stop) {
      store_once(to, values);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int place = at + i * static_cast<int>(sizeof(T));
      if (place >= from && place < stop) to[i] = values.stored(i);
    }
  }
}

// Rows of segments that reach over the borders of tiles. A block looks at some tiles.
template <template <class, int> class RuleOf, class T, int kVector>
void softmax_border(const Params& p) {
  using Rule = RuleOf<T, kVector>;
  constexpr int kRuns = 2 * kSoftmaxBorderTiles;
  constexpr int kAtOnce = kVector < 8 ? 4 : 2;  // rows on their way, as registers allow
  struct Run {
    int64_t segment, begin, end;
  };
  __shared__ Run runs[kRuns];

  const Segments segments = make_segments(p);
  const int thread = threadIdx.x;
  if (thread < kRuns) {
    const int64_t number = static_cast<int64_t>(blockIdx.x) * kSoftmaxBorderTiles + thread / 2;
    const bool goes_on = thread % 2 != 0;
    Run run{};
    if (number < p.tiles) {
      const Tile tile = make_tile(p, number);
      const int64_t j = goes_on ? tile.stop : tile.first;
      if (j >= 1 && j <= p.segments && (goes_on || tile.first < tile.stop)) {
        const int64_t begin = segments.begin(j), end = segments.end(j);
        if (goes_on) {
          run = {j, begin > tile.row ? begin : tile.row, tile.row_stop};
        } else if (begin < tile.row) {
          run = {j, tile.row, end};
        }
      }
    }
    runs[thread] = run;
  }
  __syncthreads();

  const int lanes = 1 << p.lane_bits, groups = kThreads >> p.lane_bits;
  const int group = thread >> p.lane_bits, column = (thread & (lanes - 1)) * kVector;
  if (column >= p.columns) return;
#pragma unroll 1
  for (int i = 0; i < kRuns; ++i) {
    const Run run = runs[i];
    if (run.begin >= run.end) continue;
    typename Rule::State state[kVector];
    Rule::read(p, Tile::problem_segment(run.segment), column, state);
    const typename Rule::Segment segment = Rule::of(state);
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
        store_once(d_x + k * step, softmax_values<Rule, T, kVector>(segment, data[k]));
      }
      x += kAtOnce * step;
      if constexpr (Rule::kInputs == 2) y += kAtOnce * step;
      d_x += kAtOnce * step;
    }
  }
}

}  // namespace pullback::segment_cuda
