// What each row gets from its segment: the gradients, and softmax itself. A map says what it reads
// of a segment (Raw), what that comes to once for all rows (Segment), what it reads of a row, and
// the value to store.
#pragma once

#include "ops/segment/cuda/smxx_ops.cuh"

namespace pullback::segment_cuda {

// Where a row is: its place in the sorted order, counted from the tile's origin, and its number.
struct RowAt {
  uint32_t place;
  int64_t row;
};

template <bool kFirst, class A, class B>
struct Either {
  using Type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using Type = B;
};
template <bool kFirst, class A, class B>
using Select = typename Either<kFirst, A, B>::Type;

template <class T, int kCount>
Values<T, kCount> load_columns(const Matrix& from, int64_t row, int64_t column) {
  const int64_t step = kCount > 1 ? 1 : from.column_stride;
  return load_once<T, kCount>(static_cast<const T*>(from.data) + row * from.row_stride +
                              column * step);
}

// The values that `value(i)` gives.
template <class T, int kCount, class Value>
Values<T, kCount> values_of(const Value& value) {
  Real<T> values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = value(i);
  return Values<T, kCount>::of(values);
}

// Where what is read of a segment of the problem lies, from `column` on.
struct RowInputs {
  const Params& p;
  const Segments& segments;
  int64_t j, column;
  template <class V>
  void d_out(V& values) const {
    read(values, p.d_out);
  }
  template <class V>
  void arg(V& values) const {
    read(values, p.arg);
  }
  template <class V>
  void out(V& values) const {
    read(values, p.out);
  }
  template <class V>
  void statistic(V& values) const {
    read(values, p.statistic);
  }
  template <class V>
  void statistic2(V& values) const {
    read(values, p.statistic2);
  }
  void begin(int64_t& row) const { row = segments.begin(j); }
  void length(int64_t& rows) const { rows = segments.length(j); }

 private:
  template <class T, int kCount>
  void read(Values<T, kCount>& values, const Matrix& from) const {
    values = load_row<T, kCount>(from, Tile::problem_segment(j), column);
  }
};

struct NoRow {
  void load(const Params&, int64_t, int64_t) {}
};

// sum, mean: d_x = d_out, or d_out / L.
template <class T, int kCount, bool kMean>
struct Spread {
  static constexpr int kBatch = 4;
  struct Raw {
    Values<T, kCount> g;
    int64_t length;
    template <class From>
    void load(const From& from) {
      from.d_out(g);
      if (kMean) from.length(length);
    }
  };
  struct Segment {
    Values<T, kCount> value;
  };
  using Row = NoRow;
  static Segment of(const Raw& raw, const Tile&) {
    if constexpr (!kMean) return {raw.g};
    const ByLength<T> divided(raw.length);
    return {values_of<T, kCount>([&](int i) { return divided(raw.g.real(i)); })};
  }
  static Values<T, kCount> values(const Segment& segment, const Row&, const RowAt&) {
    return segment.value;
  }
};

// max, min from arg, which holds rows, or (u8) places in the segment.
template <class T, int kCount, class Arg, bool kPermuted>
struct ByArg {
  static constexpr int kBatch = 2;
  static constexpr uint32_t kNone = 0xffffffffu;
  static constexpr bool kByRow = kPermuted && sizeof(Arg) > 1;
  using Chosen = Select<kByRow, Arg, uint32_t>;
  struct Raw {
    Values<T, kCount> g;
    Values<Arg, kCount> arg;
    int64_t begin;
    template <class From>
    void load(const From& from) {
      from.d_out(g);
      from.arg(arg);
      if (sizeof(Arg) == 1) from.begin(begin);
    }
  };
  struct Segment {
    Values<T, kCount> g;
    Chosen chosen[kCount];
  };
  using Row = NoRow;
  static Segment of(const Raw& raw, const Tile& tile) {
    Segment segment{raw.g, {}};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kByRow) {
        segment.chosen[i] = raw.arg.element[i];
      } else {
        const auto arg = static_cast<int64_t>(raw.arg.element[i]);
        const bool none = sizeof(Arg) == 1 && arg == kNoPlace;
        const auto place =
            static_cast<uint64_t>((sizeof(Arg) == 1 ? raw.begin : 0) + arg - tile.origin);
        segment.chosen[i] = none || place >= kNone ? kNone : static_cast<uint32_t>(place);
      }
    }
    return segment;
  }
  static Values<T, kCount> values(const Segment& segment, const Row&, const RowAt& at) {
    return values_of<T, kCount>([&](int i) {
      bool chosen = false;
      if constexpr (kByRow) {
        chosen = segment.chosen[i] == static_cast<Arg>(at.row);
      } else {
        chosen = segment.chosen[i] == at.place;
      }
      return chosen ? segment.g.real(i) : 0;
    });
  }
};

// max, min from the mask, and a share of d_out where ties are even.
template <class T, int kCount, bool kEven>
struct ByMask {
  static constexpr int kBatch = 4;
  struct Raw {
    Values<T, kCount> g;
    Values<Real<T>, kCount> count;
    template <class From>
    void load(const From& from) {
      from.d_out(g);
      if (kEven) from.statistic(count);
    }
  };
  struct Segment {
    Values<T, kCount> g;
  };
  struct Row {
    uint32_t bits;
    void load(const Params& p, int64_t n, int64_t column) {
      const auto* mask = static_cast<const uint8_t*>(p.mask.data);
      bits = mask[n * p.mask.row_stride + column / 8 * p.mask.column_stride] >> (column % 8);
    }
  };
  static Segment of(const Raw& raw, const Tile&) {
    if constexpr (!kEven) return {raw.g};
    return {values_of<T, kCount>([&](int i) { return raw.g.real(i) / raw.count.real(i); })};
  }
  static Values<T, kCount> values(const Segment& segment, const Row& row, const RowAt&) {
    return values_of<T, kCount>([&](int i) { return row.bits >> i & 1 ? segment.g.real(i) : 0; });
  }
};

