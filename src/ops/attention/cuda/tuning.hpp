// Constants that the host plans with and the kernels are compiled with. Plain C++20.
#pragma once

namespace pullback::attention {

inline constexpr int kSequenceThreads = 512;

// smxx_plain_forward.cuh
inline constexpr int kPlainWarps = 8;
inline constexpr int kPlainRows = 16;  // of a thread block

// Kernels exist for these widths of a head: the larger of D and Dv is padded to one of them.
inline constexpr int kHeadWidths[] = {32, 64, 96, 128, 192, 256};

inline constexpr int head_width(int head_dim, int value_dim) {
  const int needed = head_dim > value_dim ? head_dim : value_dim;
  for (int width : kHeadWidths) {
    if (needed <= width) return width;
  }
  return 0;
}

// Shared memory that a block can have.
inline constexpr int max_shared_bytes(int arch) {
  return arch == 90 || arch == 100 ? 227 * 1024 : arch == 80 ? 163 * 1024 : 99 * 1024;
}

// The forward pass on tensor cores: a thread block takes `rows` queries, `keys` keys at a time, and
// has `slots` tiles of keys or values in shared memory, and one of a bias.
struct ForwardTile {
  int width, rows, keys, warps, slots;
  int blocks;  // that a multiprocessor is to hold

  constexpr int shared_bytes(int element_bytes, bool staged_bias) const {
    return ((rows + slots * keys) * width + (staged_bias ? rows * keys : 0)) * element_bytes;
  }
};

// With a block mask a tile of keys is made of parts, each of that many neighbouring keys
// (blocks.cuh has room for no more).
inline constexpr int part_keys(const ForwardTile& tile) { return tile.keys < 64 ? tile.keys : 64; }

// Smaller scales, and negative ones, do not go into the exponential: its argument has to keep the
// order of the scores.
inline constexpr float kLeastScale = 1e-30f;

// What a kernel can do; the more, the more registers it takes.
enum class ForwardKind {
  plain,         // scale above 0, rows in 16-byte pieces
  blocks,        // plain, and a block mask
  large_blocks,  // the same in larger tiles, where there are such
  softcap,       // plain, and softcap, of any scale
  dropout,       // plain, and dropout
  bias,          // plain, and a bias in 16-byte pieces
  bias_dropout,  // both of these
  terms,         // all of these, with any scale, softcap and bias
  elements,      // terms, with any strides and alignment
};
inline constexpr ForwardKind kForwardKinds[] = {
    ForwardKind::plain,        ForwardKind::blocks,  ForwardKind::large_blocks,
    ForwardKind::softcap,      ForwardKind::dropout, ForwardKind::bias,
    ForwardKind::bias_dropout, ForwardKind::terms,   ForwardKind::elements};
constexpr bool is_blocks(ForwardKind kind) {
  return kind == ForwardKind::blocks || kind == ForwardKind::large_blocks;
}
// Blocks from this size on leave no more tiles empty when these have as many queries.
inline constexpr int kLargeBlock = 128;

constexpr bool is_hopper_only(ForwardKind kind) {
  return kind == ForwardKind::softcap || kind == ForwardKind::bias_dropout;
}
constexpr bool has_kind(ForwardKind kind, int width, int element_bytes) {
  if (kind == ForwardKind::large_blocks) return element_bytes == 2 && width <= 128;
  if (is_hopper_only(kind)) return false;
  return kind != ForwardKind::bias || element_bytes == 2;
}
// Whether tiles of a bias pass through shared memory.
constexpr bool stages_bias(ForwardKind kind, int element_bytes) {
  return kind >= ForwardKind::bias && element_bytes == 2;
}

// `rows` are the same for all kinds without a block mask.
inline constexpr ForwardTile forward_tile(int width, int element_bytes, ForwardKind kind,
                                          int arch) {
  const bool small = max_shared_bytes(arch) < 163 * 1024;
  const bool large = max_shared_bytes(arch) > 163 * 1024;
  const bool plain = kind == ForwardKind::plain || kind == ForwardKind::large_blocks ||
                     (kind == ForwardKind::bias && large);
  const bool terms = kind == ForwardKind::terms;
  if (element_bytes == 4) {
    if (width <= 128) return {width, 128, 32, 4, 2, small || (width > 64 && arch == 80) ? 1 : 2};
    if (small && width == 256) return {width, 32, 32, 2, 2, 1};
    // Eight warps of a multiprocessor: of heads of 192 it holds two blocks.
    if (large && width == 256) return {width, 128, 32, 8, 2, 1};
    return {width, 64, 32, 4, 2, 1};
  }
  if (kind == ForwardKind::blocks) {
    if (width <= 64) return {width, 64, arch < 90 ? 64 : 128, 2, 2, 4};
    if (width <= 128) return {width, 64, 64, 2, 2, 4};
    return {width, 64, 64, 4, 2, 2};
  }
  if (width > 128) {
    if (large) return {width, 64, plain && width == 192 ? 96 : 64, 4, 2, 2};
    if (width == 256 && small) return {width, 64, plain ? 64 : 32, 4, 2, 1};
    return {width, 128, plain ? 64 : 32, 8, 2, 1};
  }
  if (kind == ForwardKind::elements || (small && width > 64)) return {width, 128, 64, 8, 2, 1};
  if (arch < 90) return {width, 128, plain ? 64 : 32, 4, 2, 2};
  if (plain) return {width, 128, width <= 64 ? 128 : 64, 4, 2, 2};
  return {width, 128, width <= 64 || (width == 96 && !terms) ? 64 : 32, 4, 2, 2};
}

// The forward pass on Hopper (sm90_forward.cuh): a warpgroup that copies, and `groups` of 64
// queries.
struct HopperTile {
  static constexpr int kGroupRows = 64;

