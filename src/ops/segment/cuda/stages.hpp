// The launches that the passes on CUDA are made of. Every run begins with Setup, which makes of the
// caller's indices what all kernels trust, and cuts the rows into tiles; then come reductions over
// segments (smxx_reduce_*.cuh, smxx_combine.cuh) and maps over rows (smxx_map_*.cuh).
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "core/workspace.hpp"
#include "cuda/op_kernel.hpp"
#include "ops/segment/cuda/params.cuh"
#include "ops/segment/cuda/row_tile_tuning.cuh"
#include "ops/segment/cuda/tuning.hpp"
#include "ops/segment/problem.hpp"

namespace pullback::segment_cuda {

using Specs = std::initializer_list<const TensorSpec*>;

using Kernel = cuda::PlannedKernel<Params>;

// How a kernel reads rows: by aligned pieces of `vector` columns that follow each other, permuted
// rows or not.
struct Access {
  int vector;
  bool permuted;

  friend bool operator==(const Access&, const Access&) = default;
};
// Element by element with any strides, permuted or not.
inline constexpr Access kAnyAccess{.vector = 1, .permuted = true};
// For kernels' names: "wide" where pieces have 16 bytes, else their bytes.
std::string name_of(Access access, DType dtype);
// All that there are kernels for.
std::vector<Access> accesses(DType dtype);

// How a kernel cuts the problem.
struct Tiling {
  std::int64_t items = 0;  // rows and segment ends of a tile
  int alignment = 1;
  int snap = 0;       // Params::snap_rows
  int end_items = 1;  // Params::end_items
  int lane_bits = 0;
  std::int64_t column_blocks = 1;

  friend bool operator==(const Tiling&, const Tiling&) = default;
};

// One call of run().
struct Launcher {
  Stream stream;
  Params params;       // what all stages share
  Tiling tiling = {};  // of params.starts
  std::byte* workspace = nullptr;
  bool proven = false;       // offsets are, or the kernels know which to take
  bool overlapping = false;  // kernels begin while the one ahead ends, and wait for it themselves

  // With the grid of the kernel's tiling. What the kernel has to find out or to repair, the next
  // one is given.
  void launch(const Kernel& kernel, Params& p, std::int64_t blocks,
              std::int64_t column_blocks) const;
};

inline int real_bytes(DType dtype) { return static_cast<int>(size_of(accumulation_dtype(dtype))); }

// Of offsets, ids or a permutation, which may not be given.
Indices indices(const TensorSpec& spec);
// Pieces have `most` columns at most.
Matrix matrix(const TensorSpec& spec, std::size_t element_bytes, int most);
// A contiguous matrix of the workspace.
Matrix matrix(std::int64_t rows, std::int64_t columns, int most);
Matrix bound(Matrix matrix, const void* data);
// Whether all bound matrices are made of pieces of so many columns.
bool in_pieces(const Params& p, int vector);

int vector_length(DType dtype);
// By the largest pieces that these are made of; none where kAnyAccess is all there is.
std::optional<Access> access_of(const SegmentProblem& problem, Specs rows);
bool permuted(const SegmentProblem& problem);
// Of x of one column: whether the tensors with a row for each of x, and the indices, lie so that
// they can be streamed (smxx_chunks.cuh), and whether those bound do.
bool streamable(const SegmentProblem& problem, Specs rows);
bool streamable(const Params& p);
// The tiling of rows read in pieces of `vector` elements, by 2^fewest lanes or more; a tiling with
// tiles of `least` to `most` items that fill a device, which holds `resident` blocks, a whole
// number of times, and not more often than they have to; such a one for reductions of rows; that of
// x of one column.
Tiling rows_tiling(const SegmentProblem& problem, int vector, int fewest = 0);
Tiling in_waves(const SegmentProblem& problem, Tiling tiling, std::int64_t resident,
                std::int64_t least, std::int64_t most);
Tiling long_rows_tiling(const SegmentProblem& problem, int vector, std::int64_t resident);
Tiling column_tiling(int bytes);
std::int64_t tiles_of(const SegmentProblem& problem, const Tiling& tiling);

// Tiles of rows in shared memory (smxx_row_tile.cuh), read in pieces of `vector` elements: whether
// rows lie so; those of `most` items at most; and for which other reductions than softmax, and
// maps, with these tensors of a row for each of x: by which pieces.
bool contiguous(const TensorSpec& rows);
int row_bytes(const SegmentProblem& problem);  // of rows that take less than all of a tile
Tiling row_tiling(const SegmentProblem& problem, const cuda::DeviceInfo& device, int vector,
                  int most, int snap, int end_items);
std::optional<int> row_tile_vector(const SegmentProblem& problem, Specs rows);
// All of these that there are kernels for.
std::vector<int> row_tile_vectors(DType dtype);

class Setup {
 public:
  Setup(const SegmentProblem& problem, const cuda::DeviceInfo& device, WorkspaceLayout& layout);