// max, min with even ties, from x and out and the number of ties.
template <class T, int kCount>
struct ByTies {
  static constexpr int kBatch = 2;
  struct Raw {
    Values<T, kCount> g, top;
    Values<Real<T>, kCount> count;
    template <class From>
    void load(const From& from) {
      from.d_out(g);
      from.out(top);
      from.statistic(count);
    }
  };
  struct Segment {
    Values<T, kCount> share, top;
  };
  struct Row {
    Values<T, kCount> x;
    void load(const Params& p, int64_t n, int64_t column) {
      x = load_columns<T, kCount>(p.x, n, column);
    }
  };
  static Segment of(const Raw& raw, const Tile&) {
    return {values_of<T, kCount>([&](int i) { return raw.g.real(i) / raw.count.real(i); }),
            raw.top};
  }
  static Values<T, kCount> values(const Segment& segment, const Row& row, const RowAt&) {
    return values_of<T, kCount>([&](int i) {
      return tied(row.x.real(i), segment.top.real(i)) ? segment.share.real(i) : 0;
    });
  }
};

// Of one column the mask of all ties, from x and out.
template <class T>
struct TieMask {
  struct Raw {
    Values<T, 1> top;
    template <class From>
    void load(const From& from) {
      from.out(top);
    }
  };
  struct Segment {
    Values<T, 1> top;
  };
  struct Row {
    Values<T, 1> x;
  };
  static Segment of(const Raw& raw, const Tile&) { return {raw.top}; }
  static Values<uint8_t, 1> values(const Segment& segment, const Row& row, const RowAt&) {
    return {{static_cast<uint8_t>(tied(row.x.real(0), segment.top.real(0)))}};
  }
};

// logsumexp: d_x = d_out exp(x - lse).
template <class T, int kCount>
struct ByExponential {
  static constexpr int kBatch = 2;
  struct Raw {
    Values<T, kCount> g;
    Values<Real<T>, kCount> lse;
    template <class From>
    void load(const From& from) {
      from.d_out(g);
      from.statistic(lse);
    }
  };
  struct Segment {
    Values<T, kCount> g;
    Values<Real<T>, kCount> lse;
  };
  struct Row {
    Values<T, kCount> x;
    void load(const Params& p, int64_t n, int64_t column) {
      x = load_columns<T, kCount>(p.x, n, column);
    }
  };
  static Segment of(const Raw& raw, const Tile&) {
    Segment segment{raw.g, raw.lse};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Real<T>& lse = segment.lse.element[i];
      lse = lse == -device::infinity<Real<T>>() ? 0 : lse;  // all rows are -inf: no gradient
    }
    return segment;
  }
  static Values<T, kCount> values(const Segment& segment, const Row& row, const RowAt&) {
    return values_of<T, kCount>([&](int i) {
      return segment.g.real(i) * exponential(row.x.real(i) - segment.lse.element[i]);
    });
  }
};

// softmax forward: exp(x - shift) / sum.
template <class T, int kCount>
struct Softmax {
  static constexpr int kBatch = 2;
  struct Raw {
    Values<Real<T>, kCount> shift, sum;
    template <class From>
    void load(const From& from) {
      from.statistic(shift);
      from.statistic2(sum);
    }
  };
  struct Segment {
    SoftmaxPower<Real<T>> power[kCount];
  };
  struct Row {
    Values<T, kCount> x;
    void load(const Params& p, int64_t n, int64_t column) {
      x = load_columns<T, kCount>(p.x, n, column);
    }
  };
  static Segment of(const Raw& raw, const Tile&) {
    Segment segment;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      segment.power[i] = SoftmaxPower<Real<T>>::of(raw.shift.element[i], raw.sum.element[i]);
    }
    return segment;
  }
  static Values<T, kCount> values(const Segment& segment, const Row& row, const RowAt&) {
    return values_of<T, kCount>([&](int i) { return segment.power[i].value(row.x.real(i)); });
  }
};

// softmax backward: d_x = out (d_out - sum of out d_out).
template <class T, int kCount>
struct SoftmaxGradient {
  static constexpr int kBatch = 2;
  struct Raw {
    Values<Real<T>, kCount> dot;
    template <class From>
    void load(const From& from) {
      from.statistic(dot);
    }
  };
  struct Segment {
    Values<Real<T>, kCount> dot;
  };
  struct Row {
    Values<T, kCount> x, y;
    void load(const Params& p, int64_t n, int64_t column) {
      x = load_columns<T, kCount>(p.x, n, column);
      y = load_columns<T, kCount>(p.y, n, column);
    }
  };
  static Segment of(const Raw& raw, const Tile&) { return {raw.dot}; }
  static Values<T, kCount> values(const Segment& segment, const Row& row, const RowAt&) {
    return values_of<T, kCount>(
        [&](int i) { return row.x.real(i) * (row.y.real(i) - segment.dot.element[i]); });
  }
};

}  // namespace pullback::segment_cuda