  ForwardKind kind;
  int width, keys, groups;
  int slots, query_slots;              // tiles of keys or values, and of queries, in shared memory
  int copy_registers, work_registers;  // of a thread
  bool persistent;                     // thread blocks take one tile of queries after the other
  int resident = 1;                    // thread blocks that a multiprocessor holds

  constexpr int rows() const { return groups * kGroupRows; }
  constexpr int part_keys() const { return is_blocks(kind) ? 64 : keys; }
  constexpr int threads() const { return (groups + 1) * 128; }
  constexpr int panels() const { return (width + 63) / 64; }  // of 64 columns, 128 bytes
  constexpr bool bias() const {
    return kind == ForwardKind::bias || kind == ForwardKind::bias_dropout;
  }
  constexpr bool dropout() const {
    return kind == ForwardKind::dropout || kind == ForwardKind::bias_dropout;
  }
  // Tiles of a bias, one for each tile of keys.
  constexpr int bias_slots() const { return bias() ? slots / 2 : 0; }
  // Barriers and notes; tiles, which begin at a multiple of 1024.
  static constexpr int kNoteBytes = 1024;
  constexpr int shared_bytes() const {
    return kNoteBytes + (query_slots * rows() + slots * keys) * panels() * 128 +
           bias_slots() * rows() * keys * 2;
  }
};
constexpr bool has_hopper_tile(ForwardKind kind, int width, int element_bytes) {
  return kind < ForwardKind::terms && width >= 64 && element_bytes == 2 &&
         (!is_blocks(kind) || width <= 128);
}
constexpr HopperTile hopper_tile(ForwardKind kind, int width) {
  if (kind == ForwardKind::blocks) {
    return {kind, width, width == 64 ? 128 : 64, 1, 6, 1, 48, 208, false, 2};
  }
  if (kind == ForwardKind::large_blocks) {
    return {kind, width, 128, 2, width == 64 ? 8 : 6, 1, 56, 224, false};
  }
  if (width == 64) {
    if (kind == ForwardKind::softcap) return {kind, width, 128, 2, 8, 2, 56, 224, true};
    const bool plain = kind == ForwardKind::plain;
    return {kind, width, 128, 3, plain ? 8 : 4, plain ? 2 : 1, 32, 160, plain};
  }
  if (kind == ForwardKind::bias || kind == ForwardKind::bias_dropout) {
    return {kind, width, width <= 128 ? 128 : 64, 2, 4, 1, 56, 224, false};
  }
  if (width <= 128) return {kind, width, 128, 2, 5, 2, 56, 224, true};
  return {kind, width, width == 192 ? 96 : 64, 2, 4, 1, 40, 232, false};
}
// Heads of 64 are little work for what a tile begins and ends with: the shortest rows are left to
// the other kernels, whose tiles are smaller.
constexpr int hopper_least_keys(int width) { return width > 64 ? 0 : 320; }

}  // namespace pullback::attention
