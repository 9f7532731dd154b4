// A task of the forward pass, as the kernels see it.
#pragma once

#include "ops/entmax/cpu/rows.hpp"

namespace pullback::entmax {

// What is known of a row besides y.
struct RowResult {
  double tau;
  std::int64_t support_size;
};

// Rows that are solved together (batch_rows-inl.hpp): as many as the widest vector has lanes at
// most.
inline constexpr std::int64_t kMostBatchRows = 16;

// Of each row the candidates in whole vectors, with one to spare, as much again for a power of
// them, and a bit or at most a byte for each element that says which they are.
struct BatchScratch {
  std::byte* candidates = nullptr;  // null: no batches
  std::byte* places = nullptr;
  std::size_t rows = 0;
};
inline std::int64_t candidates_pitch(std::int64_t length) { return (length + 47) / 16 * 16; }
inline std::int64_t places_pitch(std::int64_t length) { return length + 64; }

struct ForwardTile : RowTile {
  TensorRows x, mask, y, tau, support_size;
  // Scratch: packed x and y, the elements that the solver works on, and a stripe of columns with
  // its candidates (or null).
  std::byte *packed_x, *packed_y, *elements, *stripe;
  BatchScratch batch;
};

}  // namespace pullback::entmax
