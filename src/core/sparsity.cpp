#include "pullback/sparsity.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/check.hpp"

namespace pullback {
namespace {

using Direction = SparsityDirection;

// The layouts under construction, and the strokes that the patterns are drawn with. All column and
// row ranges are half open and cut at the edges.
class Canvas {
 public:
  Canvas(std::string_view name, std::int64_t num_heads, std::int64_t block, std::int64_t seq_len)
      : check_(name), heads_(num_heads) {
    check_.that(num_heads >= 1, "num_heads", "1 or more", fmt::format("{}", num_heads));
    check_.block(block);
    check_.that(seq_len >= 0 && seq_len % block == 0, "seq_len",
                fmt::format("a multiple of the block, {}", block), fmt::format("{}", seq_len),
                "pad the sequence, and hide the padding with key_padding_mask");
    nb_ = seq_len / block;
    constexpr std::int64_t kMostBlocks = std::int64_t{1} << 34;  // 16 GiB of bytes
    check_.that(nb_ == 0 || nb_ <= kMostBlocks / nb_ / num_heads, "seq_len",
                "a layout of at most 2^34 entries", shape_text(std::array{num_heads, nb_, nb_}));
    check_.that(num_heads <= BlockLayout::kMostRows / std::max<std::int64_t>(nb_, 1), "num_heads",
                "at most 2^28 block rows over all heads", shape_text(std::array{num_heads, nb_}));
    with_memory(name, [&] { present_.assign(static_cast<std::size_t>(heads_ * nb_ * nb_), 0); });
  }

  std::int64_t nb() const { return nb_; }

  void at_least(std::int64_t least, std::string_view what, std::int64_t value) const {
    check_.that(value >= least, what, fmt::format("{} or more", least), fmt::format("{}", value));
  }
  void at_most_nb(std::string_view what, std::int64_t value) const {
    check_.that(value <= nb_ || nb_ == 0, what,
                fmt::format("at most {}, the blocks of the sequence", nb_),
                fmt::format("{}", value));
  }
  const Checker& check() const { return check_; }

  void set(std::int64_t head, std::int64_t row, std::int64_t column) {
    present_[static_cast<std::size_t>((head * nb_ + row) * nb_ + column)] = 1;
  }
  void fill(std::int64_t head, std::int64_t row_begin, std::int64_t row_end,
            std::int64_t column_begin, std::int64_t column_end) {
    const auto cut = [&](std::int64_t value) { return std::clamp<std::int64_t>(value, 0, nb_); };
    for (std::int64_t r = cut(row_begin); r < cut(row_end); ++r) {
      for (std::int64_t c = cut(column_begin); c < cut(column_end); ++c) set(head, r, c);
    }
  }
  // A square on the diagonal; unidirectional, its lower triangle.
  void local_window(std::int64_t head, std::int64_t begin, std::int64_t end, Direction direction) {
    for (std::int64_t r = begin; r < std::min(end, nb_); ++r) {
      fill(head, r, r + 1, begin, direction == Direction::unidirectional ? r + 1 : end);
    }
  }
  void sliding_window(std::int64_t head, std::int64_t blocks) {
    const std::int64_t reach = blocks / 2;
    for (std::int64_t r = 0; r < nb_; ++r) fill(head, r, r + 1, r - reach, r + reach + 1);
  }
  void random_blocks(std::int64_t head, std::int64_t count, bool up_to_diagonal,
                     std::uint64_t seed);
  void trim_above_diagonal(std::int64_t head) {
    for (std::int64_t r = 0; r < nb_; ++r) {
      for (std::int64_t c = r + 1; c < nb_; ++c) {
        present_[static_cast<std::size_t>((head * nb_ + r) * nb_ + c)] = 0;
      }
    }
  }

  // `drawn` heads have been drawn, 1 or all.
  BlockLayout finish(std::int64_t drawn) {
    const auto plane = static_cast<std::ptrdiff_t>(nb_ * nb_);
    for (std::int64_t h = drawn; h < heads_; ++h) {
      std::copy_n(present_.begin(), plane, present_.begin() + h * plane);
    }
    return BlockLayout(heads_, nb_, nb_, present_);
  }

