// Block layouts and the sparsity patterns that make them are the same through the C ABI.
#include <vector>

#include "capi/c_ops.hpp"
#include "pullback/block_sparse.hpp"
#include "pullback/sparsity.hpp"

namespace pullback::testing {
namespace {

TEST(CBlockLayout, round_trip) {
  const std::vector<std::uint8_t> present = {1, 0, 1, 0, 0, 1};
  pullback_block_layout* made = nullptr;
  ASSERT_OK(pullback_block_layout_create(1, 2, 3, present.data(), &made));
  const CLayout layout(made);
  std::int64_t heads = 0, rows = 0, columns = 0, nnz = 0;
  ASSERT_OK(pullback_block_layout_size(layout.get(), &heads, &rows, &columns, &nnz));
  EXPECT_EQ(heads, 1);
  EXPECT_EQ(rows, 2);
  EXPECT_EQ(columns, 3);
  EXPECT_EQ(nnz, 3);
  std::vector<std::uint8_t> copy(6, 9);
  ASSERT_OK(pullback_block_layout_present(layout.get(), copy.data(), copy.size()));
  EXPECT_EQ(copy, present);
  EXPECT_EQ(pullback_block_layout_present(layout.get(), copy.data(), 5), PULLBACK_INVALID_ARGUMENT);

  const std::uint8_t two = 2;
  EXPECT_EQ(pullback_block_layout_create(1, 1, 1, &two, &made), PULLBACK_INVALID_ARGUMENT);
  EXPECT_EQ(pullback_block_layout_create(-1, 1, 1, &two, &made), PULLBACK_INVALID_ARGUMENT);
  EXPECT_EQ(pullback_block_layout_create(INT64_MAX, INT64_MAX, INT64_MAX, &two, &made),
            PULLBACK_INVALID_ARGUMENT);
}

std::vector<std::uint8_t> bytes_of(const CLayout& layout) {
  std::int64_t heads = 0, rows = 0, columns = 0;
  pullback_block_layout_size(layout.get(), &heads, &rows, &columns, nullptr);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(heads * rows * columns));
  pullback_block_layout_present(layout.get(), bytes.data(), bytes.size());
  return bytes;
}

template <class Make, class C, class Sparsity>
void expect_same_layout(Make make, const C& given, const Sparsity& sparsity) {
  pullback_block_layout* made = nullptr;
  ASSERT_OK(make(&given, 32 * 11, &made));
  EXPECT_EQ(bytes_of(CLayout(made)), make_layout(sparsity, 32 * 11).to_bytes());
}

TEST(CSparsity, defaults_are_those_of_cpp) {
  const auto same = [](auto make, auto given, auto sparsity) {
    given.block = sparsity.block = 32;
    expect_same_layout(make, given, sparsity);
  };
  same(pullback_dense_layout, pullback_dense_sparsity PULLBACK_DENSE_SPARSITY_INIT,
       DenseSparsity{});
  same(pullback_fixed_layout, pullback_fixed_sparsity PULLBACK_FIXED_SPARSITY_INIT,
       FixedSparsity{});
  same(pullback_variable_layout, pullback_variable_sparsity PULLBACK_VARIABLE_SPARSITY_INIT,
       VariableSparsity{});
  same(pullback_bigbird_layout, pullback_bigbird_sparsity PULLBACK_BIGBIRD_SPARSITY_INIT,
       BigBirdSparsity{});
  same(pullback_bslongformer_layout,
       pullback_bslongformer_sparsity PULLBACK_BSLONGFORMER_SPARSITY_INIT, BSLongformerSparsity{});
  same(pullback_local_sliding_window_layout,
       pullback_local_sliding_window_sparsity PULLBACK_LOCAL_SLIDING_WINDOW_SPARSITY_INIT,
       LocalSlidingWindowSparsity{});
}

TEST(CSparsity, every_parameter_arrives) {
  FixedSparsity fixed{2, 32, true, 6, 2, SparsityDirection::unidirectional, false, 3, false};
  pullback_fixed_sparsity c_fixed = PULLBACK_FIXED_SPARSITY_INIT;
  c_fixed = {
      sizeof(c_fixed),
      2,
      32,
      PULLBACK_UNIDIRECTIONAL | PULLBACK_DIFFERENT_LAYOUT_PER_HEAD | PULLBACK_KEEP_ABOVE_DIAGONAL,
      6,
      2,
      3};
  expect_same_layout(pullback_fixed_layout, c_fixed, fixed);

  VariableSparsity variable;
  variable.num_heads = 3;
  variable.block = 32;
  variable.different_layout_per_head = true;
  variable.num_random_blocks = 2;
  variable.local_window_blocks = {2, 3};
  variable.global_block_indices = {1, 5};
  variable.global_block_end_indices = {2, 7};
  variable.horizontal_global_attention = true;
  variable.seed = 5;
  const std::int64_t windows[] = {2, 3}, begins[] = {1, 5}, ends[] = {2, 7};
  const pullback_variable_sparsity c_variable = {
      sizeof(c_variable),
      3,
      32,
      PULLBACK_DIFFERENT_LAYOUT_PER_HEAD | PULLBACK_HORIZONTAL_GLOBAL,
      2,
      windows,
      2,
      begins,
      2,
      ends,
      5};
  expect_same_layout(pullback_variable_layout, c_variable, variable);

  BigBirdSparsity bigbird;
  bigbird.num_heads = 2;
  bigbird.block = 32;
  bigbird.different_layout_per_head = true;
  bigbird.num_random_blocks = 2;
  bigbird.num_sliding_window_blocks = 5;
  bigbird.num_global_blocks = 2;
  bigbird.seed = 11;
  expect_same_layout(pullback_bigbird_layout,
                     pullback_bigbird_sparsity{sizeof(pullback_bigbird_sparsity), 2, 32,
                                               PULLBACK_DIFFERENT_LAYOUT_PER_HEAD, 2, 5, 2, 11},
                     bigbird);

  BSLongformerSparsity longformer;
  longformer.block = 32;
  longformer.num_sliding_window_blocks = 1;
  longformer.global_block_indices = {2};
  longformer.global_block_end_indices = {4};
  longformer.attention = SparsityDirection::unidirectional;
  const std::int64_t begin = 2, end = 4;
  expect_same_layout(pullback_bslongformer_layout,
                     pullback_bslongformer_sparsity{sizeof(pullback_bslongformer_sparsity), 1, 32,
                                                    PULLBACK_UNIDIRECTIONAL, 1, &begin, 1, &end},
                     longformer);

  LocalSlidingWindowSparsity local;
  local.num_heads = 2;
  local.block = 32;
  local.num_sliding_window_blocks = 5;
  local.attention = SparsityDirection::bidirectional;
  expect_same_layout(pullback_local_sliding_window_layout,
                     pullback_local_sliding_window_sparsity{
                         sizeof(pullback_local_sliding_window_sparsity), 2, 32, 0, 5},
                     local);
}

TEST(CSparsity, bad_parameters_are_refused) {
  pullback_block_layout* made = nullptr;
  pullback_variable_sparsity variable = PULLBACK_VARIABLE_SPARSITY_INIT;
  variable.num_global_block_indices = 3;
  EXPECT_EQ(pullback_variable_layout(&variable, 64, &made), PULLBACK_INVALID_ARGUMENT);
  pullback_bigbird_sparsity bigbird = PULLBACK_BIGBIRD_SPARSITY_INIT;
  bigbird.flags = PULLBACK_HORIZONTAL_GLOBAL;
  EXPECT_EQ(pullback_bigbird_layout(&bigbird, 64, &made), PULLBACK_INVALID_ARGUMENT);
  const pullback_dense_sparsity dense = PULLBACK_DENSE_SPARSITY_INIT;
  EXPECT_EQ(pullback_dense_layout(&dense, 17, &made), PULLBACK_INVALID_ARGUMENT);
  EXPECT_EQ(made, nullptr);
}

}  // namespace
}  // namespace pullback::testing