  // For every tiling that a run may use, before the first run, and every kernel that streams.
  void allow(const Tiling& tiling);
  void allow_stream(const Kernel& kernel);
  // After the last allow().
  void reserve(WorkspaceLayout& layout);

  Launcher begin(Stream stream, const SegmentTensors& tensors, void* workspace) const;
  // `p` for a kernel that cuts the problem so; launches what has to come before it.
  Params tiled(Launcher& launcher, const Params& p, const Tiling& tiling) const;
  // Launches a kernel that streams, to which the end of a segment costs as much as `end_items`
  // rows. Returns what the kernel behind a reduction gets.
  Params stream(Launcher& launcher, const Kernel& kernel, const Params& p, int end_items) const;
  std::int64_t shares(const Kernel& kernel) const;
  // Blocks of the kernel that the device holds at a time.
  std::int64_t resident(const Kernel& kernel) const;

 private:
  void prove(Launcher& launcher, Params& p) const;

  const cuda::DeviceInfo& device_;
  SegmentProblem problem_;
  Params params_{};
  Kernel check_, starts_;
  bool overlapping_;
  std::int64_t most_tiles_ = 0, most_shares_ = 0;
  std::size_t offsets_at_, use_at_, counts_at_, disorder_at_, starts_at_ = 0;
  std::size_t shares_at_ = 0, share_disorder_at_ = 0;
};

// A reduction: what of (smxx_ops.cuh), and how it is stored.
struct ReduceOp {
  std::string name;   // for kernels' names
  std::string type;   // in device code
  std::string out;    // element of result
  std::string input;  // Input::…
  int state_bytes;
  int chunk_bytes;     // of what kernels that go by chunks keep of an element in place of a state
  bool wide;           // whether there are kernels that read by pieces
  bool tiles = false;  // and smxx_reduce_tile.cuh serves
  bool pairs = false;  // of 16-bit floats are taken at once (smxx_run.cuh)
  int blocks = 4;      // on a multiprocessor, of those for rows: bounds registers
};

ReduceOp reduce_op(SegmentReduce reduce, DType dtype);
ReduceOp extreme_place(SegmentReduce reduce, bool last, DType dtype);
ReduceOp extreme_count(SegmentReduce reduce, DType dtype);
ReduceOp mask_count(DType dtype);
ReduceOp row_product_sum(DType dtype);

// Puts together the segments that reach over several tiles.
class Combining {
 public:
  Combining(const SegmentProblem& problem, const cuda::DeviceInfo& device, const ReduceOp& op);
  // Of slots in rows of so many columns.
  static std::int64_t slot_columns(const SegmentProblem& problem);
  void enqueue(const Launcher& launcher, Params& p) const;

 private:
  int columns_;  // of a block
  Kernel kernel_;
};

class Reduction {
 public:
  // `inputs`: whose rows are read; they decide what is worth planning.
  Reduction(const SegmentProblem& problem, const cuda::DeviceInfo& device, const ReduceOp& op,
            Specs inputs, Setup& setup, WorkspaceLayout& layout);

  // `p` has the inputs and results bound.
  void enqueue(const Setup& setup, Launcher& launcher, const Params& p) const;
  const Tiling& tiling() const {
    return tile_ ? tile_tiling_ : pieces_ ? pieces_tiling_ : any_tiling_;
  }

  static std::vector<cuda::KernelSource> kernels(const ReduceOp& op, DType dtype, int arch);

 private:
  SegmentProblem problem_;
  std::optional<Kernel> pieces_, stream_, narrow_, tile_;
  std::optional<Kernel> shares_;  // behind stream_ and narrow_
  std::optional<int> narrow_lane_bits_;
  Kernel any_;
  Combining combining_;
  int vector_ = 0;       // of pieces_ or tile_
  int stream_rows_ = 0;  // of a chunk
  int ring_rows_ = 0;    // of pieces_
  Tiling pieces_tiling_, tile_tiling_, any_tiling_;
  std::size_t slots_at_;
};

// A pass over rows: by what (smxx_maps.cuh).
struct MapOp {
  std::string name;
  std::string type;   // with {T} for the element, {V} for the columns of a lane, {P} for permuted
  int segment_bytes;  // sizeof(Segment) for one column
  int blocks = 4;     // on a multiprocessor, of the kernels for pieces: bounds registers
  // The same of smxx_map_chunks.cuh; 0: x of one column has no such kernel.
  int chunk_blocks = 0;
  // The same of map_narrow; 0: narrow rows go by map_rows, as what a segment gives is costly to
  // make.
  int narrow_blocks = 0;
  bool wide = true;    // whether kernels for pieces, or streams, are worth loading
  bool tiles = false;  // and smxx_map_tile.cuh serves
  // Whether there are kernels for pieces of 16 bytes alone: smxx_reduce_map.cuh has other rows.
  bool only_wide = false;
  bool own_order = false;  // and smxx_map_ids.cuh serves
  // Of tiles whose rows fill all lanes, at most. What is written at the same time should lie near
  // each other: tiles have 64 KiB, but of masks and of 16-bit rows that are read twice that.
  int walker_rows = kWalkerRows / 2;
};

MapOp spread_map(bool mean, DType dtype);
MapOp arg_map(DType arg, DType dtype);
MapOp mask_map(bool even, DType dtype);
MapOp ties_map(DType dtype);
MapOp exponential_map(DType dtype);
MapOp softmax_map(DType dtype);
MapOp softmax_gradient_map(DType dtype);

class Mapping {
 public:
  // `rows`: the tensors with a row for each of x that are read or written.
  Mapping(const SegmentProblem& problem, const cuda::DeviceInfo& device, const MapOp& op,
          Specs rows, Setup& setup);

