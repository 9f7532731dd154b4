// d_x of sparsemax from the support mask, where most of a row has no support: it moves V bits and
// writes d_x. With n bits set: d_x = bit (d_y - <bits, d_y> / n).
// A warp or a block takes a row, a warp at a time a chunk of it: 16 bytes of the mask a lane. Where
// a chunk has few bits, their lanes read single elements of d_y. Then d_x is written 32 pieces at a
// time, zeros at once where the mask has none of them. Rows and their masks begin on 16 bytes.
#pragma once

#include "ops/entmax/cuda/backward_slice.cuh"
#include "ops/entmax/cuda/backward_tuning.cuh"

namespace pullback::entmax {

template <class T>
class MaskChunk {
 public:
  static constexpr int kElements = 8 * 16 * kWarpSize;
  static constexpr int kFewBits = 4;
  static constexpr int kTakenBits = 10;  // by take(): sparsemax leaves 10 of 512 at sigma 0.3
  using R = Real<T>;

  MaskChunk(const PieceRange<T, Weights::mask>& row, int chunk)
      : row_(row), first_piece_(chunk * (kElements / kLength)) {
    const int bytes = row.count * kLength / 8;
    const int at = chunk * (kElements / 8) + lane() * 16;
    if (at < bytes) bits_ = Keep().load(row.bits + at);
  }

  // Over the warp, pieces of a lane are spread over the chunk: the sums of one row.
  Sums<R> collect() const {
    Sums<R> sums;
    const int count = bits_of_lane();
    if (!__any_sync(kAllLanes, count > kFewBits)) return collect_bits(count);
    const Keep keep;
    for_each_piece([&](int piece, bool inside, bool busy) {
      if (!inside || !busy) return;
      const SlopePiece<T, Weights::mask> slopes = row_.load_slope(piece, keep);
      if (!slopes.any()) return;
      add_piece<T>(sums, slopes, row_.load_d_y(piece, keep), 2);
    });
    return sums;
  }

  // Of the lane's own 128 elements.
  Sums<R> collect_of_lane() const {
    Sums<R> sums;
    const int count = bits_of_lane();
    if (count <= kFewBits) return collect_bits(count);
    const Keep keep;
    const int first = first_piece_ + lane() * (128 / kLength);
#pragma unroll 1
    for (int piece = first; piece < first + 128 / kLength && piece < row_.count; ++piece) {
      const SlopePiece<T, Weights::mask> slopes = row_.load_slope(piece, keep);
      if (!slopes.any()) continue;
      add_piece<T>(sums, slopes, row_.load_d_y(piece, keep), 2);
    }
    return sums;
  }

  // Whether the lanes have so few bits that take() holds all their elements of d_y.
  bool can_take() const { return !__any_sync(kAllLanes, bits_of_lane() > kTakenBits); }

  // What a lane with few bits takes from d_y, to write it when zeros are everywhere else.
  struct Taken {
    int count;
    int at[kTakenBits];  // in the range
    T d_y[kTakenBits];   // 0 from `count` on
  };
  // All loads are under way before the first is waited for, by lanes that do not part.
  Taken take() const {
    Taken taken{bits_of_lane(), {}, {}};
    Piece left = bits_;
#pragma unroll
    for (int k = 0; k < kTakenBits; ++k) {
      int word = 3;
#pragma unroll
      for (int i = 2; i >= 0; --i) word = left.element[i] != 0 ? i : word;
      int bit = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i != word) continue;
        bit = __ffs(static_cast<int>(left.element[i])) - 1;
        left.element[i] &= left.element[i] - 1;
      }
      taken.at[k] = first_piece_ * kLength + lane() * 128 + word * 32 + bit;
      taken.d_y[k] = T{load_below(row_.d_y + taken.at[k], k, taken.count)};
    }
    return taken;
  }
  void write(const Taken& taken, R mean) const {
    // Until here other lanes may have read d_y, which may be d_x's memory.
    __syncwarp();
    for_each_piece([&](int piece, bool inside, bool) {
      if (inside) row_.store(piece, {});
    });
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kTakenBits; ++k) {
      if (k < taken.count) row_.d_x[taken.at[k]] = from_real<T>(to_real(taken.d_y[k]) - mean);
    }
  }

  // mean_of and nan_of: of the row that holds an element of the chunk, called by whole warps. A row
  // is NaN everywhere where nan_of says so.
  template <class MeanOf, class NanOf>
  void write(const MeanOf& mean_of, const NanOf& nan_of) const {
    for_each_piece([&](int piece, bool inside, bool busy) {
      Piece d_x{};
      const int element = (piece - first_piece_) * kLength;
      const R mean = busy ? mean_of(element) : R{0};
      if (nan_of(element)) {
        Real<T> values[kLength];
#pragma unroll
        for (int e = 0; e < kLength; ++e) values[e] = quiet_nan<Real<T>>();
        d_x = packed(values, T{});
      } else if (busy && inside) {
        const SlopePiece<T, Weights::mask> slopes = row_.load_slope(piece, Drop());
        if (slopes.any()) {
          d_x = gradient_piece<T>(slopes, row_.load_d_y(piece, Drop()), mean, 2);
        }
      }
      if (inside) row_.store(piece, d_x);
    });
  }

 private:
  static constexpr int kLength = kVectorLength<T>;

  static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

  int bits_of_lane() const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) count += __popc(bits_.element[i]);
    return count;
  }

  Sums<R> collect_bits(int count) const {
    Sums<R> sums;
    sums.s = static_cast<R>(count);
    if (count == 0) return sums;
    const T* d_y = row_.d_y + static_cast<int64_t>(first_piece_) * kLength + lane() * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll 1
      for (uint32_t word = bits_.element[i]; word != 0; word &= word - 1) {
        sums.s_d_y += to_real(d_y[i * 32 + __ffs(static_cast<int>(word)) - 1]);
      }
    }
    return sums;
  }

  // Calls body(piece, inside, busy) on all lanes, for 32 neighbouring pieces at a time; busy is the
  // same on all: whether one of their bits is set.
  template <class Body>
  void for_each_piece(const Body& body) const {
    const uint32_t low = __ballot_sync(kAllLanes, (bits_.element[0] | bits_.element[1]) != 0);
    const uint32_t high = __ballot_sync(kAllLanes, (bits_.element[2] | bits_.element[3]) != 0);
    constexpr int kSets = kElements / (kLength * kWarpSize);
#pragma unroll 4
    for (int set = 0; set < kSets; ++set) {
      const int piece = first_piece_ + set * kWarpSize + lane();
      if (piece - lane() >= row_.count) break;
      bool busy;
      if constexpr (kLength == 2) {
        busy = (set % 2 == 0 ? low : high) >> (set / 2) & 1;
      } else if constexpr (kLength == 4) {
        busy = (low | high) >> set & 1;
      } else {
        busy = (low | high) >> (2 * set) & 3;
      }
      body(piece, piece < row_.count, busy);
    }
  }

  const PieceRange<T, Weights::mask>& row_;
  int first_piece_;
  Piece bits_{};
};

