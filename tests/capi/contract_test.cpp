// What every function of the C ABI promises, shown on entmax.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <thread>

#include "capi/c_tensors.hpp"
#include "driver/case.hpp"
#include "pullback/error.hpp"

namespace pullback::testing {
namespace {

constexpr int kBoolCode = 6;

// A valid sparsemax of [2, 3] that tests spoil.
struct Fixture {
  driver::HostTensor x = driver::tensor_of(DType::f32, {2, 3}, {1, 2, 3, 0, 0, 9});
  DLTensor dl_x = describe(x);
  pullback_entmax_problem problem = PULLBACK_ENTMAX_PROBLEM_INIT;

  Fixture() { problem.x = &dl_x; }

  pullback_status plan(CPlan* result = nullptr, const pullback_plan_options* options = nullptr) {
    pullback_plan* made = nullptr;
    const pullback_status status = pullback_entmax_plan(&problem, PULLBACK_FORWARD, options, &made);
    EXPECT_EQ(status == PULLBACK_OK, made != nullptr);
    CPlan owned(made);
    if (result) *result = std::move(owned);
    return status;
  }
};

#define EXPECT_MESSAGE(part) EXPECT_PRED2(contains, std::string(pullback_last_error()), part)
bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Status, values_are_those_of_the_cpp_errors) {
  EXPECT_EQ(static_cast<int>(ErrorCode::invalid_argument), PULLBACK_INVALID_ARGUMENT);
  EXPECT_EQ(static_cast<int>(ErrorCode::unsupported), PULLBACK_UNSUPPORTED);
  EXPECT_EQ(static_cast<int>(ErrorCode::workspace_too_small), PULLBACK_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(static_cast<int>(ErrorCode::device), PULLBACK_DEVICE_ERROR);
  EXPECT_EQ(static_cast<int>(ErrorCode::internal), PULLBACK_INTERNAL_ERROR);
}

TEST(Status, version_is_the_headers) {
  EXPECT_EQ(pullback_version(),
            10000 * PULLBACK_VERSION_MAJOR + 100 * PULLBACK_VERSION_MINOR + PULLBACK_VERSION_PATCH);
}

TEST(System, is_described_with_or_without_a_gpu) {
  const char* text = nullptr;
  ASSERT_EQ(pullback_describe_system(&text), PULLBACK_OK);
  for (const char* part :
       {"pullback ", "CPU ", "usable cores", "CUDA ", "NVRTC ", "kernel cache"}) {
    EXPECT_PRED2(contains, std::string(text), part);
  }
}

TEST(Status, success_leaves_the_last_message) {
  Fixture fixture;
  EXPECT_EQ(pullback_entmax_plan(nullptr, 0, nullptr, nullptr), PULLBACK_INVALID_ARGUMENT);
  EXPECT_EQ(fixture.plan(), PULLBACK_OK);
  EXPECT_STREQ(pullback_last_error(), "entmax: plan: expected a pointer, got NULL");
}

TEST(Status, every_thread_has_its_own_message) {
  EXPECT_EQ(pullback_plan_describe(nullptr, nullptr), PULLBACK_INVALID_ARGUMENT);
  std::string elsewhere = "untouched";
  std::thread([&] { elsewhere = pullback_last_error(); }).join();
  EXPECT_EQ(elsewhere, "");
  EXPECT_STREQ(pullback_last_error(), "plan_describe: plan: expected a pointer, got NULL");
}

TEST(Null, every_function_refuses_it) {
  Fixture fixture;
  CPlan plan;
  ASSERT_EQ(fixture.plan(&plan), PULLBACK_OK);
  pullback_plan* made = nullptr;
  pullback_block_layout* layout = nullptr;
  const pullback_entmax_tensors tensors = PULLBACK_ENTMAX_TENSORS_INIT;
  const pullback_block_softmax_problem softmax = PULLBACK_BLOCK_SOFTMAX_PROBLEM_INIT;
  const pullback_block_matmul_problem matmul = PULLBACK_BLOCK_MATMUL_PROBLEM_INIT;
  const pullback_status statuses[] = {
      pullback_attention_plan(nullptr, 0, nullptr, &made),
      pullback_block_softmax_plan(nullptr, 0, nullptr, &made),
      pullback_block_softmax_plan(&softmax, 0, nullptr, &made),
      pullback_block_matmul_plan(nullptr, 0, nullptr, &made),
      pullback_block_matmul_plan(&matmul, 0, nullptr, &made),
      pullback_entmax_plan(nullptr, 0, nullptr, &made),
      pullback_entmax_plan(&fixture.problem, 0, nullptr, nullptr),
      pullback_segment_plan(nullptr, 0, nullptr, &made),
      pullback_segment_permutation_plan(nullptr, nullptr, &made),
      pullback_attention_run(nullptr, nullptr, nullptr, nullptr, 0),
      pullback_block_softmax_run(nullptr, nullptr, nullptr, nullptr, 0),
      pullback_block_matmul_run(nullptr, nullptr, nullptr, nullptr, 0),
      pullback_entmax_run(nullptr, nullptr, &tensors, nullptr, 0),
      pullback_entmax_run(plan.get(), nullptr, nullptr, nullptr, 0),
      pullback_segment_run(nullptr, nullptr, nullptr, nullptr, 0),
      pullback_segment_permutation_run(nullptr, nullptr, nullptr, nullptr, 0),
      pullback_describe_system(nullptr),
      pullback_plan_workspace_bytes(plan.get(), nullptr),
      pullback_plan_describe(plan.get(), nullptr),
      pullback_plan_tensor(plan.get(), nullptr, nullptr),
      pullback_plan_tensor(plan.get(), "x", nullptr),
      pullback_write_dropout_mask(nullptr, 0.5, 0),
      pullback_block_layout_create(1, 1, 1, nullptr, &layout),
      pullback_block_layout_create(1, 1, 1, nullptr, nullptr),
      pullback_block_layout_size(nullptr, nullptr, nullptr, nullptr, nullptr),
      pullback_block_layout_present(nullptr, nullptr, 0),
      pullback_dense_layout(nullptr, 16, &layout),
      pullback_fixed_layout(nullptr, 16, &layout),
      pullback_variable_layout(nullptr, 16, &layout),
      pullback_bigbird_layout(nullptr, 16, &layout),
      pullback_bslongformer_layout(nullptr, 16, &layout),
      pullback_local_sliding_window_layout(nullptr, 16, &layout),
  };
  for (const pullback_status status : statuses) EXPECT_EQ(status, PULLBACK_INVALID_ARGUMENT);
  EXPECT_EQ(made, nullptr);
  EXPECT_EQ(layout, nullptr);
  pullback_plan_destroy(nullptr);
  pullback_block_layout_destroy(nullptr);
}

// --- Size-versioned structs ---

TEST(StructSize, a_shorter_struct_gets_defaults_for_the_rest) {
  Fixture fixture;
  // An older caller whose struct ends before alpha and axis, with garbage behind its end.
  fixture.problem.alpha = -7;
  fixture.problem.axis = 99;
  fixture.problem.struct_size = offsetof(pullback_entmax_problem, alpha);
  CPlan plan;
  ASSERT_EQ(fixture.plan(&plan), PULLBACK_OK) << pullback_last_error();

  driver::HostTensor y = allocate(plan, "y");
  pullback_entmax_tensors tensors = PULLBACK_ENTMAX_TENSORS_INIT;
  tensors.x = fixture.x.data();
  tensors.y = y.data();
  const auto workspace = workspace_of(plan);
  ASSERT_EQ(pullback_entmax_run(plan.get(), nullptr, &tensors, workspace.get().data,
                                workspace.get().bytes),
            PULLBACK_OK);
  EXPECT_EQ(y.get(5), 1);  // sparsemax along the last axis
}

struct NewerProblem {
  pullback_entmax_problem known = PULLBACK_ENTMAX_PROBLEM_INIT;
  std::uint64_t fields_of_the_future[3] = {};
};

TEST(StructSize, a_longer_struct_is_served_while_its_unknown_fields_are_zero) {
  Fixture fixture;
  NewerProblem newer;
  newer.known.x = &fixture.dl_x;
  newer.known.struct_size = sizeof(newer);
  pullback_plan* made = nullptr;
  ASSERT_EQ(pullback_entmax_plan(&newer.known, PULLBACK_FORWARD, nullptr, &made), PULLBACK_OK);
  pullback_plan_destroy(made);

  newer.fields_of_the_future[1] = 1;
  made = nullptr;
  EXPECT_EQ(pullback_entmax_plan(&newer.known, PULLBACK_FORWARD, nullptr, &made),
            PULLBACK_UNSUPPORTED);
  EXPECT_EQ(made, nullptr);
  EXPECT_MESSAGE("entmax: problem: expected zeros beyond byte");
}

TEST(StructSize, sizes_that_were_never_set_are_refused_unread) {
  Fixture fixture;
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{7}, std::size_t{11}, std::numeric_limits<std::size_t>::max(),
        std::size_t{0xcccccccccccccccc}}) {
    fixture.problem.struct_size = size;
    EXPECT_EQ(fixture.plan(), PULLBACK_INVALID_ARGUMENT) << size;
    EXPECT_MESSAGE("entmax: problem: struct_size: expected");
  }
}

