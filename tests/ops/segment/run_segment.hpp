// segment by a few lines: tensors from lists of numbers, and the op run forward and backward.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "driver/driver.hpp"
#include "driver/host_tensor.hpp"
#include "pullback/segment.hpp"

namespace pullback::testing {

using driver::HostTensor;
using driver::TensorMap;
using Index = std::vector<std::int64_t>;
using Values = std::vector<double>;

inline constexpr auto kLowest = std::numeric_limits<std::int64_t>::min();
inline constexpr auto kHighest = std::numeric_limits<std::int64_t>::max();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline HostTensor matrix(DType dtype, std::int64_t rows, std::int64_t columns,
                         const Values& values) {
  HostTensor tensor(TensorSpec::contiguous(dtype, {rows, columns}));
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.set(i, values[static_cast<std::size_t>(i) % values.size()]);
  }
  return tensor;
}

inline HostTensor index_tensor(const Index& values, DType dtype = DType::i64) {
  HostTensor tensor(TensorSpec::contiguous(dtype, {static_cast<std::int64_t>(values.size())}));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::i64) {
      static_cast<std::int64_t*>(tensor.data())[i] = values[i];
    } else {
      static_cast<std::int32_t*>(tensor.data())[i] = static_cast<std::int32_t>(values[i]);
    }
  }
  return tensor;
}

inline Values values_of(const HostTensor& tensor) {
  Values values;
  for (std::int64_t i = 0; i < tensor.numel(); ++i) values.push_back(tensor.get(i));
  return values;
}

inline TensorMap evaluate(const TensorMap& inputs, const driver::OptionMap& options,
                          const std::string& variant = {}) {
  return driver::evaluate({.op = "segment",
                           .inputs = inputs,
                           .options = options,
                           .device = Device::cpu(2),
                           .variant = variant});
}

inline void expect_close(const HostTensor& got, const HostTensor& expected, double relative,
                         double absolute) {
  for (std::int64_t i = 0; i < expected.numel(); ++i) {
    const double a = got.get(i), b = expected.get(i);
    const bool same = a == b || (std::isnan(a) && std::isnan(b));
    ASSERT_TRUE(same || std::abs(a - b) <= absolute + relative * std::abs(b))
        << "element " << i << ": " << a << ", not " << b;
  }
}

// A mask for so many rows, of a stride, that begins some rows behind an aligned address.
struct MaskLayout {
  std::int64_t stride = 1, shift = 0;

  TensorSpec spec(std::int64_t rows, std::int64_t columns) const {
    TensorSpec spec = TensorSpec::contiguous(DType::u8, {rows, (columns + 7) / 8});
    spec.strides[0] *= stride;
    return spec;
  }
  void* begin(void* memory, const TensorSpec& spec) const {
    return static_cast<std::uint8_t*>(memory) + shift * spec.strides[0];
  }
};

// The op itself, without the driver's sorting. Forward, then backward from what was saved.
struct Direct {
  SegmentProblem problem;
  HostTensor x, index, permutation, row_ids, d_out, out, arg, mask, d_x;
  bool saved_arg = true, saved_mask = false, writes_mask = true;
  DType arg_dtype = DType::i64;
  MaskLayout mask_layout;

  void run(const std::string& variant) {
    problem.x = x.spec();
    (problem.num_segments > 0 ? problem.ids : problem.offsets) = index.spec();
    if (permutation.spec().given()) problem.permutation = permutation.spec();
    if (row_ids.spec().given()) problem.ids = row_ids.spec();
    problem.d_out = d_out.spec();
    SegmentProblem full = complete(problem);
    const bool extreme =
        problem.reduce == SegmentReduce::max || problem.reduce == SegmentReduce::min;
    if (extreme) {
      const std::int64_t columns = x.spec().shape[1];
      full.arg = TensorSpec::contiguous(arg_dtype, {full.num_segments, columns});
      const std::int64_t rows = x.spec().shape[0];
      full.arg_mask = mask_layout.spec(rows, columns);
      arg = HostTensor(full.arg);
      mask = HostTensor(mask_layout.spec(rows + mask_layout.shift, columns));
    }
    out = HostTensor(full.out);
    d_x = HostTensor(full.d_x);
    SegmentTensors tensors;
    tensors.x = x.data();
    (full.offsets.given() ? tensors.offsets : tensors.ids) = index.data();
    if (row_ids.spec().given()) tensors.ids = row_ids.data();
    tensors.permutation = permutation.data();
    tensors.out = out.data();
    tensors.arg = arg.data();
    if (writes_mask && extreme) {
      tensors.arg_mask = mask_layout.begin(mask.data(), full.arg_mask);
    }
    run_pass(full, tensors, Pass::forward, variant);
    tensors.d_out = d_out.data();
    tensors.d_x = d_x.data();
    if (!saved_arg) tensors.arg = nullptr;
    if (!saved_mask) tensors.arg_mask = nullptr;
    run_pass(full, tensors, Pass::backward, variant);
  }

  static void run_pass(const SegmentProblem& full, const SegmentTensors& tensors, Pass pass,
                       const std::string& variant) {
    const auto plan = make_plan(Device::cpu(2), full, pass, {variant});
    const driver::WorkspaceBuffer workspace(plan.workspace_bytes());
    plan.run({}, tensors, workspace.get());
  }
};

inline constexpr SegmentReduce kReduces[] = {
    SegmentReduce::sum,  SegmentReduce::mean,      SegmentReduce::max,    SegmentReduce::min,
    SegmentReduce::prod, SegmentReduce::logsumexp, SegmentReduce::softmax};

// Equal but for f64's rounding, NaN where NaN is, and nothing written beside.
inline void expect_near(const HostTensor& a, const HostTensor& b, const char* what,
                        double tolerance = 1e-9) {
  for (std::int64_t i = 0; i < b.numel(); ++i) {
    if (std::isfinite(b.get(i))) {
      ASSERT_NEAR(a.get(i), b.get(i), tolerance * (1 + std::abs(b.get(i)))) << what << " " << i;
    } else {
      ASSERT_EQ(std::isnan(a.get(i)), std::isnan(b.get(i))) << what << " " << i;
    }
  }
  ASSERT_TRUE(a.guards_intact()) << what;
}

}  // namespace pullback::testing
