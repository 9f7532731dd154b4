#include <gtest/gtest.h>

#include "pullback/block_sparse.hpp"
#include "pullback/error.hpp"

namespace pullback {
namespace {

const std::vector<std::uint8_t> kPresent = {1, 0, 1, 0, 1, 0,   // head 0, 2 x 3
                                            0, 0, 0, 1, 1, 1};  // head 1
const BlockLayout kLayout(2, 2, 3, kPresent);

std::vector<std::int64_t> ranks(std::span<const BlockLayout::Block> blocks) {
  std::vector<std::int64_t> result;
  for (const auto& block : blocks) result.push_back(block.rank);
  return result;
}

TEST(BlockLayout, ranks_follow_head_row_column) {
  EXPECT_EQ(kLayout.nnz(), 6);
  EXPECT_EQ(ranks(kLayout.row(0, 0)), (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(ranks(kLayout.row(0, 1)), (std::vector<std::int64_t>{2}));
  EXPECT_TRUE(kLayout.row(1, 0).empty());
  EXPECT_EQ(ranks(kLayout.column(0, 1)), (std::vector<std::int64_t>{2}));
  EXPECT_EQ(ranks(kLayout.column(1, 2)), (std::vector<std::int64_t>{5}));
  EXPECT_EQ(kLayout.rank(0, 0, 2), 1);
  EXPECT_EQ(kLayout.rank(0, 0, 1), -1);
  EXPECT_EQ(kLayout.rank(1, 0, 0), -1);
  EXPECT_TRUE(kLayout.present(1, 1, 0));
}

TEST(BlockLayout, transposes_each_head) {
  const BlockLayout transposed = kLayout.transposed();
  EXPECT_EQ(transposed.rows(), 3);
  EXPECT_EQ(transposed.columns(), 2);
  for (const auto& block : kLayout.blocks()) {
    EXPECT_TRUE(transposed.present(block.head, block.column, block.row));
  }
  EXPECT_EQ(transposed.rank(0, 2, 0), 2);
  EXPECT_EQ(transposed.transposed(), kLayout);
}

TEST(BlockLayout, gives_back_what_it_was_made_from) { EXPECT_EQ(kLayout.to_bytes(), kPresent); }

TEST(BlockLayout, may_be_empty) {
  EXPECT_EQ(BlockLayout(0, 5, 5, {}).nnz(), 0);
  EXPECT_EQ(BlockLayout(2, 3, 0, {}).row(1, 2).size(), 0u);
  EXPECT_EQ(BlockLayout(2, 0, 3, {}).column(1, 2).size(), 0u);
}

TEST(BlockLayout, refuses_bad_input) {
  EXPECT_THROW(BlockLayout(-1, 2, 3, {}), Error);
  EXPECT_THROW(BlockLayout(2, 2, 2, kPresent), Error);
  EXPECT_THROW(BlockLayout(0, 2, 2, kPresent), Error);
  EXPECT_THROW(BlockLayout(std::int64_t{1} << 31, 1, 1, {}), Error);
  EXPECT_THROW(BlockLayout((std::int64_t{1} << 31) - 1, (std::int64_t{1} << 31) - 1, 0, {}), Error);
  const std::uint8_t two[] = {0, 2};
  try {
    BlockLayout(1, 1, 2, two);
    ADD_FAILURE() << "2 was accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "BlockLayout: present: expected 0 or 1, got 2 at head 0, row 0, column 1");
  }
}

}  // namespace
}  // namespace pullback
