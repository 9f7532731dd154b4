#include "pullback/sparsity.hpp"

#include <memory>
#include <vector>

#include "capi/common.hpp"
#include "core/check.hpp"

using namespace pullback;
using namespace pullback::capi;

namespace {

// Overwrites the default in `list` when the caller gave one.
void read_list(std::string_view function, std::string_view name, const std::int64_t* values,
               std::size_t count, std::vector<std::int64_t>& list) {
  if (values == nullptr) {
    Checker(function).that(count == 0, name, "an array with its length", "NULL with a length");
    return;
  }
  Checker(function).that(count <= 1u << 20, name, "at most 2^20 entries", std::to_string(count));
  list.assign(values, values + count);
}

// What every pattern has; `known` are the flags that it takes.
template <class C, class Sparsity>
void read_common(std::string_view function, const C& given, std::uint64_t known,
                 Sparsity& sparsity) {
  sparsity.num_heads = given.num_heads;
  sparsity.block = given.block;
  if constexpr (requires { given.flags; }) {
    check_flags(function, given.flags, known);
    sparsity.attention = given.flags & PULLBACK_UNIDIRECTIONAL ? SparsityDirection::unidirectional
                                                               : SparsityDirection::bidirectional;
    if constexpr (requires { sparsity.different_layout_per_head; }) {
      sparsity.different_layout_per_head = given.flags & PULLBACK_DIFFERENT_LAYOUT_PER_HEAD;
    }
    if constexpr (requires { sparsity.horizontal_global_attention; }) {
      sparsity.horizontal_global_attention = given.flags & PULLBACK_HORIZONTAL_GLOBAL;
      sparsity.trim_above_diagonal = !(given.flags & PULLBACK_KEEP_ABOVE_DIAGONAL);
    }
  }
}

// `fill(given, sparsity)` reads what the pattern has besides.
template <class Sparsity, class C, class Fill>
pullback_status layout_of(std::string_view function, const C* sparsity, const C& defaults,
                          std::uint64_t known_flags, std::int64_t seq_len,
                          pullback_block_layout** layout, Fill fill) {
  return guarded([&] {
    check_not_null(function, "layout", layout);
    const C given = read_struct(function, "sparsity", sparsity, defaults);
    Sparsity ours;
    read_common(function, given, known_flags, ours);
    fill(given, ours);
    auto made = std::make_unique<pullback_block_layout>();
    made->layout = std::make_shared<const BlockLayout>(make_layout(ours, seq_len));
    *layout = made.release();
  });
}

constexpr std::uint64_t kAllFlags = PULLBACK_UNIDIRECTIONAL | PULLBACK_DIFFERENT_LAYOUT_PER_HEAD |
                                    PULLBACK_HORIZONTAL_GLOBAL | PULLBACK_KEEP_ABOVE_DIAGONAL;

}  // namespace

pullback_status pullback_dense_layout(const pullback_dense_sparsity* sparsity, int64_t seq_len,
                                      pullback_block_layout** layout) {
  return layout_of<DenseSparsity>("dense_layout", sparsity, PULLBACK_DENSE_SPARSITY_INIT, 0,
                                  seq_len, layout, [](const auto&, DenseSparsity&) {});
}

pullback_status pullback_fixed_layout(const pullback_fixed_sparsity* sparsity, int64_t seq_len,
                                      pullback_block_layout** layout) {
  return layout_of<FixedSparsity>("fixed_layout", sparsity, PULLBACK_FIXED_SPARSITY_INIT, kAllFlags,
                                  seq_len, layout, [](const auto& given, FixedSparsity& ours) {
                                    ours.num_local_blocks = given.num_local_blocks;
                                    ours.num_global_blocks = given.num_global_blocks;
                                    ours.num_different_global_patterns =
                                        given.num_different_global_patterns;
                                  });
}

pullback_status pullback_variable_layout(const pullback_variable_sparsity* sparsity,
                                         int64_t seq_len, pullback_block_layout** layout) {
  constexpr std::string_view function = "variable_layout";
  return layout_of<VariableSparsity>(
      function, sparsity, PULLBACK_VARIABLE_SPARSITY_INIT, kAllFlags, seq_len, layout,
      [&](const auto& given, VariableSparsity& ours) {
        ours.num_random_blocks = given.num_random_blocks;
        ours.seed = given.seed;
        read_list(function, "local_window_blocks", given.local_window_blocks,
                  given.num_local_window_blocks, ours.local_window_blocks);
        read_list(function, "global_block_indices", given.global_block_indices,
                  given.num_global_block_indices, ours.global_block_indices);
        if (given.global_block_end_indices) {
          read_list(function, "global_block_end_indices", given.global_block_end_indices,
                    ours.global_block_indices.size(), ours.global_block_end_indices);
        }
      });
}

pullback_status pullback_bigbird_layout(const pullback_bigbird_sparsity* sparsity, int64_t seq_len,
                                        pullback_block_layout** layout) {
  return layout_of<BigBirdSparsity>("bigbird_layout", sparsity, PULLBACK_BIGBIRD_SPARSITY_INIT,
                                    PULLBACK_UNIDIRECTIONAL | PULLBACK_DIFFERENT_LAYOUT_PER_HEAD,
                                    seq_len, layout, [](const auto& given, BigBirdSparsity& ours) {
                                      ours.num_random_blocks = given.num_random_blocks;
                                      ours.num_sliding_window_blocks =
                                          given.num_sliding_window_blocks;
                                      ours.num_global_blocks = given.num_global_blocks;
                                      ours.seed = given.seed;
                                    });
}

pullback_status pullback_bslongformer_layout(const pullback_bslongformer_sparsity* sparsity,
                                             int64_t seq_len, pullback_block_layout** layout) {
  constexpr std::string_view function = "bslongformer_layout";
  return layout_of<BSLongformerSparsity>(
      function, sparsity, PULLBACK_BSLONGFORMER_SPARSITY_INIT, PULLBACK_UNIDIRECTIONAL, seq_len,
      layout, [&](const auto& given, BSLongformerSparsity& ours) {
        ours.num_sliding_window_blocks = given.num_sliding_window_blocks;
        read_list(function, "global_block_indices", given.global_block_indices,
                  given.num_global_block_indices, ours.global_block_indices);
        if (given.global_block_end_indices) {
          read_list(function, "global_block_end_indices", given.global_block_end_indices,
                    ours.global_block_indices.size(), ours.global_block_end_indices);
        }
      });
}

pullback_status pullback_local_sliding_window_layout(
    const pullback_local_sliding_window_sparsity* sparsity, int64_t seq_len,
    pullback_block_layout** layout) {
  return layout_of<LocalSlidingWindowSparsity>(
      "local_sliding_window_layout", sparsity, PULLBACK_LOCAL_SLIDING_WINDOW_SPARSITY_INIT,
      PULLBACK_UNIDIRECTIONAL, seq_len, layout,
      [](const auto& given, LocalSlidingWindowSparsity& ours) {
        ours.num_sliding_window_blocks = given.num_sliding_window_blocks;
      });
}