  void enqueue(const Setup& setup, Launcher& launcher, const Params& p) const;

  static std::vector<cuda::KernelSource> kernels(const MapOp& op, DType dtype, int arch);

 private:
  SegmentProblem problem_;
  std::optional<Kernel> pieces_, stream_, tile_;
  Kernel any_;
  bool own_order_ = false;  // any_ and pieces_ go by the rows' ids
  int vector_ = 0;          // of pieces_ or tile_
  Tiling pieces_tiling_, tile_tiling_, any_tiling_;
};

// What a row becomes by a reduction of its segment.
enum class RowRule {
  softmax,
  softmax_gradient,  // of y and d_y, bound as x and y
  ties,              // gradient of max and min with even ties
};
// Both in one pass over contiguous rows, but for segments that reach over tiles
// (smxx_reduce_map.cuh).
class ReduceMap {
 public:
  // Whether rows lie so, most segments are short enough, and there are the kernels.
  static bool serves(const SegmentProblem& problem, const cuda::DeviceInfo& device, RowRule rule);

  ReduceMap(const SegmentProblem& problem, const cuda::DeviceInfo& device, RowRule rule,
            Setup& setup, WorkspaceLayout& layout);

  // Whether what is bound lies so.
  static bool takes(const Params& p);
  // `p` has what the rule reads, d_x and the results of segments that reach over tiles bound.
  void enqueue(const Setup& setup, Launcher& launcher, const Params& p) const;
  const Tiling& tiling() const { return tiling_; }

  static std::vector<cuda::KernelSource> kernels(DType dtype, RowRule rule, int arch);

 private:
  std::int64_t slot_columns_;
  Combining combining_;
  Tiling tiling_;
  Kernel tile_, border_;
  std::size_t slots_at_;
};

// The mask of max and min, after a reduction (smxx_mask.cuh): from arg, or where ties are even from
// x and out (of one column smxx_map_chunks.cuh).
class MaskRows {
 public:
  MaskRows(const SegmentProblem& problem, const cuda::DeviceInfo& device, Setup& setup);

  // Of an arg that the caller does not want; of places in a segment, u8 would count too few.
  static DType own_arg_dtype(const SegmentProblem& problem);
  // `p` has the mask, and arg (own_arg: of that dtype) or x and out bound.
  void enqueue(const Setup& setup, Launcher& launcher, const Params& p, bool own_arg) const;

 private:
  Kernel kernel_, own_kernel_;
  std::optional<Kernel> stream_;
  Tiling tiling_;
};

// max and min and the mask of even ties in one pass over contiguous rows, but for segments that
// reach over tiles (smxx_mask_tile.cuh).
class MaskTiles {
 public:
  // Whether rows lie so, most segments are short enough, and there are the kernels.
  static bool serves(const SegmentProblem& problem, const cuda::DeviceInfo& device);

  MaskTiles(const SegmentProblem& problem, const cuda::DeviceInfo& device, Setup& setup,
            WorkspaceLayout& layout);

  // Whether what is bound lies so; places are not found.
  bool takes(const Params& p) const;
  // `p` has x, the mask and, as result and as out, the extremes bound.
  void enqueue(const Setup& setup, Launcher& launcher, const Params& p) const;
  const Tiling& tiling() const { return tiling_; }

 private:
  std::int64_t slot_columns_;
  int vector_;
  Combining combining_;
  Tiling tiling_;
  Kernel tile_, border_;
  std::size_t slots_at_;
};

std::unique_ptr<SegmentBody> make_forward(const SegmentProblem& problem, const Device& device);

inline constexpr DType kDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

}  // namespace pullback::segment_cuda
