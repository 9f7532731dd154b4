// A run allocates nothing: this program counts what passes through operator new.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "capi/c_ops.hpp"
#include "driver/driver.hpp"

namespace {

std::atomic<std::int64_t> allocations = 0;

void* allocate(std::size_t bytes, std::size_t alignment) {
  ++allocations;
  // aligned_alloc wants whole multiples of the alignment.
  if (void* memory = std::aligned_alloc(alignment, (bytes / alignment + 1) * alignment)) {
    return memory;
  }
  throw std::bad_alloc();
}

// Out of line: GCC, which sees operator new by its name, takes an inlined free() for a mismatch.
[[gnu::noinline]] void release(void* memory) { std::free(memory); }

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
// The library's own would do, but a sanitizer brings others, whose memory is not for free().
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return allocate(bytes, alignof(std::max_align_t));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }

namespace pullback::testing {
namespace {

template <class Run>
std::int64_t allocations_of(const Run& run) {
  const std::int64_t before = allocations;
  run();
  return allocations - before;
}

TEST(Allocations, are_counted) {
  EXPECT_EQ(allocations_of([] {}), 0);
  EXPECT_EQ(allocations_of([] { ::operator delete(::operator new(1)); }), 1);
}

// With one thread: how oneTBB keeps its tasks is its own affair. Cases take turns with dtypes.
TEST(Allocations, no_run_of_an_op_makes_any) {
  std::size_t turn = 0;
  for (const driver::CaseLists& lists : driver::all_case_lists()) {
    for (const driver::Case& test : lists.cases()) {
      if (test.full_only) continue;
      const DType dtype = test.dtypes[turn++ % test.dtypes.size()];
      SCOPED_TRACE(std::string(lists.op) + " '" + test.name + "' " + std::string(name_of(dtype)));
      Random random(1);
      const auto session =
          driver::find_driver(test.op).prepare({.op = test.op,
                                                .inputs = test.inputs(dtype, random),
                                                .options = test.options,
                                                .device = Device::cpu(1),
                                                .variant = {}});
      EXPECT_EQ(allocations_of([&] { session->forward(); }), 0) << "forward";
      EXPECT_EQ(allocations_of([&] { session->backward(); }), 0) << "backward";
    }
  }
}

TEST(Allocations, the_c_abi_makes_none_either) {
  const HostTensor ids = tensor_of(DType::i64, {5}, {2, 0, 2, 9, 0});
  const DLTensor dl_ids = describe(ids);
  pullback_segment_permutation_problem problem = PULLBACK_SEGMENT_PERMUTATION_PROBLEM_INIT;
  problem.ids = &dl_ids;
  problem.num_segments = 3;
  pullback_plan_options options = PULLBACK_PLAN_OPTIONS_INIT;
  options.threads = 1;
  pullback_plan* made = nullptr;
  ASSERT_OK(pullback_segment_permutation_plan(&problem, &options, &made));
  const CPlan plan(made);
  const HostTensor permutation = allocate(plan, "permutation"), offsets = allocate(plan, "offsets");
  const auto workspace = workspace_of(plan);
  pullback_segment_permutation_tensors tensors = PULLBACK_SEGMENT_PERMUTATION_TENSORS_INIT;
  tensors.ids = ids.data();
  tensors.permutation = permutation.data();
  tensors.offsets = offsets.data();
  pullback_status status = PULLBACK_INTERNAL_ERROR;
  const auto run = [&] {
    status = pullback_segment_permutation_run(plan.get(), nullptr, &tensors, workspace.get().data,
                                              workspace.get().bytes);
  };
  EXPECT_EQ(allocations_of(run), 0);
  EXPECT_EQ(status, PULLBACK_OK) << pullback_last_error();
}

}  // namespace
}  // namespace pullback::testing
