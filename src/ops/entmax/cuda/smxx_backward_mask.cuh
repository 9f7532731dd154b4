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
  using R = Real<T>;

  MaskChunk(const PieceRange<T, Weights::mask>& row, int chunk)
      : row_(row), first_piece_(chunk * (kElements / kLength)) {
    const int bytes = row.count * kLength / 8;
    const int at = chunk * (kElements / 8) + lane() * 16;
    if (at < bytes) bits_ = load_piece(row.bits + at, cache_policy<Hint::normal>());
  }

  Sums<R> collect() const {
    Sums<R> sums;
    int count = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) count += __popc(bits_.word[i]);
    if (__any_sync(kAllLanes, count > kFewBits)) {
      const uint64_t policy = cache_policy<Hint::keep>();
      for_each_piece([&](int piece, bool busy) {
        if (!busy) return;
        const uint32_t data = row_.load_slope(piece, policy);
        if (data == 0) return;
        add_piece<T, Weights::mask>(sums, data, row_.load_d_y(piece, policy), 2);
      });
    } else if (count > 0) {
      const T* d_y = row_.d_y + static_cast<int64_t>(first_piece_) * kLength + lane() * 128;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        for (uint32_t word = bits_.word[i]; word != 0; word &= word - 1) {
          sums.s_d_y += to_real(d_y[i * 32 + __ffs(static_cast<int>(word)) - 1]);
        }
      }
      sums.s = static_cast<R>(count);
    }
    return sums;
  }

  void write(R mean) const {
    const uint64_t policy = cache_policy<Hint::drop>();
    for_each_piece([&](int piece, bool busy) {
      Piece d_x{};
      const uint32_t data = busy ? row_.load_slope(piece, policy) : 0;
      if (data != 0) {
        d_x = gradient_piece<T, Weights::mask>(data, row_.load_d_y(piece, policy), mean, 2);
      }
      row_.store(piece, d_x, policy);
    });
  }

 private:
  static constexpr int kLength = kVectorLength<T>;
  static constexpr int kFewBits = 4;

  static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

  // Calls body(piece, busy) for the lane's pieces, 32 neighbours at a time over the warp; busy is
  // false for all of them when none of their bits is set.
  template <class Body>
  void for_each_piece(const Body& body) const {
    const uint32_t low = __ballot_sync(kAllLanes, (bits_.word[0] | bits_.word[1]) != 0);
    const uint32_t high = __ballot_sync(kAllLanes, (bits_.word[2] | bits_.word[3]) != 0);
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
      if (piece < row_.count) body(piece, busy);
    }
  }

  const PieceRange<T, Weights::mask>& row_;
  int first_piece_;
  Piece bits_{};
};

template <class T, bool kWarpRow>
void backward_mask(const BackwardParams& p) {
  using R = Real<T>;
  using Chunk = MaskChunk<T>;
  __shared__ Sums<R> scratch[kWarpSize];
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int warps = kWarpRow ? 1 : static_cast<int>(blockDim.x) / kWarpSize;
  int64_t task = static_cast<int64_t>(blockIdx.x);
  if constexpr (kWarpRow) {
    task = task * kWarpRows + warp;
    if (task >= p.rows.count) return;
  }
  const RowPlace place = place_of<T, Weights::mask>(p, task);
  const PieceRow<T, Weights::mask> row(p, place);
  if (place.nan) {
    constexpr int kThreads = kWarpSize;
    return kWarpRow ? fill_nan(row, threadIdx.x % kThreads, kThreads)
                    : fill_nan(row, threadIdx.x, blockDim.x);
  }
  const PieceRange<T, Weights::mask> range(row, 0, row.pieces);
  const auto chunks = static_cast<int>((p.rows.length + Chunk::kElements - 1) / Chunk::kElements);
  const int first = kWarpRow ? 0 : warp;

  CompensatedSum<R> s, s_d_y;
  for (int chunk = first; chunk < chunks; chunk += warps) {
    const Sums<R> sums = Chunk(range, chunk).collect();
    s.add(sums.s);
    s_d_y.add(sums.s_d_y);
  }
  Sums<R> sums{s.total(), s_d_y.total()};
  if constexpr (kWarpRow) {
    sums = {warp_sum(sums.s), warp_sum(sums.s_d_y)};
  } else {
    sums = block_sum(sums, scratch);
  }
  const R mean = sums.s_d_y / sums.s;
  for (int chunk = first; chunk < chunks; chunk += warps) Chunk(range, chunk).write(mean);
}

}  // namespace pullback::entmax
