// Neighbouring elements of a row: one, or those of a 16-byte vector.
#pragma once

#include "device/memory.cuh"

namespace pullback::block_softmax {

using device::load_vector;
using device::store_vector;
using device::Vector;

template <class T, int kWidth>
struct Piece {
  T element[kWidth];
};

// `at` is the vector's first element.
template <class T, int kWidth>
Piece<T, kWidth> load_piece(const T* at) {
  Piece<T, kWidth> piece;
  if constexpr (kWidth == 1) {
    piece.element[0] = *at;
  } else {
    const Vector<T> vector = load_vector(at);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) piece.element[e] = vector.element[e];
  }
  return piece;
}

template <class T, int kWidth>
void store_piece(T* at, const Piece<T, kWidth>& piece) {
  if constexpr (kWidth == 1) {
    *at = piece.element[0];
  } else {
    Vector<T> vector;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) vector.element[e] = piece.element[e];
    store_vector(at, vector);
  }
}

}  // namespace pullback::block_softmax