// A block a row.
template <class T>
void backward_mask_block(const BackwardParams& p) {
  using R = Real<T>;
  using Chunk = MaskChunk<T>;
  __shared__ Sums<R> scratch[kWarpSize];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  const RowPlace place = place_of<T, Weights::mask>(p, static_cast<int64_t>(blockIdx.x));
  const PieceRow<T, Weights::mask> row(p, place);
  const PieceRange<T, Weights::mask> range(row, 0, row.pieces);
  const auto chunks = static_cast<int>((p.rows.length + Chunk::kElements - 1) / Chunk::kElements);

  CompensatedSum<R> s, s_d_y;
  for (int chunk = warp; chunk < chunks; chunk += warps) {
    const Sums<R> sums = Chunk(range, chunk).collect();
    s.add(sums.s);
    s_d_y.add(sums.s_d_y);
  }
  const Sums<R> sums = block_sum({s.total(), s_d_y.total()}, scratch);
  const R mean = sums.s_d_y / sums.s;
  for (int chunk = warp; chunk < chunks; chunk += warps) {
    Chunk(range, chunk).write([&](int) { return mean; }, [&](int) { return place.nan; });
  }
}

// A warp a chunk, which is 4096 / V rows.
template <class T>
void backward_mask_rows(const BackwardParams& p) {
  using R = Real<T>;
  using Chunk = MaskChunk<T>;
  const auto length = static_cast<int>(p.rows.length);
  const int rows_of_chunk = Chunk::kElements / length, lanes_of_row = kWarpSize / rows_of_chunk;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t warp =
      static_cast<int64_t>(blockIdx.x) * kWarpRows + static_cast<int>(threadIdx.x) / kWarpSize;
  const int64_t first = warp * rows_of_chunk;
  if (first >= p.rows.count) return;
  RowPlace place{first, 0, 0, length, 2, false};
  const int64_t left = p.rows.count - first;
  const int64_t rows_here = left < rows_of_chunk ? left : rows_of_chunk;
  const PieceRow<T, Weights::mask> row(p, place);
  const PieceRange<T, Weights::mask> range(row, 0, static_cast<int>(rows_here) * row.pieces);
  const Chunk chunk(range, 0);
  bool nan = false;
  if (const int64_t of_lane = lane / lanes_of_row; of_lane < rows_here) {
    const auto* sizes = static_cast<const int32_t*>(p.support_size.data);
    nan = sizes[row_offset(p.rows, p.support_size, first + of_lane)] < 0;
  }

  const uint32_t nans = __ballot_sync(kAllLanes, nan);
  const auto mean_of_row = [&](Sums<R> sums) {
    for (int step = lanes_of_row / 2; step > 0; step /= 2) {
      sums.s += __shfl_xor_sync(kAllLanes, sums.s, step);
      sums.s_d_y += __shfl_xor_sync(kAllLanes, sums.s_d_y, step);
    }
    return sums.s_d_y / sums.s;
  };
  // Where pieces of 16 bytes hold eight elements and chunks several rows, most pieces near a bit
  // are looked at in vain.
  if constexpr (sizeof(T) == 2) {
    if (rows_of_chunk > 1 && nans == 0 && chunk.can_take()) {
      const typename Chunk::Taken taken = chunk.take();
      Sums<R> sums;
      sums.s = static_cast<R>(taken.count);
#pragma unroll
      for (int k = 0; k < Chunk::kTakenBits; ++k) sums.s_d_y += to_real(taken.d_y[k]);
      return chunk.write(taken, mean_of_row(sums));
    }
  }
  const R mean = mean_of_row(chunk.collect_of_lane());
  chunk.write([&](int element) { return __shfl_sync(kAllLanes, mean, element / 128); },
              [&](int element) { return nans >> (element / 128) & 1; });
}

}  // namespace pullback::entmax
