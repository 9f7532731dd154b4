// The reductions that there are kernels for (smxx_ops.cuh).
#include <fmt/format.h>

#include "ops/segment/cuda/stages.hpp"

namespace pullback::segment_cuda {
namespace {

std::string real(DType dtype) { return dtype == DType::f64 ? "double" : "float"; }

ReduceOp named(std::string name, std::string type, DType dtype, int state_bytes) {
  return {.name = std::move(name),
          .type = std::move(type),
          .out = std::string(cuda::device_type(dtype)),
          .input = "x",
          .state_bytes = state_bytes,
          .chunk_bytes = state_bytes,
          .wide = true,
          .tiles = true};
}

ReduceOp exponential_op(std::string name, std::string type, DType dtype) {
  ReduceOp op = named(std::move(name), std::move(type), dtype, 2 * real_bytes(dtype));
  if (size_of(dtype) == 2) op.blocks = 3;
  if (size_of(dtype) == 2) op.chunk_bytes = 4;
  return op;
}

std::string min_flag(SegmentReduce reduce) {
  return reduce == SegmentReduce::min ? "true" : "false";
}
std::string_view extreme_name(SegmentReduce reduce) {
  return reduce == SegmentReduce::min ? "min" : "max";
}

}  // namespace

ReduceOp reduce_op(SegmentReduce reduce, DType dtype) {
  const std::string r = real(dtype);
  const int bytes = real_bytes(dtype);
  switch (reduce) {
    case SegmentReduce::prod: {
      ReduceOp op = named("prod", fmt::format("Product<{}>", r), dtype, 8);
      op.tiles = false;
      if (size_of(dtype) == 2) op.blocks = 3;
      return op;
    }
    case SegmentReduce::max:
    case SegmentReduce::min: {
      ReduceOp op = named(std::string(extreme_name(reduce)),
                          fmt::format("Extreme<{}, {}>", r, min_flag(reduce)), dtype, bytes);
      op.pairs = true;
      return op;
    }
    case SegmentReduce::logsumexp: {
      ReduceOp op = exponential_op("logsumexp", fmt::format("ExponentialSum<{}>", r), dtype);
      if (dtype == DType::f32) op.chunk_bytes = 4;  // shifts are shared (SharedShift)
      return op;
    }
    case SegmentReduce::softmax: {
      ReduceOp op = exponential_op("softmax", fmt::format("SoftmaxSum<{}>", r), dtype);
      op.out = r;
      op.tiles = false;  // but smxx_reduce_map.cuh
      --op.blocks;
      return op;
    }
    default:
      return named("sum", fmt::format("Sum<{}>", r), dtype, bytes);
  }
}

ReduceOp extreme_place(SegmentReduce reduce, bool last, DType dtype) {
  ReduceOp op = named(fmt::format("arg_{}_{}", extreme_name(reduce), last ? "last" : "first"),
                      fmt::format("ExtremePlace<{}, {}, {}>", real(dtype), min_flag(reduce), last),
                      dtype, 2 * real_bytes(dtype));
  op.pairs = true;
  if (size_of(dtype) == 2) op.blocks = 3;
  if (size_of(dtype) == 2 && !last) op.chunk_bytes = 4;
  return op;
}

ReduceOp extreme_count(SegmentReduce reduce, DType dtype) {
  ReduceOp op =
      named(fmt::format("count_{}", extreme_name(reduce)),
            fmt::format("ExtremeCount<{}, {}>", real(dtype), min_flag(reduce)), dtype, 16);
  op.out = real(dtype);
  op.wide = false;
  return op;
}

ReduceOp mask_count(DType dtype) {
  ReduceOp op = reduce_op(SegmentReduce::sum, dtype);
  op.name = "count_mask";
  op.type = "Count<" + real(dtype) + ">";
  op.state_bytes = op.chunk_bytes = 8;
  op.out = real(dtype);
  op.input = "mask";
  op.tiles = false;
  op.blocks = 3;
  return op;
}

ReduceOp row_product_sum(DType dtype) {
  ReduceOp op = reduce_op(SegmentReduce::sum, dtype);
  op.name = "dot";
  op.out = real(dtype);
  op.input = "product";
  op.tiles = false;
  return op;
}

}  // namespace pullback::segment_cuda

namespace pullback::cuda {

// They are in the list of what launches them.
std::vector<KernelSource> segment_reduce_ops_kernels(int) { return {}; }

}  // namespace pullback::cuda