// --- Tensors ---

TEST(Tensor, messages_name_op_and_tensor) {
  Fixture fixture;
  fixture.dl_x.ndim = 9;
  EXPECT_EQ(fixture.plan(), PULLBACK_INVALID_ARGUMENT);
  EXPECT_STREQ(pullback_last_error(), "entmax: x: expected ndim from 0 to 8, got 9");
  fixture.dl_x.ndim = -1;
  EXPECT_EQ(fixture.plan(), PULLBACK_INVALID_ARGUMENT);
  fixture.dl_x = describe(fixture.x);
  fixture.dl_x.shape = nullptr;
  EXPECT_EQ(fixture.plan(), PULLBACK_INVALID_ARGUMENT);
  EXPECT_STREQ(pullback_last_error(), "entmax: x: expected a shape array, got NULL");
  fixture.problem.x = nullptr;
  EXPECT_EQ(fixture.plan(), PULLBACK_INVALID_ARGUMENT);
  EXPECT_MESSAGE("entmax: x: expected");
}

TEST(Tensor, dtypes_that_are_not_ours_are_refused) {
  Fixture fixture;
  const DLDataType foreign[] = {{kDLFloat, 8, 1},   {kDLFloat, 32, 4}, {kDLFloat, 32, 0},
                                {kDLInt, 16, 1},    {kDLUInt, 64, 1},  {kDLComplex, 64, 1},
                                {kDLBfloat, 32, 1}, {kBoolCode, 1, 1}, {255, 255, 65535}};
  for (const DLDataType& type : foreign) {
    fixture.dl_x.dtype = type;
    EXPECT_EQ(fixture.plan(), PULLBACK_INVALID_ARGUMENT);
    EXPECT_MESSAGE("entmax: x: expected dtype f64, f32, bf16, f16, i64, i32, u8 or bool, got code");
  }
}

