// A thread's part of a row that a block or a cluster holds in registers.
#pragma once

#include "device/registers.cuh"
#include "ops/entmax/cuda/smxx_vector.cuh"

namespace pullback::entmax {

// In packed form. Hidden beyond the row's end.
template <class T>
struct HeldRow {
  static constexpr int kLength = device::kVectorLength<T>;

  Words vector[kResidentVectors];

  Words fresh(int j) const {
    Words packed;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      packed.element[w] = device::kept(vector[j].element[w]);
    }
    return packed;
  }
  uint32_t top() const {
    uint32_t all = max_of<T>(vector[0]);
#pragma unroll
    for (int j = 1; j < kResidentVectors; ++j) all = max_of_words<T>(all, max_of<T>(vector[j]));
    return all;
  }
  template <class Use>
  static void for_each_in(const Words& packed, const Use& use) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float element[kPerWord<T>];
      unpack<T>(packed.element[w], element);
#pragma unroll
      for (int k = 0; k < kPerWord<T>; ++k) use(element[k], w * kPerWord<T> + k);
    }
  }
  template <class ValueOf>
  static Words map(const Words& packed, const ValueOf& value_of) {
    Words result;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float element[kPerWord<T>];
      unpack<T>(packed.element[w], element);
#pragma unroll
      for (int k = 0; k < kPerWord<T>; ++k) element[k] = value_of(element[k]);
      result.element[w] = pack<T>(element);
    }
    return result;
  }
  // Whether an element of a vector is.
  static bool above(const Words& packed, float bound) {
    return max_in_word<T>(max_of<T>(packed)) > bound;
  }
  // Calls use(vector, j) for all vectors. kInTurn: they come to the first registers in turn, which
  // takes two instructions an element of 16 bits, and a quarter of the code.
  template <bool kInTurn, class Use>
  void for_each_vector(const Use& use) {
    constexpr int kAtOnce = kInTurn ? 4 : kResidentVectors;
    static_assert(kResidentVectors % kAtOnce == 0);
#pragma unroll 1
    for (int first = 0; first < kResidentVectors; first += kAtOnce) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) use(fresh(j), first + j);
      if constexpr (kInTurn) {
        Words done[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) done[j] = vector[j];
#pragma unroll
        for (int j = 0; j < kResidentVectors - kAtOnce; ++j) vector[j] = vector[j + kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) vector[kResidentVectors - kAtOnce + j] = done[j];
      }
    }
  }
};

}  // namespace pullback::entmax
