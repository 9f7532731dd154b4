// Constants that the host plans with and the kernels are compiled with. Plain C++20.
#pragma once

namespace pullback::attention {

inline constexpr int kSequenceThreads = 512;

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

}  // namespace pullback::attention
