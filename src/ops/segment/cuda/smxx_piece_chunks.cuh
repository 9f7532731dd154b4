// Chunks (smxx_chunks.cuh) of contiguous rows of 2^lane_bits pieces of 16 bytes. A group of as many
// lanes has kNarrowLaneRows consecutive rows of a chunk, each lane its own piece of them.
#pragma once

#include "ops/segment/cuda/smxx_chunks.cuh"

namespace pullback::segment_cuda {

template <class T>
inline constexpr int kPieceColumns = 16 / static_cast<int>(sizeof(T));

// A lane's pieces of its rows.
template <class T>
struct PieceRows {
  Values<T, kPieceColumns<T>> piece[kNarrowLaneRows];
};

// A lane among those of its warp.
struct LaneGroup {
  int lane_bits;
  int number, piece;  // of the group, and of the piece of each row that the lane has

  explicit LaneGroup(int lane_bits_) : lane_bits(lane_bits_) {
    const int lane = threadIdx.x % device::kWarpSize;
    number = lane >> lane_bits;
    piece = lane & (lanes() - 1);
  }
  int lanes() const { return 1 << lane_bits; }
  int groups() const { return device::kWarpSize >> lane_bits; }
  int rows() const { return groups() * kNarrowLaneRows; }  // of a chunk
  int first_row() const { return number * kNarrowLaneRows; }

  // Where the lane's piece of a row of the chunk lies in shared memory: in the order of rows, but
  // exchanged among the 8 of 128 bytes, so that lanes of different groups are in different banks.
  static_assert(kNarrowLaneRows == 8);
  uint32_t place(uint32_t row) const {
    const uint32_t in_order = (row << lane_bits) + piece;
    return (in_order ^ ((row / kNarrowLaneRows << lane_bits) & 7)) * 16;
  }
  // The same of the lane's i-th row, where `first` is that of its first one.
  uint32_t place_from(uint32_t first, uint32_t i) const { return first ^ (i << (lane_bits + 4)); }
};

// The chunks of a warp on their way to shared memory.
template <class T, int kSlots>
struct PieceRing {
  static constexpr uint32_t kSlotBytes = kNarrowPlaneBytes;

  const char* next;  // the first piece that the lane asks for of the next chunk
  int rows;          // of the tensor, from that one's on
  int step_rows;     // from it to the next one of the chunk
  int chunk_rows;
  uint32_t slots;      // in shared memory
  uint32_t to, odd;    // where that piece goes in a slot; what differs for every other one
  uint32_t asked = 0;  // slots

  // The tensor has so many rows from `from` on. The slots are at `shared`.
  PieceRing(const void* shared, const LaneGroup& group, const void* from, int rows_) {
    slots = kept(shared_address(shared));
    next = static_cast<const char*>(from) + threadIdx.x % device::kWarpSize * 16;
    rows = rows_ - group.number;
    step_rows = group.groups();
    chunk_rows = group.rows();
    to = group.place(group.number);
    odd = group.lanes() < 8 ? 64 : 0;
  }
  // The slot of the oldest chunk that has been asked for, which is the next to be asked for, too.
  uint32_t slot() const { return slots + asked % kSlots * kSlotBytes; }
  // Of one chunk after the other, those of the share.
  void request(bool any) {
    const uint32_t at[2] = {slot() + to, (slot() + to) ^ odd};
    if (any && rows >= chunk_rows) {
#pragma unroll
      for (int k = 0; k < kNarrowLaneRows; ++k) {
        async_copy<16>(at[k % 2] + k * kStepBytes, next + k * kStepBytes);
      }
    } else if (any) {
#pragma unroll 1
      for (int k = 0; k < kNarrowLaneRows; ++k) {
        device::async_copy_or_zero((k % 2 == 0 ? at[0] : at[1]) + k * kStepBytes,
                                   next + k * kStepBytes, k * step_rows < rows);
      }
    }
    async_commit();
    ++asked;
    next += kNarrowLaneRows * kStepBytes;
    rows -= chunk_rows;
  }
  // This lane's rows of the oldest chunk.
  void take(PieceRows<T>& result, const LaneGroup& group) const {
    async_wait<kSlots - 1>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kNarrowLaneRows; ++i) result.piece[i] = row(group, i);
    __syncwarp();
  }
  // The i-th of them.
  Values<T, kPieceColumns<T>> row(const LaneGroup& group, int i) const {
    const uint32_t first = slot() + group.place(group.first_row());
    return load_shared<Values<T, kPieceColumns<T>>>(group.place_from(first, i));
  }

 private:
  static constexpr int kStepBytes = 16 * device::kWarpSize;
};

// Rows of a chunk that are marked: a byte of shared memory for each, and bits of the words of the
// lanes that have the row.
struct GroupMarks {
  uint32_t word[device::kWarpSize * kNarrowLaneRows / 4];

  void set(uint32_t row) { reinterpret_cast<uint8_t*>(word)[row] = 1; }
  // The lane's, cleared for the next chunk.
  LaneMarks take(const LaneGroup& group) {
    constexpr int kWords = kNarrowLaneRows / 4;
    uint32_t* const own = word + group.number * kWords;
    LaneMarks marks;
#pragma unroll
    for (int k = 0; k < kWords; ++k) marks.bits += bits_of_bytes(own[k]) << 4 * k;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      if (group.piece == 0) own[k] = 0;
    }
    return marks;
  }
};

}  // namespace pullback::segment_cuda
