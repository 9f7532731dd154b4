// HostTensors as DLTensors, and plans that end with their scope.
#pragma once

#include <memory>
#include <string>

#include "driver/host_tensor.hpp"
#include "pullback/pullback.h"

namespace pullback::testing {

inline DLDataType dl_dtype(DType dtype) {
  const auto bits = static_cast<std::uint8_t>(8 * size_of(dtype));
  switch (dtype) {
    case DType::bf16:
      return {kDLBfloat, bits, 1};
    case DType::i64:
    case DType::i32:
      return {kDLInt, bits, 1};
    case DType::u8:
      return {kDLUInt, bits, 1};
    case DType::boolean:
      return {6, bits, 1};
    default:
      return {kDLFloat, bits, 1};
  }
}

// Shape and strides stay those of `tensor`, which has to live on.
inline DLTensor describe(const driver::HostTensor& tensor) {
  const TensorSpec& spec = tensor.spec();
  DLTensor result{};
  result.data = tensor.data();
  result.device = {kDLCPU, 0};
  result.ndim = spec.rank;
  result.dtype = dl_dtype(spec.dtype);
  result.shape = const_cast<std::int64_t*>(spec.shape.data());
  result.strides = const_cast<std::int64_t*>(spec.strides.data());
  return result;
}

struct DestroyPlan {
  void operator()(pullback_plan* plan) const { pullback_plan_destroy(plan); }
};
using CPlan = std::unique_ptr<pullback_plan, DestroyPlan>;

struct DestroyLayout {
  void operator()(pullback_block_layout* layout) const { pullback_block_layout_destroy(layout); }
};
using CLayout = std::unique_ptr<pullback_block_layout, DestroyLayout>;

// Memory as the plan wants it for the tensor of this name.
inline driver::HostTensor allocate(const CPlan& plan, const char* name) {
  DLTensor layout{};
  if (pullback_plan_tensor(plan.get(), name, &layout) != PULLBACK_OK || layout.ndim < 0) return {};
  TensorSpec spec;
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32,
                      DType::u8, DType::boolean}) {
    const DLDataType type = dl_dtype(dtype);
    if (type.code == layout.dtype.code && type.bits == layout.dtype.bits) spec.dtype = dtype;
  }
  spec.rank = layout.ndim;
  std::copy_n(layout.shape, layout.ndim, spec.shape.begin());
  std::copy_n(layout.strides, layout.ndim, spec.strides.begin());
  return driver::HostTensor(spec);
}

inline driver::WorkspaceBuffer workspace_of(const CPlan& plan) {
  std::size_t bytes = 0;
  pullback_plan_workspace_bytes(plan.get(), &bytes);
  return driver::WorkspaceBuffer(bytes);
}

}  // namespace pullback::testing
