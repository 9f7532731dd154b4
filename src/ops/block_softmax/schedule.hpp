// Plan-time tables: block rows grouped by length, and the lists that the kernels walk.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <span>
#include <vector>

#include "cuda/device_tables.hpp"
#include "cuda/op_kernel.hpp"
#include "ops/block_softmax/cuda/params.cuh"
#include "ops/block_softmax/cuda/tuning.hpp"
#include "ops/block_softmax/problem.hpp"

namespace pullback::block_softmax {

using cuda::DeviceTables;

Divisor divisor_of(std::int64_t value);

// How a class of rows is shared out: see RowClass.
struct UnitShape {
  int warps, row_shift;
  int team() const { return 32 * warps >> row_shift; }
};

// Units of at most kWarps warps, from the largest team to the smallest, for rows whose blocks are
// `piece` vectors wide. As far as a team can be spread so thin, a warp takes as many rows as make
// 32 neighbouring vectors: 512 bytes of a block.
using UnitShapes = std::array<UnitShape, kMaxRowClasses>;
UnitShapes unit_shapes(std::int64_t piece);
inline constexpr UnitShape kRingShapes[] = {{kRingWarps, 0}, {kRingWarps, 1}, {kRingWarps, 2}};

// `vectors` make up one row of a block. choose(vectors in a row) is an index of `shapes`, or -1 for
// rows that the schedule is to leave out. Classes come in the order of `shapes`.
Schedule make_schedule(const BlockLayout& layout, std::int64_t block, std::int64_t vectors,
                       std::span<const UnitShape> shapes,
                       const std::function<int(std::int64_t)>& choose, DeviceTables& tables);

// Which kernel takes a row of a contiguous tensor.
enum class RowKernel { registers, ring, large_ring, cluster_ring, stream };

struct RowChoice {
  RowKernel kernel;
  int shape;  // of unit_shapes(), or of kRingShapes
};

class RowChooser {
 public:
  // `vectors` make up one row of a block, a thread of the kernel in registers has `per_thread` of
  // each of `tensors`; without `ring`, what does not fit in registers is read twice.
  RowChooser(std::int64_t vectors, int per_thread, int tensors, bool ring,
             const cuda::DeviceInfo& device);
  RowChoice choose(std::int64_t row_vectors) const;

 private:
  std::int64_t vectors_;
  UnitShapes shapes_;
  int per_thread_, tensors_, line_shift_;
  bool ring_, large_, clusters_;
};

// Batches in the ring, and blocks that share it.
inline int ring_of(RowKernel kernel) { return kRings[kernel == RowKernel::ring ? 0 : 1]; }
inline int cluster_of(RowKernel kernel) {
  return kernel == RowKernel::cluster_ring ? kRingCluster : 1;
}
// Of dynamic shared memory.
inline constexpr int ring_bytes(int ring) { return ring * kRingBatch * 16 * kRingThreads; }

// The smallest team of `shapes` whose threads have at most `per_thread` vectors when it goes over a
// row in whole pieces of `piece` vectors, among those whose units have at least 2^row_shift rows.
// -1 when there is none.
int shape_for(std::span<const UnitShape> shapes, std::int64_t row_vectors, std::int64_t per_thread,
              std::int64_t piece, int row_shift = 0);

// Blocks are contiguous and lie one behind the other, and so do the vectors of all batch entries.
bool vector_layout(const TensorSpec& spec);
BlockTensor block_tensor(const TensorSpec& spec);

// tuning.hpp's numbers of blocks are for sm_90; elsewhere kernels take registers rather than spill.
inline int blocks_for(int blocks, int arch) {
  return std::max(arch == 90 ? blocks : arch < 90 ? blocks - 1 : blocks - 2, 1);
}

}  // namespace pullback::block_softmax
