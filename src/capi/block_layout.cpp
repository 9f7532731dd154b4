#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <span>

#include "capi/common.hpp"
#include "core/check.hpp"

using namespace pullback::capi;

namespace {

// Bytes of [heads, rows, columns]. Throws where they could not be in memory.
std::size_t present_bytes(std::string_view function, std::int64_t heads, std::int64_t rows,
                          std::int64_t columns) {
  const auto spec = pullback::TensorSpec::contiguous(pullback::DType::u8, {heads, rows, columns});
  pullback::Checker(function).sane("layout", spec);
  return static_cast<std::size_t>(spec.numel());
}

}  // namespace

pullback_status pullback_block_layout_create(int64_t heads, int64_t rows, int64_t columns,
                                             const uint8_t* present,
                                             pullback_block_layout** layout) {
  return guarded([&] {
    constexpr std::string_view function = "block_layout_create";
    check_not_null(function, "layout", layout);
    const std::size_t bytes = present_bytes(function, heads, rows, columns);
    if (bytes > 0) check_not_null(function, "present", present);
    auto made = std::make_unique<pullback_block_layout>();
    made->layout = std::make_shared<const pullback::BlockLayout>(heads, rows, columns,
                                                                 std::span(present, bytes));
    *layout = made.release();
  });
}

void pullback_block_layout_destroy(pullback_block_layout* layout) { delete layout; }

pullback_status pullback_block_layout_size(const pullback_block_layout* layout, int64_t* heads,
                                           int64_t* rows, int64_t* columns, int64_t* nnz) {
  return guarded([&] {
    check_not_null("block_layout_size", "layout", layout);
    if (heads) *heads = layout->layout->heads();
    if (rows) *rows = layout->layout->rows();
    if (columns) *columns = layout->layout->columns();
    if (nnz) *nnz = layout->layout->nnz();
  });
}

pullback_status pullback_block_layout_present(const pullback_block_layout* layout, uint8_t* present,
                                              size_t bytes) {
  return guarded([&] {
    constexpr std::string_view function = "block_layout_present";
    check_not_null(function, "layout", layout);
    const pullback::BlockLayout& from = *layout->layout;
    const std::size_t needed = present_bytes(function, from.heads(), from.rows(), from.columns());
    pullback::Checker(function).that(bytes == needed, "bytes", fmt::format("{}", needed),
                                     fmt::format("{}", bytes), "heads * rows * columns");
    if (needed == 0) return;
    check_not_null(function, "present", present);
    std::ranges::copy(from.to_bytes(), present);
  });
}
