// Where the outputs of some segments go, if the rows of each tensor follow each other.
#pragma once

#include "ops/segment/cuda/smxx_ops.cuh"

namespace pullback::segment_cuda {

// Which are wanted is known to the compiler: where segments are short, storing costs as much as
// adding.
enum class Wants { result, mean, result2, arg_i64, arg_i32, arg_u8 };
template <Wants kWants>
struct PackedOutputs {
  static constexpr bool kPermuted = false;
  const Params& p;
  int64_t first;  // pieces of rows, as many columns as are stored at once
  int i = 0;

  static constexpr bool wants_result() { return true; }
  static constexpr bool wants_result2() { return kWants == Wants::result2; }
  static constexpr bool wants_arg() { return kWants >= Wants::arg_i64; }
  static constexpr bool wants_mean() { return kWants == Wants::mean; }
  static constexpr ArgType arg_type() {
    return kWants == Wants::arg_i64   ? ArgType::i64
           : kWants == Wants::arg_i32 ? ArgType::i32
                                      : ArgType::u8;
  }
  template <class V>
  void result(const V& values) const {
    (static_cast<V*>(p.result.data) + first)[i] = values;
  }
  template <class V>
  void result2(const V& values) const {
    (static_cast<V*>(p.result2.data) + first)[i] = values;
  }
  template <class V>
  void arg(const V& values) const {
    (static_cast<V*>(p.arg.data) + first)[i] = values;
  }
};

// Calls store(outputs) for what follows the first pieces of outputs. False where rows do not follow
// each other.
template <class Op, class Out, class Store>
bool to_packed(const Params& p, int64_t first, const Store& store) {
  const auto packed = [&](const Matrix& to) {
    return to.data != nullptr && to.row_stride == p.columns;
  };
  const auto call = [&]<Wants kWants>() {
    store(PackedOutputs<kWants>{p, first});
    return true;
  };
  if (!packed(p.result)) return false;
  if constexpr (kStoresPair<Op>) {
    return packed(p.result2) && call.template operator()<Wants::result>();
  } else if constexpr (Op::kPlaces) {
    if (p.arg.data == nullptr) return call.template operator()<Wants::result>();
    if (!packed(p.arg)) return false;
    if (p.arg_type == ArgType::i64) return call.template operator()<Wants::arg_i64>();
    if (p.arg_type == ArgType::i32) return call.template operator()<Wants::arg_i32>();
    return call.template operator()<Wants::arg_u8>();
  } else if constexpr (kStoresReal<Op, Out>) {
    if (p.result2.data == nullptr) return call.template operator()<Wants::result>();
    return packed(p.result2) && call.template operator()<Wants::result2>();
  } else {
    if (p.mean) return call.template operator()<Wants::mean>();
    return call.template operator()<Wants::result>();
  }
}

}  // namespace pullback::segment_cuda
