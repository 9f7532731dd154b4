#include "core/check.hpp"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>

#include "support/message_of.hpp"

namespace pullback {
namespace {

TEST(Checker, names_op_tensor_expected_and_got) {
  const Checker check("attention");
  const auto spec = TensorSpec::contiguous(DType::f32, {2, 3});
  EXPECT_EQ(message_of([&] {
              check.shape("q", spec, {2, 4});
            }),
            "attention: q: expected shape [2, 4], got [2, 3]");
  EXPECT_EQ(message_of([&] {
              check.dtype("q", spec, {DType::f64, DType::bf16});
            }),
            "attention: q: expected dtype f64 or bf16, got f32; convert the tensor first");
}

TEST(Checker, refuses_sizes_that_no_address_space_holds) {
  const Checker check("op");
  EXPECT_THROW(
      check.sane("x", TensorSpec::contiguous(DType::f32, {std::int64_t{1} << 40, 1 << 20})), Error);
  EXPECT_THROW(check.sane("x", TensorSpec::contiguous(DType::f32, {-1, 2})), Error);
  auto far = TensorSpec::contiguous(DType::f32, {2, 2});
  far.strides[0] = std::numeric_limits<std::int64_t>::min();
  EXPECT_THROW(check.sane("x", far), Error);
}

TEST(Checker, refuses_specs_that_no_constructor_makes) {
  const Checker check("op");
  auto spec = TensorSpec::contiguous(DType::f32, {2, 3});
  spec.rank = 9;
  EXPECT_EQ(message_of([&] { check.sane("x", spec); }),
            "op: x: expected at most 8 dimensions, got 9");
  EXPECT_EQ(message_of([&] {
              check.shape("x", spec, {2, 3});
            }),
            "op: x: expected shape [2, 3], got [2, 3, 0, 0, 0, 0, 0, 0]");
  spec.rank = 2;
  spec.dtype = static_cast<DType>(99);
  EXPECT_EQ(message_of([&] { check.sane("x", spec); }), "op: x: expected a dtype, got none");
}

TEST(Checker, bounds_the_sizes_of_empty_tensors_too) {
  const Checker check("op");
  const auto empty = [](std::int64_t a, std::int64_t b) {
    return TensorSpec::contiguous(DType::f32, {a, 0, b});
  };
  EXPECT_NO_THROW(check.sane("x", empty(1 << 20, std::int64_t{1} << 28)));
  EXPECT_EQ(
      message_of([&] { check.sane("x", empty(std::int64_t{1} << 30, 1 << 30)); }),
      "op: x: expected strides that reach at most 2^50 bytes, got f32 [1073741824, 0, 1073741824]");
  auto far = empty(2, 2);
  far.strides[0] = std::int64_t{1} << 50;
  EXPECT_THROW(check.sane("x", far), Error);
  far.shape[0] = 1;  // nobody steps along it
  EXPECT_NO_THROW(check.sane("x", far));
}

TEST(Checker, bounds_products_over_several_tensors) {
  const Checker check("op");
  constexpr std::int64_t kMany = std::int64_t{1} << 25;
  EXPECT_NO_THROW(check.product("rows", {kMany, kMany - 1, 0}));
  EXPECT_EQ(message_of([&] {
              check.product("rows", {kMany, 0, 2 * kMany});
            }),
            "op: rows: expected a product of at most 2^50, got [33554432, 0, 67108864]");
}

TEST(Checker, no_memory_is_an_error_of_the_op) {
  EXPECT_EQ(message_of([] { with_memory("op", []() -> int { throw std::bad_alloc(); }); }),
            "op: memory: expected enough for the tables of this problem, got none left");
  EXPECT_EQ(with_memory("op", [] { return 3; }), 3);
}

TEST(Checker, an_output_must_not_overlap_itself) {
  const Checker check("op");
  auto spec = TensorSpec::contiguous(DType::f32, {4, 3});
  EXPECT_NO_THROW(check.writable("y", spec));
  spec.strides = {0, 1};
  EXPECT_THROW(check.writable("y", spec), Error);
  spec.strides = {2, 1};
  EXPECT_THROW(check.writable("y", spec), Error);
  spec.strides = {1, -4};
  EXPECT_NO_THROW(check.writable("y", spec));
}

TEST(CheckRun, null_misaligned_overlapping_and_small) {
  alignas(256) std::array<float, 256> memory{};
  const auto spec = TensorSpec::contiguous(DType::f32, {8});
  const auto run = [&](const void* x, const void* y, Workspace workspace = {},
                       std::size_t needed = 0) {
    const TensorUse uses[] = {{"x", &spec, x, TensorUse::read},
                              {"y", &spec, y, TensorUse::write, true, "x"}};
    check_run("op", uses, needed, workspace);
  };
  EXPECT_NO_THROW(run(&memory[0], &memory[8]));
  EXPECT_NO_THROW(run(&memory[0], &memory[0]));  // in place is allowed for this pair
  EXPECT_EQ(message_of([&] { run(&memory[0], &memory[4]); }),
            "op: y: expected memory of its own, got overlap with x");
  EXPECT_EQ(message_of([&] { run(nullptr, &memory[4]); }),
            "op: x: expected a data pointer, got null");
  EXPECT_THROW(run(reinterpret_cast<char*>(&memory[0]) + 2, &memory[16]), Error);
  EXPECT_EQ(message_of([&] {
              run(&memory[0], &memory[8], {&memory[64], 100}, 128);
            }),
            "op: workspace: expected 128 bytes, got 100 bytes; allocate plan.workspace_bytes()");
  EXPECT_THROW(run(&memory[0], &memory[8], {&memory[65], 512}, 128), Error);
  EXPECT_EQ(message_of([&] {
              run(&memory[8], &memory[0], {&memory[0], 512}, 16);
            }),
            "op: y: expected memory of its own, got overlap with the workspace");
  EXPECT_EQ(message_of([&] {
              run(&memory[0], &memory[64], {&memory[0], 512}, 16);
            }),
            "op: x: expected memory of its own, got overlap with the workspace");
}

TEST(CheckRun, in_place_whatever_the_strides_of_sizes_of_1) {
  alignas(256) std::array<float, 256> memory{};
  const auto x = TensorSpec::contiguous(DType::f32, {4, 1, 8});
  auto y = x;
  const auto run = [&] {
    const TensorUse uses[] = {{"x", &x, &memory[0], TensorUse::read},
                              {"y", &y, &memory[0], TensorUse::write, true, "x"}};
    check_run("op", uses, 0, {});
  };
  y.strides[1] = 100;
  EXPECT_NO_THROW(run());
  y.strides[0] = 9;
  EXPECT_THROW(run(), Error);
}

TEST(CheckRun, interleaved_outputs_do_not_overlap) {
  alignas(256) std::array<float, 256> memory{};
  auto part = TensorSpec::contiguous(DType::f32, {4, 8});  // of a packed [4,3,8]
  part.strides = {24, 1};
  const auto run = [&](std::size_t x, std::size_t y) {
    const TensorUse uses[] = {{"x", &part, &memory[x], TensorUse::write},
                              {"y", &part, &memory[y], TensorUse::write}};
    check_run("op", uses, 0, {});
  };
  EXPECT_NO_THROW(run(0, 8));
  EXPECT_NO_THROW(run(16, 8));
  EXPECT_NO_THROW(run(20, 8));  // the last one wraps around: 20…23 and 0…3 of the next row
  EXPECT_THROW(run(0, 7), Error);
  EXPECT_THROW(run(17, 0), Error);
  EXPECT_THROW(run(8, 8), Error);
  part.strides = {-24, 1};
  EXPECT_NO_THROW(run(80, 88));
  EXPECT_THROW(run(80, 87), Error);
  part.strides = {24, 1};  // and of one row, which has no period
  const auto row = TensorSpec::contiguous(DType::f32, {1, 8});
  const auto run_row = [&](std::size_t x, std::size_t y) {
    const TensorUse uses[] = {{"x", &row, &memory[x], TensorUse::write},
                              {"y", &part, &memory[y], TensorUse::write}};
    check_run("op", uses, 0, {});
  };
  EXPECT_NO_THROW(run_row(72, 8));
  EXPECT_THROW(run_row(73, 8), Error);
  part.strides = {1, 16};  // columns of a [8,16] matrix
  EXPECT_NO_THROW(run(0, 4));
  EXPECT_THROW(run(0, 3), Error);
}

}  // namespace
}  // namespace pullback
