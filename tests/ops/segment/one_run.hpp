// Forward and backward of segment with pointers of any alignment, for tests.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "driver/host_tensor.hpp"
#include "driver/tensor_memory.hpp"
#include "ops/segment/run_segment.hpp"
#include "pullback/segment.hpp"

namespace pullback::testing {

enum class Saved { arg, mask, nothing };

// The elements of a contiguous tensor, some elements behind an aligned address.
struct Shifted {
  driver::HostTensor memory;
  std::int64_t shift;

  Shifted(const driver::HostTensor& tensor, std::int64_t shift_)
      : memory(TensorSpec::contiguous(tensor.spec().dtype, {shift_ + tensor.numel()})),
        shift(shift_) {
    for (std::int64_t i = 0; i < tensor.numel(); ++i) memory.set(shift + i, tensor.get(i));
  }
  void* begin(void* first) const {
    return static_cast<std::byte*>(first) +
           static_cast<std::size_t>(shift) * size_of(memory.spec().dtype);
  }
  void copy_to(driver::HostTensor& tensor) const {
    for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, memory.get(shift + i));
  }
};

// Forward and backward on one device.
struct OneRun {
  SegmentProblem problem;
  driver::HostTensor x, index, permutation, row_ids, d_out;
  Saved saved = Saved::arg;
  DType arg_dtype = DType::i64;
  bool wants_arg = true;
  MaskLayout mask_layout;
  std::int64_t shift = 0;  // of x and d_x
  driver::HostTensor out, arg, mask, d_x;

  void operator()(const Device& device, const std::string& variant) {
    problem.x = x.spec();
    (problem.num_segments > 0 ? problem.ids : problem.offsets) = index.spec();
    if (permutation.spec().given()) problem.permutation = permutation.spec();
    if (row_ids.spec().given()) problem.ids = row_ids.spec();
    problem.d_out = d_out.spec();
    SegmentProblem full = complete(problem);
    const bool extreme =
        problem.reduce == SegmentReduce::max || problem.reduce == SegmentReduce::min;
    driver::TensorMemory memory(device);
    SegmentTensors tensors;
    if (extreme) {
      const std::int64_t columns = x.spec().shape[1];
      full.arg = TensorSpec::contiguous(arg_dtype, {full.num_segments, columns});
      const std::int64_t rows = x.spec().shape[0];
      full.arg_mask = mask_layout.spec(rows, columns);
      arg = driver::HostTensor(full.arg);
      mask = driver::HostTensor(mask_layout.spec(rows + mask_layout.shift, columns));
      tensors.arg = wants_arg ? memory.output(arg) : nullptr;
      tensors.arg_mask = mask_layout.begin(memory.output(mask), full.arg_mask);
    }
    out = driver::HostTensor(full.out);
    d_x = driver::HostTensor(full.d_x);
    const Shifted shifted_x(x, shift), shifted_d_x(d_x, shift);
    tensors.x = shifted_x.begin(const_cast<void*>(memory.input(shifted_x.memory)));
    (full.offsets.given() ? tensors.offsets : tensors.ids) = memory.input(index);
    if (row_ids.spec().given()) tensors.ids = memory.input(row_ids);
    tensors.permutation = permutation.spec().given() ? memory.input(permutation) : nullptr;
    tensors.out = memory.output(out);
    tensors.d_out = memory.input(d_out);
    tensors.d_x = shifted_d_x.begin(memory.output(shifted_d_x.memory));
    const auto pass = [&](Pass which) {
      const auto plan = make_plan(device, full, which, {variant});
      memory.reserve_workspace(plan.workspace_bytes());
      plan.run(memory.stream(), tensors, memory.workspace());
    };
    pass(Pass::forward);
    if (saved != Saved::arg) tensors.arg = nullptr;
    if (saved != Saved::mask) tensors.arg_mask = nullptr;
    pass(Pass::backward);
    memory.fetch(driver::Fetch::all);
    shifted_d_x.copy_to(d_x);
    EXPECT_TRUE(shifted_d_x.memory.guards_intact());
  }
};

}  // namespace pullback::testing
