// From a device function to a kernel's source; on a GPU also to its launch, and the memory of
// sessions there.
#include "cuda/op_kernel.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <thread>
#include <vector>

#include "cuda/compiler.hpp"
#include "cuda/memory.hpp"
#include "cuda/nvrtc.hpp"
#include "driver/tensor_memory.hpp"
#include "pullback/error.hpp"
#include "support/message_of.hpp"

namespace pullback::cuda {
namespace {

struct FillParameters {
  void* to;
  std::int64_t count;
  double value;
};

// The struct travels by value: the device's declaration of it is in the function's text.
OpKernel fill_kernel(DType dtype) {
  return {.name = "test_fill_" + std::string(name_of(dtype)),
          .file = "device/warp.cuh",
          .function =
              "[](const auto& p) {\n"
              "  const auto i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;\n"
              "  if (i < p.count) static_cast<" +
              std::string(device_type(dtype)) + "*>(p.to)[i] = from_real<" +
              std::string(device_type(dtype)) + ">(p.value);\n}",
          .parameters =
              "decltype([] { struct P { void* to; int64_t count; double value; }; "
              "return P(); }())",
          .threads = 64,
          .constants = {{"kWarpSize", 32}}};
}

TEST(op_kernel, compiles_for_all_architectures) {
  if (const std::string problem = nvrtc_problem(); !problem.empty()) GTEST_SKIP() << problem;
  for (int arch : kArchs) {
    for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      const Report report =
          compile_with_report(op_kernel<FillParameters>(fill_kernel(dtype), arch));
      EXPECT_GT(report.resources.registers, 0);
    }
  }
}

TEST(op_kernel, host_and_device_must_agree) {
  if (const std::string problem = nvrtc_problem(); !problem.empty()) GTEST_SKIP() << problem;
  OpKernel kernel = fill_kernel(DType::f32);
  kernel.constants = {{"kWarpSize", 64}};
  EXPECT_THROW(compile_with_report(op_kernel<FillParameters>(kernel, 90)), Error);
  EXPECT_THROW(compile_with_report(op_kernel<int>(fill_kernel(DType::f32), 90)), Error);
}

TEST(op_kernel, alignment_of_pointers) {
  alignas(16) char bytes[32];
  EXPECT_TRUE(vector_aligned({bytes, nullptr, bytes + 16}));
  EXPECT_FALSE(vector_aligned({bytes, bytes + 8}));
}

class OnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string problem = driver_problem(); !problem.empty()) GTEST_SKIP() << problem;
  }
};

TEST_F(OnDevice, a_kernel_fills_a_tensor) {
  const driver::HostTensor tensor(TensorSpec::contiguous(DType::bf16, {1000}));
  driver::TensorMemory memory(Device::cuda());
  const FillParameters parameters{memory.output(tensor), tensor.numel(), 1.5};
  PlannedKernel<FillParameters> kernel(fill_kernel(DType::bf16), device_info(0));
  kernel.shape.grid[0] = 16;
  EXPECT_GT(kernel.blocks_per_multiprocessor(device_info(0)), 1);
  {
    const DeviceGuard guard(device_info(0));
    kernel.launch(memory.stream(), parameters);
  }
  memory.fetch(driver::Fetch::all);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) ASSERT_EQ(tensor.get(i), 1.5) << i;
  EXPECT_TRUE(tensor.guards_intact());
}

// The limit of a kernel's shared memory belongs to all of its plans.
TEST_F(OnDevice, threads_may_plan_one_kernel_with_different_shared_memory) {
  const DeviceInfo& device = device_info(0);
  const OwnStream stream(device);
  for (int round = 0; round < 10; ++round) {
    OpKernel kernel = fill_kernel(DType::f32);
    kernel.name += fmt::format("_{}", round);  // a kernel whose limit nobody has raised yet
    std::array<PlannedKernel<FillParameters>, 4> planned;
    {
      std::vector<std::jthread> threads;
      for (std::size_t i = 0; i < planned.size(); ++i) {
        threads.emplace_back([&, i] {
          planned[i] = PlannedKernel<FillParameters>(
              kernel, device, device.max_shared_bytes - 1024 * static_cast<int>(i));
        });
      }
    }
    const DeviceGuard guard(device);
    for (const auto& one : planned) one.launch({stream.get()}, {nullptr, 0, 0});
    stream.synchronize();
  }
}

TEST_F(OnDevice, a_launch_that_fails_names_the_kernel) {
  PlannedKernel<FillParameters> kernel(fill_kernel(DType::f32), device_info(0));
  kernel.shape.grid[0] = 0;
  const DeviceGuard guard(device_info(0));
  const std::string message = message_of([&] { kernel.launch({}, {nullptr, 0, 0}); });
  EXPECT_NE(message.find("cuLaunchKernelEx of test_fill_f32 failed: "), std::string::npos)
      << message;
}

TEST_F(OnDevice, stray_writes_come_back_with_the_tensor) {
  for (const std::int64_t stray : {-1, 1000}) {
    const driver::HostTensor output(TensorSpec::contiguous(DType::u8, {1000}));
    const driver::HostTensor given(TensorSpec::contiguous(DType::u8, {1000}));
    driver::TensorMemory memory(Device::cuda());
    const void* pointers[] = {memory.output(output), memory.input(given)};
    const DeviceGuard guard(device_info(0));
    for (const void* pointer : pointers) {
      check(driver().cuMemsetD8Async(address(static_cast<const char*>(pointer) + stray), 0, 1,
                                     static_cast<CUstream>(memory.stream().handle)),
            "cuMemsetD8Async");
    }
    memory.fetch(driver::Fetch::all);
    EXPECT_FALSE(output.guards_intact());
    EXPECT_FALSE(given.guards_intact());
  }
}

TEST_F(OnDevice, borrowed_memory_is_never_written) {
  const std::vector<float> content(100, 2.0f);
  const auto tensor = driver::HostTensor::borrow(TensorSpec::contiguous(DType::f32, {100}),
                                                 content.data(), nullptr);
  driver::TensorMemory memory(Device::cuda());
  const void* image = memory.input(tensor);
  const DeviceGuard guard(device_info(0));
  check(driver().cuMemsetD8Async(address(image), 0, 400,
                                 static_cast<CUstream>(memory.stream().handle)),
        "cuMemsetD8Async");
  memory.fetch(driver::Fetch::all);
  EXPECT_EQ(content, std::vector<float>(100, 2.0f));
}

}  // namespace
}  // namespace pullback::cuda
