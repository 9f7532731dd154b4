// Constants that the host's choice of kernels and the kernels themselves share. Plain C++20.
#pragma once

namespace pullback::entmax {

// Which formula serves which alpha; README.md has the table.
enum class Family {
  invalid,    // alpha below 1, infinite or NaN: rows of NaN
  softmax,    // 1
  near_one,   // up to 1.125: p = exp(log1p(b (z - c)) / b), b = alpha - 1; loses nothing as b -> 0
  entmax15,   // 1.5
  general,    // up to 2: p = (b z - theta)^(1/b)
  sparsemax,  // 2
  steep,      // above 2: the same, in double: p has an infinite slope at the edge of the support
};

inline constexpr int kOffsetsThreads = 1024;

// smxx_hide.cuh: warps of a block, vectors of a thread.
inline constexpr int kHideWarps = 8;
inline constexpr int kHideVectors = 4;

// smxx_forward_any.cuh: threads of a block; a row takes a warp or the block.
inline constexpr int kAnyWarps = 8;

// Blocks of a cluster at most.
inline constexpr int kMaxBlocks = 8;

// smxx_forward_lanes.cuh: warps of a block.
inline constexpr int kLanesWarps = 4;

// smxx_forward_registers.cuh: warps of a block where a warp has a row of its own.
inline constexpr int kSingleWarps = 8;
// Whether a group computes more than one row, and loads the next one while it works on this one:
// where the registers for it cost less than the wait.
constexpr bool walks_over_rows(Family family, int element_bytes, int warps) {
  return family == Family::softmax && element_bytes == 2 && warps >= 4 && warps <= 8;
}

// smxx_forward_resident.cuh: vectors of a thread, and how many of a lane's view of the threads'
// largest elements the first bound is made from.
inline constexpr int kResidentVectors = 16;
inline constexpr int kBoundTops = 8;
// Whether the elements that take part are listed (f32) or counted by their value (16 bits): where
// powers cost much, and counting costs little.
constexpr bool collects(Family family, int element_bytes, bool clustered) {
  return family == Family::general || family == Family::near_one ||
         (family == Family::entmax15 && element_bytes == 2 && !clustered);
}

// smxx_forward_stream.cuh: warps of a block where a warp has a row of its own, vectors that a lane
// loads at a time, and the length of a lane's list.
inline constexpr int kStreamWarps = 8;
inline constexpr int kStreamVectors = 8;
inline constexpr int kSurvivors = 40;
// A lane's elements between looks at the lists' lengths.
inline constexpr int kTightenLength = 16;

// smxx_forward_softmax.cuh: warps of a row, vectors that a lane loads at a time.
inline constexpr int kSoftmaxWarps = 8;
inline constexpr int kSoftmaxVectors = 4;

}  // namespace pullback::entmax