TEST(Tensor, hostile_sizes_and_strides_are_refused) {
  Fixture fixture;
  std::array<std::int64_t, 2> shape{std::int64_t{1} << 62, std::int64_t{1} << 62};
  fixture.dl_x.shape = shape.data();
  fixture.dl_x.strides = nullptr;
  EXPECT_EQ(fixture.plan(), PULLBACK_INVALID_ARGUMENT);
  shape = {-1, 3};
  EXPECT_EQ(fixture.plan(), PULLBACK_INVALID_ARGUMENT);
  shape = {2, 3};
  std::array<std::int64_t, 2> strides{std::numeric_limits<std::int64_t>::min(), 1};
  fixture.dl_x.strides = strides.data();
  EXPECT_EQ(fixture.plan(), PULLBACK_INVALID_ARGUMENT);
}

TEST(Tensor, memory_has_to_be_of_the_plans_device) {
  Fixture fixture;
  fixture.dl_x.device = {kDLCUDA, 1};
  EXPECT_EQ(fixture.plan(), PULLBACK_INVALID_ARGUMENT);
  EXPECT_STREQ(pullback_last_error(),
               "entmax: x: expected memory of the CPU, got CUDA device 1; move the tensor, or plan "
               "for its device");
  fixture.dl_x.device = {kDLCUDAHost, 0};
  EXPECT_EQ(fixture.plan(), PULLBACK_OK);
  pullback_plan_options options = PULLBACK_PLAN_OPTIONS_INIT;
  options.device = {kDLMetal, 0};
  EXPECT_EQ(fixture.plan(nullptr, &options), PULLBACK_INVALID_ARGUMENT);
  EXPECT_MESSAGE("entmax: options: device: expected kDLCPU or kDLCUDA, got device type 8");
}

