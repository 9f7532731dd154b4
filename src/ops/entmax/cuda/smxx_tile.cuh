// Tiles of many rows, for rows that are too short for a warp each, or lie across memory.
//
// Staged: rows side by side in memory, each contiguous. A block copies its piece of memory to
// shared memory and back, 16 bytes a thread; in between threads read and write their own rows
// there. Rows of an even number of words are a word apart there, so that the same element of
// neighbouring rows is in different banks.
// Not staged: neighbouring lanes take neighbouring rows, in global memory.
#pragma once

#include "device/float.cuh"
#include "device/memory.cuh"
#include "ops/entmax/cuda/smxx_group.cuh"
#include "ops/entmax/cuda/tile_params.cuh"

namespace pullback::entmax {

// Calls use(k) for k < count, a number that all threads have in common, and some beyond: for each,
// or for every fourth.
template <int kHeld, class Use>
void for_fours(int count, const Use& use) {
#pragma unroll
  for (int first = 0; first < kHeld; first += 4) {
    if (first >= count) break;
    use(first);
  }
}
template <int kHeld, class Use>
void for_held(int count, const Use& use) {
  for_fours<kHeld>(count, [&](int first) {
#pragma unroll
    for (int k = first; k < first + 4; ++k) use(k);
  });
}

// row_offset() in several tensors, by one division a dimension, of 32 bits where these do.
template <int kCount>
void row_offsets(const Rows& rows, int64_t row, const RowTensor* const (&tensors)[kCount],
                 int64_t (&offsets)[kCount]) {
  const bool narrow = rows.count <= 0xffffffff;
#pragma unroll
  for (int i = 0; i < kCount; ++i) offsets[i] = 0;
#pragma unroll 1
  for (int dim = rows.rank - 1; dim > 0; --dim) {
    const int64_t size = rows.sizes[dim];
    const int64_t rest =
        narrow ? static_cast<uint32_t>(row) / static_cast<uint32_t>(size) : row / size;
#pragma unroll
    for (int i = 0; i < kCount; ++i) offsets[i] += (row - rest * size) * tensors[i]->outer[dim];
    row = rest;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) offsets[i] += row * tensors[i]->outer[0];
}

// The threads that share a row (TileShape). kAcross: maybe of several warps, all of the block.
template <bool kAcross>
class TileGroup {
 public:
  // `scratch`: 2 * kMostValues * kTileScratch numbers, of several warps.
  TileGroup(const TileShape& shape, float* scratch)
      : columns_(shape.columns), warps_(kAcross ? shape.warps : 1), scratch_(scratch) {}

  // Which of the block's rows is this thread's, and which of the row's threads it is.
  int row() const { return (warps_ == 1 ? warp() * columns_ : 0) + column(); }
  int part() const {
    return lane_index() / columns_ + (warps_ == 1 ? 0 : warp() * (device::kWarpSize / columns_));
  }
  int parts() const { return device::kWarpSize / columns_ * warps_; }

  // A row without an answer does not keep the others waiting.
  void excuse() { excused_ = true; }
  bool all(bool done) const {
    const bool waits = !done && !excused_;
    if constexpr (kAcross) {
      if (warps_ > 1) return __syncthreads_or(waits) == 0;
    }
    return __all_sync(device::kAllLanes, !waits) != 0;
  }

  float max(float value) {
    float all[] = {value};
    reduce(all, [](int, float a, float b) { return max_or_nan(a, b); });
    return all[0];
  }
  // f32 holds the counts of these rows exactly.
  int count(int mine) {
    float all[] = {static_cast<float>(mine)};
    reduce(all, kAdd);
    return static_cast<int>(all[0]);
  }
  void sum(float& a, float& b) {
    float all[] = {a, b};
    reduce(all, kAdd);
    a = all[0];
    b = all[1];
  }
  void sum(float& a, float& b, float& c) {
    float all[] = {a, b, c};
    reduce(all, kAdd);
    a = all[0];
    b = all[1];
    c = all[2];
  }
  void sum_count_min(float& sum, int& count, float& least) {
    float all[] = {sum, static_cast<float>(count), least};
    reduce(all, [](int i, float a, float b) { return i == 2 ? min(a, b) : a + b; });
    sum = all[0];
    count = static_cast<int>(all[1]);
    least = all[2];
  }

  static constexpr int kMostValues = 3;

 private:
  static constexpr auto kAdd = [](int, float a, float b) { return a + b; };

  static int warp() { return static_cast<int>(threadIdx.x) / device::kWarpSize; }
  int column() const { return lane_index() & (columns_ - 1); }

  // combine(i, a, b): of values i.
  template <int kCount, class Combine>
  void reduce(float (&values)[kCount], const Combine& combine) {
    reduce_in_warp(values, combine);
    if constexpr (kAcross) {
      if (warps_ == 1) return;
      // Written again two exchanges later, when all warps have read it.
      float* slots = scratch_ + (exchanges_++ & 1) * (kMostValues * kTileScratch) + column();
      if (lane_index() < columns_) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) slots[i * kTileScratch + warp() * columns_] = values[i];
      }
      __syncthreads();
      // The lanes of a row share the warps among them, which are as many at least.
      int w = lane_index() / columns_;
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = slots[i * kTileScratch + w * columns_];
      for (w += device::kWarpSize / columns_; w < warps_; w += device::kWarpSize / columns_) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          values[i] = combine(i, values[i], slots[i * kTileScratch + w * columns_]);
        }
      }
      reduce_in_warp(values, combine);
    }
  }
  template <int kCount, class Combine>
  void reduce_in_warp(float (&values)[kCount], const Combine& combine) const {
#pragma unroll 1
    for (int step = device::kWarpSize / 2; step >= columns_; step /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] = combine(i, values[i], __shfl_xor_sync(device::kAllLanes, values[i], step));
      }
    }
  }

  int columns_, warps_;
  float* scratch_;
  uint32_t exchanges_ = 0;
  bool excused_ = false;
};

