// segment: reductions (and softmax) over groups of rows of x [N,D], and their gradients.
// Formulas, tie and edge rules: src/ops/segment/README.md.
#pragma once

#include <cstdint>

#include "pullback/export.hpp"
#include "pullback/plan.hpp"
#include "pullback/tensor.hpp"

namespace pullback {

enum class SegmentReduce { sum, mean, max, min, prod, logsumexp, softmax };
enum class Ties { first, last, even };            // who gets the gradient of max and min
enum class EmptySegment { identity, zero, nan };  // value of a segment without rows

// Segment s has the rows [offsets[s], offsets[s+1]) or those with ids[n] == s. Give one of:
//   offsets               i32 or i64 [S+1]
//   ids                   i32 or i64 [N], ascending, with num_segments
//   offsets, permutation  for ids in any order, both from plan_permutation: row r of the sorted
//                         order is x[permutation[r]]. With the ids, too, passes that write rows
//                         of few columns may do so in the rows' own order, which on GPUs is
//                         several times faster
// Ids out of range and rows outside all offsets take no part: no output, zero gradient.
struct SegmentProblem {
  TensorSpec x;  // [N,D]; f64, f32, bf16 or f16
  TensorSpec offsets, ids, permutation;
  std::int64_t num_segments = 0;  // needed with ids; else 0 or the length of offsets - 1
  SegmentReduce reduce = SegmentReduce::sum;
  Ties ties = Ties::first;
  EmptySegment empty = EmptySegment::identity;
  bool check_indices = false;  // checked mode: run() reports the first bad offset or id

  TensorSpec out;  // [S,D]; for softmax [N,D]
  // What max and min may save for backward; with neither, backward compares x with out.
  TensorSpec arg;       // [S,D]; i64 or i32: row of x, -1 for none (ties first and last; "even"
                        //   saves the first). u8: the row's place in its segment, which then has at
                        //   most 255 rows: longer ones are an Error of run, but on a GPU, which
                        //   stores no place past 254 and gives that column no gradient
  TensorSpec arg_mask;  // u8 [N, ceil(D/8)]: bit d%8 of byte d/8 says that x[n,d] gets gradient
  // What logsumexp of 16-bit x may save; without it, backward reduces x anew.
  TensorSpec lse;  // f32 [S,D]: out before it was rounded

  TensorSpec d_out;  // like out; any strides
  TensorSpec d_x;    // like x

  friend bool operator==(const SegmentProblem&, const SegmentProblem&) = default;
};

// Forward reads x and the segments, writes out and the non-null of arg, arg_mask, lse.
// Backward reads d_out, the segments and
//   sum, mean            nothing more
//   max, min             arg or arg_mask; or else x and out
//   prod                 x
//   logsumexp            x and out; in 16 bits x and, if not null, lse
//   softmax              out
// and writes d_x.
struct SegmentTensors {
  const void* x = nullptr;
  const void* offsets = nullptr;
  const void* ids = nullptr;
  const void* permutation = nullptr;
  void* out = nullptr;
  void* arg = nullptr;
  void* arg_mask = nullptr;
  void* lse = nullptr;
  const void* d_out = nullptr;
  void* d_x = nullptr;
};

PULLBACK_API SegmentProblem complete(const SegmentProblem& problem);
PULLBACK_API Plan<SegmentTensors> make_plan(const Device& device, const SegmentProblem& problem,
                                            Pass pass, const PlanOptions& options = {});

// Stable sort of ids in any order, done once for many calls. Ids out of [0, num_segments) come
// after all others in the permutation and belong to no segment.
struct SegmentPermutationProblem {
  TensorSpec ids;  // i32 or i64 [N]
  std::int64_t num_segments = 0;
  TensorSpec permutation;  // i64 [N] by default, or i32
  TensorSpec offsets;      // [S+1], the permutation's dtype

  friend bool operator==(const SegmentPermutationProblem&,
                         const SegmentPermutationProblem&) = default;
};

struct SegmentPermutationTensors {
  const void* ids = nullptr;
  void* permutation = nullptr;
  void* offsets = nullptr;
};

PULLBACK_API SegmentPermutationProblem complete(const SegmentPermutationProblem& problem);
PULLBACK_API Plan<SegmentPermutationTensors> plan_permutation(
    const Device& device, const SegmentPermutationProblem& problem);

}  // namespace pullback
