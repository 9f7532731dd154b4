// Rows that begin anywhere, with unit stride along the axis: some elements up to the first multiple
// of 16 bytes, whole vectors, and what is left. The elements beside the vectors are the edge: fewer
// than two vectors, each for one thread.
#pragma once

#include "device/float.cuh"
#include "device/memory.cuh"

namespace pullback::entmax {

// How a row lies over vectors. kEdges: false where it is whole ones, from its first element on.
template <class T, bool kEdges>
struct RowSpan {
  int head = 0;  // elements before the vectors
  int whole;     // elements of these
  int edge = 0;  // elements beside them

  RowSpan(const T* row, int length) : whole(length) {
    if constexpr (kEdges) {
      constexpr unsigned kLength = device::kVectorLength<T>;
      const auto at = static_cast<unsigned>(reinterpret_cast<uint64_t>(row) / sizeof(T));
      head = min(static_cast<int>((0u - at) % kLength), length);
      whole = (length - head) / static_cast<int>(kLength) * static_cast<int>(kLength);
      edge = length - whole;
    }
  }

  // Which element of the row the i-th of the edge is.
  int edge_at(int i) const { return i < head ? i : i + whole; }
};

// The element of the edge that `thread` of the row has; minus infinity, which counts for nothing,
// if none.
template <class T, bool kEdges>
float load_edge(const T* x, int length, int thread) {
  float value = -device::infinity<float>();
  if constexpr (kEdges) {
    const RowSpan<T, true> span(x, length);
    if (thread < span.edge) value = device::to_real(x[span.edge_at(thread)]);
  }
  return value;
}
// value(): y of that element; called where there is one.
template <class T, bool kEdges, class Value>
void store_edge(T* y, int length, int thread, const Value& value) {
  if constexpr (kEdges) {
    const RowSpan<T, true> span(y, length);
    if (thread < span.edge) y[span.edge_at(thread)] = device::from_real<T>(value());
  }
}

}  // namespace pullback::entmax
