// Rows that belong to no sequence: out 0, lse −inf.
#pragma once

#include "device/float.cuh"
#include "ops/attention/cuda/smxx_tiles.cuh"

namespace pullback::attention {

using namespace device;

// Rows [begin, end) of the tile belong to no sequence.
template <class T>
void clear_rows(const ForwardParams& p, const QueryTile& tile, int begin, int end, int threads) {
  const int width = p.problem.value_dim;
  const int64_t first = tile.sequence.q_begin + tile.first;
  T* const out = static_cast<T*>(p.out.data) + tile.head * p.out.head;
#pragma unroll 1  // rare: few instructions and registers
  for (int at = static_cast<int>(threadIdx.x); at < (end - begin) * width; at += threads) {
    out[(first + begin + at / width) * p.out.row + at % width * p.out.element] = T{};
  }
  if (p.lse.data == nullptr) return;
  Real<T>* const lse = static_cast<Real<T>*>(p.lse.data) + tile.head * p.lse.head;
#pragma unroll 1
  for (int row = begin + static_cast<int>(threadIdx.x); row < end; row += threads) {
    lse[(first + row) * p.lse.row] = -infinity<Real<T>>();
  }
}

}  // namespace pullback::attention