// A thread's elements of a row: consecutive ones where staged, else every parts()-th.
template <class T, bool kStaged>
class TileSlice {
 public:
  // `row`: its first element. `step`: from element to element, 1 where staged. Without a row the
  // length is 0.
  template <class G>
  TileSlice(T* row, int64_t step, const TileShape& shape, const G& group, int length)
      : count_(shape.held), pairs_(sizeof(T) == 2 && shape.pitch % 2 == 0) {
    const int part = group.part();
    if constexpr (kStaged) {
      at_ = row + part * count_;
      mine_ = min(length - part * count_, count_);
    } else {
      at_ = row + part * step;
      step_ = group.parts() * static_cast<int>(step);
      mine_ = part + (count_ - 1) * group.parts() < length ? count_ : count_ - 1;
      if (length == 0) mine_ = 0;
    }
  }

  int count() const { return count_; }

  template <int kHeld>
  void load(float (&to)[kHeld], float hidden) const {
    if constexpr (sizeof(T) == 4) {
      for_held<kHeld>(count_, [&](int k) { to[k] = has(k) ? at_[place(k)] : hidden; });
    } else if (kStaged && pairs_) {
      for_held<kHeld>(count_, [&](int k) {
        if (k % 2 != 0) return;
        to[k] = to[k + 1] = hidden;
        if (has(k)) device::unpack<T>(words()[k / 2], to[k], to[k + 1]);
      });
    } else {
      // All are asked for before the first is converted.
      const uint32_t none = device::from_real<T>(hidden).bits;
      for_held<kHeld>(count_, [&](int k) {
        to[k] = __uint_as_float(has(k) ? static_cast<uint32_t>(at_[place(k)].bits) : none);
      });
      for_held<kHeld>(count_, [&](int k) {
        to[k] = device::to_real(T{static_cast<uint16_t>(__float_as_uint(to[k]))});
      });
    }
  }

  template <int kHeld, class ValueOf>
  void store(const ValueOf& value_of) const {
    if (kStaged && pairs_) {
      if constexpr (sizeof(T) == 2) {
        for_held<kHeld>(count_, [&](int k) {
          if (k % 2 != 0 || !has(k)) return;
          words()[k / 2] = device::pack<T>(value_of(k), value_of(k + 1));
        });
      }
    } else {
      for_held<kHeld>(count_, [&](int k) {
        if (has(k)) at_[place(k)] = device::from_real<T>(value_of(k));
      });
    }
  }

 private:
  bool has(int k) const { return k < mine_; }
  int place(int k) const { return kStaged ? k : k * step_; }
  uint32_t* words() const { return reinterpret_cast<uint32_t*>(at_); }

  T* at_;
  int step_ = 1, count_, mine_;
  bool pairs_;
};

// A tile's elements between global and shared memory, by all threads of the block.
template <class T>
class Staging {
 public:
  Staging(T* tile, int count, uint32_t per_row) : tile_(tile), count_(count), per_row_(per_row) {}

  void load(const T* from) const {
    const int vectors = vectors_at(from);
    in_batches(
        0, vectors, [&](int v) { return device::load_words(from + v * kLength); },
        [&](int v, const device::Words& value) {
          if (per_row_ == 0) {
            *vector(v) = value;
          } else {
#pragma unroll
            for (int w = 0; w < 4; ++w) words()[with_gaps(4 * v + w)] = value.element[w];
          }
        });
    in_batches(
        vectors * kLength, count_, [&](int i) { return from[i]; },
        [&](int i, T value) { tile_[place(i)] = value; });
  }
  void store(T* to) const {
    const int vectors = vectors_at(to);
    in_batches(
        0, vectors,
        [&](int v) {
          if (per_row_ == 0) return *vector(v);
          device::Words value;
#pragma unroll
          for (int w = 0; w < 4; ++w) value.element[w] = words()[with_gaps(4 * v + w)];
          return value;
        },
        [&](int v, const device::Words& value) { device::store_words(to + v * kLength, value); });
    in_batches(
        vectors * kLength, count_, [&](int i) { return tile_[place(i)]; },
        [&](int i, T value) { to[i] = value; });
  }

 private:
  static constexpr int kLength = device::kVectorLength<T>;

  int vectors_at(const T* global) const {
    return reinterpret_cast<uint64_t>(global) % 16 == 0 ? count_ / kLength : 0;
  }
  uint32_t* words() const { return reinterpret_cast<uint32_t*>(tile_); }
  device::Words* vector(int v) const { return reinterpret_cast<device::Words*>(tile_) + v; }
  int with_gaps(int word) const {
    return word + static_cast<int>(__umulhi(static_cast<uint32_t>(word), per_row_));
  }
  int place(int i) const { return sizeof(T) == 4 ? with_gaps(i) : 2 * with_gaps(i / 2) + i % 2; }
  // Several of each thread are under way at a time.
  template <class Load, class Put>
  static void in_batches(int begin, int end, const Load& load, const Put& put) {
    constexpr int kBatch = 4;
    const int threads = static_cast<int>(blockDim.x);
#pragma unroll 1
    for (int first = begin + static_cast<int>(threadIdx.x); first < end;
         first += kBatch * threads) {
      decltype(load(0)) held[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j * threads < end) held[j] = load(first + j * threads);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j * threads < end) put(first + j * threads, held[j]);
      }
    }
  }

  T* tile_;
  int count_;
  uint32_t per_row_;
};

}  // namespace pullback::entmax
