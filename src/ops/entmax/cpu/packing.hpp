// Tiles of rows whose axis has no unit stride, copied to rows in scratch and back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/entmax/cpu/walk.hpp"

namespace pullback::entmax {

// Rows in scratch lie an odd number of cache lines apart, so as not to share a cache set.
inline std::int64_t packed_pitch(std::int64_t length, std::int64_t element_bytes) {
  const std::int64_t lines = (length * element_bytes + 63) / 64 | 1;
  return lines * 64 / element_bytes;
}

// Calls move(r, i) for `rows` × `length`. Blocks along the axis keep both sides in L1 when one of
// them steps over whole lines.
inline constexpr std::int64_t kBlock = 16;
template <class Move>
void for_each_blocked(std::int64_t rows, std::int64_t length, const Move& move) {
  for (std::int64_t begin = 0; begin < length; begin += kBlock) {
    const std::int64_t end = std::min(begin + kBlock, length);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = begin; i < end; ++i) move(r, i);
    }
  }
}

// Calls block(r, i) for the whole kBlock × kBlock blocks, one axis position's rows after the
// other's, and move(r, i) for the elements left over.
template <class Block, class Move>
void for_each_square(std::int64_t rows, std::int64_t length, const Block& block, const Move& move) {
  const std::int64_t whole_rows = rows / kBlock * kBlock;
  const std::int64_t whole_length = length / kBlock * kBlock;
  for (std::int64_t i = 0; i < whole_length; i += kBlock) {
    for (std::int64_t r = 0; r < whole_rows; r += kBlock) block(r, i);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = r < whole_rows ? whole_length : 0; i < length; ++i) move(r, i);
  }
}

template <class T>
void packed_copy(const TensorRows& from, std::int64_t rows, std::int64_t length,
                 const TensorRows& packed) {
  T* const to = packed.row<T>(0);
  const std::int64_t pitch = packed.row_step;
  const auto move = [&](std::int64_t r, std::int64_t i) {
    to[r * pitch + i] = from.row<T>(r)[i * from.step];
  };
  const auto block = [&](std::int64_t r, std::int64_t i) {
    T square[kBlock][kBlock];
    const T* source = from.row<T>(r) + i * from.step;
    for (std::int64_t k = 0; k < kBlock; ++k) {
      // The lines of neighbouring axis positions are far apart, which no hardware foresees.
      __builtin_prefetch(source + (k + kBlock) * from.step);
      std::copy_n(source + k * from.step, kBlock, square[k]);
    }
    for (std::int64_t q = 0; q < kBlock; ++q) {
      for (std::int64_t k = 0; k < kBlock; ++k) to[(r + q) * pitch + i + k] = square[k][q];
    }
  };
  if (from.row_step == 1) {
    for_each_square(rows, length, block, move);
  } else {
    for_each_blocked(rows, length, move);
  }
}

template <class T>
void unpack(const TensorRows& from, std::int64_t rows, std::int64_t length, const TensorRows& to) {
  const auto move = [&](std::int64_t r, std::int64_t i) {
    to.row<T>(r)[i * to.step] = from.row<T>(r)[i];
  };
  const auto block = [&](std::int64_t r, std::int64_t i) {
    T square[kBlock][kBlock];
    for (std::int64_t q = 0; q < kBlock; ++q) {
      for (std::int64_t k = 0; k < kBlock; ++k) square[k][q] = from.row<T>(r + q)[i + k];
    }
    T* target = to.row<T>(r) + i * to.step;
    for (std::int64_t k = 0; k < kBlock; ++k) {
      __builtin_prefetch(target + (k + kBlock) * to.step, 1);
      std::copy_n(square[k], kBlock, target + k * to.step);
    }
  };
  if (to.row_step == 1) {
    for_each_square(rows, length, block, move);
  } else {
    for_each_blocked(rows, length, move);
  }
}

}  // namespace pullback::entmax
