// Which blocks of a block-sparse matrix exist: for block_softmax, block_matmul and attention.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pullback/export.hpp"

namespace pullback {

// Which blocks exist, with the look-up tables that the ops walk. Immutable and shared.
class PULLBACK_API BlockLayout {
 public:
  struct Block {
    std::int32_t head, row, column;
    std::int64_t rank;  // position along nnz
  };

  // Over all heads there are at most this many block rows, block columns, and heads.
  static constexpr std::int64_t kMostRows = std::int64_t{1} << 28;

  // `present` is [H,R,C] row-major, 0 or 1. Throws Error on negative sizes, another length or other
  // values. Rows and columns without a block are fine, and so are sizes of 0.
  BlockLayout(std::int64_t heads, std::int64_t rows, std::int64_t columns,
              std::span<const std::uint8_t> present);

  std::int64_t heads() const { return heads_; }
  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return columns_; }
  std::int64_t nnz() const { return static_cast<std::int64_t>(by_row_.size()); }

  // The blocks of one row by column, or of one column by row. A row's ranks are consecutive.
  // Arguments must be in range.
  std::span<const Block> row(std::int64_t head, std::int64_t row) const;
  std::span<const Block> column(std::int64_t head, std::int64_t column) const;
  // All blocks in rank order.
  std::span<const Block> blocks() const { return by_row_; }
  // -1 where no block is.
  std::int64_t rank(std::int64_t head, std::int64_t row, std::int64_t column) const;
  bool present(std::int64_t head, std::int64_t row, std::int64_t column) const {
    return rank(head, row, column) >= 0;
  }

  // Each head's rows and columns exchanged; its ranks follow its own (head, row, column) order.
  BlockLayout transposed() const;
  // [H,R,C] of 0 and 1: what a layout is made from.
  std::vector<std::uint8_t> to_bytes() const;

  friend bool operator==(const BlockLayout& a, const BlockLayout& b);

 private:
  void build_tables(std::span<const std::uint8_t> present);

  std::int64_t heads_, rows_, columns_;
  std::vector<Block> by_row_, by_column_;
  std::vector<std::int64_t> row_start_, column_start_;  // [H*R+1], [H*C+1]
};

}  // namespace pullback