 private:
  Checker check_;
  std::int64_t heads_, nb_ = 0;
  std::vector<std::uint8_t> present_;
};

// Random bits from a key and a counter: SplitMix64's finisher (Steele, Lea, Flood 2014) applied
// three times, to the seed, with head and row added, and with the counter added.
std::uint64_t mixed(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::uint64_t random_below(std::uint64_t bound, std::uint64_t seed, std::int64_t head,
                           std::int64_t row, std::int64_t counter) {
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
  const auto place = static_cast<std::uint64_t>(head) << 32 | static_cast<std::uint64_t>(row);
  const std::uint64_t key = mixed(mixed(seed + kGolden) + (place + 1) * kGolden);
  const std::uint64_t bits = mixed(key + (static_cast<std::uint64_t>(counter) + 1) * kGolden);
  // bits * bound / 2^64, by halves. The bound is below 2^31: no value is favoured by more than
  // 2^-33.
  const std::uint64_t low = (bits & 0xffffffffu) * bound >> 32;
  return ((bits >> 32) * bound + low) >> 32;
}

// Floyd's sampling without replacement (Bentley and Floyd 1987): `count` draws, all subsets equally
// likely.
void Canvas::random_blocks(std::int64_t head, std::int64_t count, bool up_to_diagonal,
                           std::uint64_t seed) {
  std::vector<std::int64_t> chosen_in(static_cast<std::size_t>(nb_), -1);  // the last row
  for (std::int64_t r = 0; r < nb_; ++r) {
    const std::int64_t pool = up_to_diagonal ? r + 1 : nb_;
    for (std::int64_t last = pool - std::min(count, pool); last < pool; ++last) {
      auto column = static_cast<std::int64_t>(
          random_below(static_cast<std::uint64_t>(last) + 1, seed, head, r, last));
      if (chosen_in[static_cast<std::size_t>(column)] == r) column = last;
      chosen_in[static_cast<std::size_t>(column)] = r;
      set(head, r, column);
    }
  }
}

using Range = std::pair<std::int64_t, std::int64_t>;

std::vector<Range> global_ranges(const Canvas& canvas, const std::vector<std::int64_t>& begins,
                                 const std::vector<std::int64_t>& ends) {
  if (!ends.empty()) {
    canvas.check().that(ends.size() == begins.size(), "global_block_end_indices",
                        fmt::format("{} values, one for each global_block_indices", begins.size()),
                        fmt::format("{}", ends.size()));
  }
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < begins.size(); ++i) {
    canvas.at_least(0, "global_block_indices", begins[i]);
    // An index past the sequence stays past it when cut, and then one more would overflow.
    const std::int64_t begin = std::min(begins[i], canvas.nb());
    const std::int64_t end = ends.empty() ? begin + 1 : ends[i];
    if (!ends.empty()) {
      canvas.check().that(begins[i] < end, "global_block_end_indices",
                          fmt::format("an end above its begin, {}", begins[i]),
                          fmt::format("{}", end));
    }
    ranges.emplace_back(begin, end);
  }
  return ranges;
}

void check_horizontal(const Canvas& canvas, bool horizontal, Direction direction) {
  canvas.check().that(!horizontal || direction == Direction::bidirectional,
                      "horizontal_global_attention", "false for unidirectional attention", "true",
                      "whole rows would look ahead");
}

}  // namespace

BlockLayout make_layout(const DenseSparsity& sparsity, std::int64_t seq_len) {
  Canvas canvas("DenseSparsity", sparsity.num_heads, sparsity.block, seq_len);
  canvas.fill(0, 0, canvas.nb(), 0, canvas.nb());
  return canvas.finish(1);
}

BlockLayout make_layout(const FixedSparsity& sparsity, std::int64_t seq_len) {
  Canvas canvas("FixedSparsity", sparsity.num_heads, sparsity.block, seq_len);
  const std::int64_t window = sparsity.num_local_blocks;
  const std::int64_t group = sparsity.num_global_blocks;
  const std::int64_t patterns = sparsity.num_different_global_patterns;
  const bool ahead = sparsity.attention == Direction::bidirectional;
  canvas.at_least(1, "num_local_blocks", window);
  canvas.at_least(1, "num_global_blocks", group);
  canvas.at_least(1, "num_different_global_patterns", patterns);
  canvas.check().that(window % group == 0, "num_global_blocks",
                      fmt::format("a divisor of num_local_blocks, {}", window),
                      fmt::format("{}", group));
  canvas.check().that(patterns == 1 || sparsity.different_layout_per_head,
                      "num_different_global_patterns", "1 when all heads have one layout",
                      fmt::format("{}", patterns), "set different_layout_per_head");
  canvas.check().that(
      patterns <= window / group, "num_different_global_patterns",
      fmt::format("at most num_local_blocks / num_global_blocks = {}", window / group),
      fmt::format("{}", patterns));
  check_horizontal(canvas, sparsity.horizontal_global_attention, sparsity.attention);

  const std::int64_t nb = canvas.nb();
  const std::int64_t width = std::min(group, nb);
  const std::int64_t drawn = sparsity.different_layout_per_head ? sparsity.num_heads : 1;
  for (std::int64_t h = 0; h < drawn; ++h) {
    // Beyond nb it makes no difference, and stays clear of overflow.
    const std::int64_t first = std::min(window - (1 + h % patterns) * group, nb);
    for (std::int64_t begin = 0; begin < nb; begin += std::min(window, nb - begin)) {
      const std::int64_t end = begin + std::min(window, nb - begin);
      canvas.local_window(h, begin, end, sparsity.attention);
      const bool is_short = end - begin < window;
      const std::int64_t global = is_short ? std::min(begin + first, nb - width) : begin + first;
      canvas.fill(h, ahead ? 0 : global, nb, global, global + width);
      if (sparsity.horizontal_global_attention) canvas.fill(h, global, global + width, 0, nb);
    }
    if (!ahead && sparsity.trim_above_diagonal) canvas.trim_above_diagonal(h);
  }
  return canvas.finish(drawn);
}

BlockLayout make_layout(const VariableSparsity& sparsity, std::int64_t seq_len) {
  Canvas canvas("VariableSparsity", sparsity.num_heads, sparsity.block, seq_len);
  const bool ahead = sparsity.attention == Direction::bidirectional;
  const auto& windows = sparsity.local_window_blocks;
  canvas.at_least(0, "num_random_blocks", sparsity.num_random_blocks);
  canvas.at_most_nb("num_random_blocks", sparsity.num_random_blocks);
  canvas.check().that(!windows.empty(), "local_window_blocks", "one size or more", "none");
  for (std::int64_t blocks : windows) canvas.at_least(1, "local_window_blocks", blocks);
  check_horizontal(canvas, sparsity.horizontal_global_attention, sparsity.attention);
  const auto globals =
      global_ranges(canvas, sparsity.global_block_indices, sparsity.global_block_end_indices);

  const std::int64_t nb = canvas.nb();
  const bool trim = !ahead && sparsity.trim_above_diagonal;
  const std::int64_t drawn = sparsity.different_layout_per_head ? sparsity.num_heads : 1;
  for (std::int64_t h = 0; h < drawn; ++h) {
    canvas.random_blocks(h, sparsity.num_random_blocks, trim, sparsity.seed);
    std::size_t index = 0;
    for (std::int64_t begin = 0; begin < nb;) {
      const std::int64_t end = begin + std::min(windows[index], nb - begin);
      canvas.local_window(h, begin, end, sparsity.attention);
      if (index + 1 < windows.size()) ++index;
      begin = end;
    }
    for (const auto& [begin, end] : globals) {
      canvas.fill(h, ahead ? 0 : begin, nb, begin, end);
      if (sparsity.horizontal_global_attention) canvas.fill(h, begin, end, 0, nb);
    }
    if (trim) canvas.trim_above_diagonal(h);
  }
  return canvas.finish(drawn);
}

BlockLayout make_layout(const BigBirdSparsity& sparsity, std::int64_t seq_len) {
  Canvas canvas("BigBirdSparsity", sparsity.num_heads, sparsity.block, seq_len);
  const bool ahead = sparsity.attention == Direction::bidirectional;
  const std::int64_t nb = canvas.nb();
  canvas.at_least(0, "num_random_blocks", sparsity.num_random_blocks);
  canvas.at_most_nb("num_random_blocks", sparsity.num_random_blocks);
  canvas.at_least(1, "num_sliding_window_blocks", sparsity.num_sliding_window_blocks);
  canvas.at_most_nb("num_sliding_window_blocks", sparsity.num_sliding_window_blocks);
  canvas.at_least(0, "num_global_blocks", sparsity.num_global_blocks);
  canvas.at_most_nb("num_global_blocks", sparsity.num_global_blocks);

  const std::int64_t drawn = sparsity.different_layout_per_head ? sparsity.num_heads : 1;
  for (std::int64_t h = 0; h < drawn; ++h) {
    canvas.random_blocks(h, sparsity.num_random_blocks, !ahead, sparsity.seed);
    canvas.sliding_window(h, sparsity.num_sliding_window_blocks);
    canvas.fill(h, 0, sparsity.num_global_blocks, 0, nb);
    canvas.fill(h, 0, nb, 0, sparsity.num_global_blocks);
    if (!ahead) canvas.trim_above_diagonal(h);
  }
  return canvas.finish(drawn);
}

BlockLayout make_layout(const BSLongformerSparsity& sparsity, std::int64_t seq_len) {
  Canvas canvas("BSLongformerSparsity", sparsity.num_heads, sparsity.block, seq_len);
  const std::int64_t nb = canvas.nb();
  canvas.at_least(1, "num_sliding_window_blocks", sparsity.num_sliding_window_blocks);
  canvas.at_most_nb("num_sliding_window_blocks", sparsity.num_sliding_window_blocks);
  canvas.sliding_window(0, sparsity.num_sliding_window_blocks);
  for (const auto& [begin, end] :
       global_ranges(canvas, sparsity.global_block_indices, sparsity.global_block_end_indices)) {
    canvas.fill(0, begin, end, 0, nb);
    canvas.fill(0, 0, nb, begin, end);
  }
  if (sparsity.attention == Direction::unidirectional) canvas.trim_above_diagonal(0);
  return canvas.finish(1);
}

BlockLayout make_layout(const LocalSlidingWindowSparsity& sparsity, std::int64_t seq_len) {
  Canvas canvas("LocalSlidingWindowSparsity", sparsity.num_heads, sparsity.block, seq_len);
  canvas.at_least(1, "num_sliding_window_blocks", sparsity.num_sliding_window_blocks);
  canvas.at_most_nb("num_sliding_window_blocks", sparsity.num_sliding_window_blocks);
  canvas.sliding_window(0, sparsity.num_sliding_window_blocks);
  if (sparsity.attention == Direction::unidirectional) canvas.trim_above_diagonal(0);
  return canvas.finish(1);
}

}  // namespace pullback