TEST(Tensor, null_strides_mean_row_major) {
  Fixture fixture;
  fixture.dl_x.strides = nullptr;
  CPlan plan;
  ASSERT_EQ(fixture.plan(&plan), PULLBACK_OK);
  DLTensor x{};
  ASSERT_EQ(pullback_plan_tensor(plan.get(), "x", &x), PULLBACK_OK);
  EXPECT_EQ(x.strides[0], 3);
  EXPECT_EQ(x.strides[1], 1);
}

TEST(Tensor, data_honours_the_byte_offset) {
  std::array<float, 4> memory{};
  DLTensor tensor{};
  tensor.data = memory.data();
  tensor.byte_offset = 8;
  EXPECT_EQ(pullback_tensor_data(&tensor), &memory[2]);
}

// --- Options ---

TEST(Options, unknown_values_and_bits_are_refused) {
  Fixture fixture;
  pullback_plan* made = nullptr;
  EXPECT_EQ(pullback_entmax_plan(&fixture.problem, 2, nullptr, &made), PULLBACK_INVALID_ARGUMENT);
  EXPECT_STREQ(pullback_last_error(), "entmax: pass: expected 0 to 1, got 2");
  fixture.problem.flags = 1u << 31;
  EXPECT_EQ(fixture.plan(), PULLBACK_INVALID_ARGUMENT);
  EXPECT_STREQ(pullback_last_error(), "entmax: flags: expected bits of 0x2, got 0x80000000");
  fixture.problem.flags = 0;

  pullback_plan_options options = PULLBACK_PLAN_OPTIONS_INIT;
  options.flags = 1;
  EXPECT_EQ(fixture.plan(nullptr, &options), PULLBACK_INVALID_ARGUMENT);
  options.flags = 0;
  for (const int threads : {-1, std::numeric_limits<int>::max()}) {
    options.threads = threads;
    EXPECT_EQ(fixture.plan(nullptr, &options), PULLBACK_INVALID_ARGUMENT);
    EXPECT_MESSAGE("entmax: threads: expected");
  }
}

TEST(Options, a_variant_is_chosen_by_name) {
  Fixture fixture;
  pullback_plan_options options = PULLBACK_PLAN_OPTIONS_INIT;
  options.variant = "reference";
  CPlan plan;
  ASSERT_EQ(fixture.plan(&plan, &options), PULLBACK_OK);
  const char* text = nullptr;
  ASSERT_EQ(pullback_plan_describe(plan.get(), &text), PULLBACK_OK);
  EXPECT_PRED2(contains, text, "entmax forward: reference");

  options.variant = "the fast one";
  EXPECT_EQ(fixture.plan(nullptr, &options), PULLBACK_INVALID_ARGUMENT);
  EXPECT_MESSAGE("got the fast one");
}

TEST(Options, a_cuda_plan_without_a_variant_for_it_is_unsupported) {
  Fixture fixture;
  fixture.dl_x.device = {kDLCUDA, 0};
  pullback_plan_options options = PULLBACK_PLAN_OPTIONS_INIT;
  options.device = {kDLCUDA, 0};
  const pullback_status status = fixture.plan(nullptr, &options);
  EXPECT_TRUE(status == PULLBACK_OK || status == PULLBACK_UNSUPPORTED ||
              status == PULLBACK_DEVICE_ERROR)
      << status;
}

// --- Plans ---

TEST(Plan, tells_the_layout_of_outputs) {
  Fixture fixture;
  CPlan plan;
  ASSERT_EQ(fixture.plan(&plan), PULLBACK_OK);
  DLTensor y{};
  ASSERT_EQ(pullback_plan_tensor(plan.get(), "y", &y), PULLBACK_OK);
  EXPECT_EQ(y.data, nullptr);
  EXPECT_EQ(y.byte_offset, 0u);
  EXPECT_EQ(y.device.device_type, kDLCPU);
  ASSERT_EQ(y.ndim, 2);
  EXPECT_EQ(y.shape[0], 2);
  EXPECT_EQ(y.shape[1], 3);
  EXPECT_EQ(y.dtype.code, kDLFloat);
  EXPECT_EQ(y.dtype.bits, 32);
  EXPECT_EQ(y.dtype.lanes, 1);

  DLTensor mask{};
  ASSERT_EQ(pullback_plan_tensor(plan.get(), "mask", &mask), PULLBACK_OK);
  EXPECT_EQ(mask.ndim, -1);
  EXPECT_EQ(pullback_plan_tensor(plan.get(), "z", &mask), PULLBACK_INVALID_ARGUMENT);
  EXPECT_MESSAGE("entmax: tensor: expected x, alpha_per_row,");
}

TEST(Plan, of_another_op_is_refused) {
  Fixture fixture;
  CPlan plan;
  ASSERT_EQ(fixture.plan(&plan), PULLBACK_OK);
  const pullback_segment_tensors tensors = PULLBACK_SEGMENT_TENSORS_INIT;
  EXPECT_EQ(pullback_segment_run(plan.get(), nullptr, &tensors, nullptr, 0),
            PULLBACK_INVALID_ARGUMENT);
  EXPECT_STREQ(pullback_last_error(),
               "segment: plan: expected a plan of segment, got a plan of "
               "entmax");
}

TEST(Plan, outlives_the_descriptions_it_was_made_from) {
  CPlan plan;
  {
    Fixture fixture;
    ASSERT_EQ(fixture.plan(&plan), PULLBACK_OK);
    std::memset(static_cast<void*>(&fixture.dl_x), 0xff, sizeof(fixture.dl_x));
  }
  DLTensor x{};
  ASSERT_EQ(pullback_plan_tensor(plan.get(), "x", &x), PULLBACK_OK);
  EXPECT_EQ(x.shape[1], 3);
}

TEST(Run, bad_pointers_are_refused_before_anything_is_written) {
  Fixture fixture;
  CPlan plan;
  ASSERT_EQ(fixture.plan(&plan), PULLBACK_OK);
  const driver::HostTensor y = allocate(plan, "y");
  const driver::HostTensor untouched(y.spec());
  pullback_entmax_tensors tensors = PULLBACK_ENTMAX_TENSORS_INIT;
  tensors.y = y.data();
  const auto workspace = workspace_of(plan);
  const auto run = [&] {
    return pullback_entmax_run(plan.get(), nullptr, &tensors, workspace.get().data,
                               workspace.get().bytes);
  };
  EXPECT_EQ(run(), PULLBACK_INVALID_ARGUMENT);
  EXPECT_STREQ(pullback_last_error(), "entmax: x: expected a data pointer, got null");
  tensors.x = static_cast<const char*>(fixture.x.data()) + 1;
  EXPECT_EQ(run(), PULLBACK_INVALID_ARGUMENT);
  EXPECT_MESSAGE("entmax: x: expected a pointer aligned to its 4-byte elements");
  tensors.x = y.data();
  EXPECT_EQ(run(), PULLBACK_INVALID_ARGUMENT);
  EXPECT_MESSAGE("expected memory of its own, got overlap with");
  EXPECT_TRUE(driver::same_bits(y, untouched));
}

}  // namespace
}  // namespace pullback::testing
