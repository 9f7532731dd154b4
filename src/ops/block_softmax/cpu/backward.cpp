// ds = y (d_y - delta) with delta = sum of y · d_y over a row's blocks, and 0 where y is 0.
// d_x = scale · ds; d_rpe, d_key_padding_mask, d_attn_mask = ds summed over what they broadcast.
//
// d_x: a task takes token rows of one or more block rows, a strip of one to four rows at a time. It
//   reads y and d_y twice, the second time from the first-level cache: for delta, and for d_x.
// d_rpe and d_attn_mask: a task is one block row of the gradient; it goes over the block columns,
//   and sums the blocks (z, h, row, column) that share a place, with the deltas of the step before.
// d_key_padding_mask: a task is one z and block column, and sums down the column in all heads.
// Each sum belongs to one task and has a fixed order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/block_softmax/cpu/backward.cpp"
#include <hwy/foreach_target.h>

#include <hwy/cache_control.h>

#include "cpu/simd-inl.hpp"
#include "ops/block_softmax/cpu/row_groups.hpp"
#include "ops/block_softmax/cpu/segment-inl.hpp"
#include "ops/block_softmax/problem.hpp"

#ifndef PULLBACK_BLOCK_SOFTMAX_BACKWARD_TASK
#define PULLBACK_BLOCK_SOFTMAX_BACKWARD_TASK
namespace pullback::block_softmax {

struct BackwardRun {
  const BlockSoftmaxProblem* problem;
  const void* y;
  const void* d_y;
  void* d_x;    // null: not in this step
  void* delta;  // [Z,H,R·b] Real; null: not kept
  bool stream;
};

struct SumTask {
  void* gradient;  // element (0, 0) of this task's plane, or of its block column for the key mask
  std::int64_t row_stride, column_stride;
  std::int64_t z_begin, z_end, h_begin, h_end;
  std::int64_t block_row, block_column;  // of the one kind that the task has
  std::byte* scratch;
};

}  // namespace pullback::block_softmax
#endif

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

using block_softmax::BackwardRun;
using block_softmax::RowGroup;
using block_softmax::RowTask;
using block_softmax::Sizes;
using block_softmax::SumTask;

// Vectors of a row whose elements may have gaps between them.
template <bool kGaps, class D, class T>
HWY_INLINE hn::Vec<D> LoadElements(D d, const T* from, std::int64_t stride) {
  if constexpr (kGaps) {
    T buffer[hn::MaxLanes(d)];
    return HWY_NAMESPACE::Load(
        d, Gathered(from, stride, static_cast<std::int64_t>(hn::Lanes(d)), buffer));
  } else {
    return HWY_NAMESPACE::Load(d, from);
  }
}
template <bool kGaps, class D, class T>
HWY_INLINE void StoreElements(D d, hn::Vec<D> value, T* to, std::int64_t stride) {
  if constexpr (kGaps) {
    T buffer[hn::MaxLanes(d)];
    Store(d, value, buffer);
    Scatter(buffer, to, stride, static_cast<std::int64_t>(hn::Lanes(d)));
  } else {
    Store(d, value, to);
  }
}

// Both passes over one strip. The second one asks for the next strip while it stores.
template <class T, int kRows, bool kGaps>
HWY_INLINE void BackwardStrip(const BackwardRun& run, std::int64_t z, const RowGroup& strip,
                              const RowGroup* next, std::int64_t next_z) {
  using R = Real<T>;
  const SegmentTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const BlockSoftmaxProblem& p = *run.problem;
  const BlockLayout& layout = *p.layout;
  const std::int64_t b = p.block, y_step = p.y.strides[3], d_y_step = p.d_y.strides[3];
  const auto y = StripOf<T>(p.y, run.y, layout, z, strip);
  const auto d_y = StripOf<T>(p.d_y, run.d_y, layout, z, strip);

  hn::Vec<decltype(d)> delta[kRows], whole[kRows];
  for (int i = 0; i < kRows; ++i) delta[i] = whole[i] = hn::Zero(d);
  for (std::int64_t k = 0; k < y.blocks; ++k) {
    if (k % kSumBlocks == 0) EndSums(d, delta, whole);
    const T *y_block = y.block(k), *d_y_block = d_y.block(k);
    for (std::int64_t j = 0; j < b; j += lanes) {
      for (int i = 0; i < kRows; ++i) {
        const auto probability =
            LoadElements<kGaps>(d, y_block + i * y.row_stride + j * y_step, y_step);
        const auto product = hn::Mul(
            probability,
            LoadElements<kGaps>(d, d_y_block + i * d_y.row_stride + j * d_y_step, d_y_step));
        delta[i] = hn::Add(delta[i], hn::IfThenZeroElse(hn::Eq(probability, hn::Zero(d)), product));
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    delta[i] = hn::SumOfLanes(d, hn::Add(whole[i], delta[i]));
    if (run.delta != nullptr) {
      const std::int64_t row = (z * layout.heads() + strip.head) * layout.rows() + strip.row;
      static_cast<R*>(run.delta)[row * b + strip.begin + i] = hn::GetLane(delta[i]);
    }
  }
  if (run.d_x == nullptr) return;

  Strip<const T> y_next, d_y_next;
  if (next != nullptr) {
    y_next = StripOf<T>(p.y, run.y, layout, next_z, *next);
    d_y_next = StripOf<T>(p.d_y, run.d_y, layout, next_z, *next);
  }
  const auto d_x = WritableStrip(StripOf<T>(p.d_x, run.d_x, layout, z, strip));
  const std::int64_t d_x_step = p.d_x.strides[3];
  const auto scale = hn::Set(d, static_cast<R>(p.scale));
  for (std::int64_t k = 0; k < y.blocks; ++k) {
    const T *y_block = y.block(k), *d_y_block = d_y.block(k);
    T* d_x_block = d_x.block(k);
    const bool fetch = k < y_next.blocks;
    const T* y_ahead = fetch ? y_next.block(k) : nullptr;
    const T* d_y_ahead = fetch ? d_y_next.block(k) : nullptr;
    for (std::int64_t j = 0; j < b; j += lanes) {
      for (int i = 0; i < kRows; ++i) {
        if (fetch) {
          Fetch<kRows>(y_ahead + i * y.row_stride + j * y_step);
          Fetch<kRows>(d_y_ahead + i * d_y.row_stride + j * d_y_step);
        }
        const auto probability =
            LoadElements<kGaps>(d, y_block + i * y.row_stride + j * y_step, y_step);
        const auto incoming =
            LoadElements<kGaps>(d, d_y_block + i * d_y.row_stride + j * d_y_step, d_y_step);
        const auto ds = hn::Mul(probability, hn::Sub(incoming, delta[i]));
        const auto value = hn::IfThenZeroElse(hn::Eq(probability, hn::Zero(d)), hn::Mul(ds, scale));
        T* to = d_x_block + i * d_x.row_stride + j * d_x_step;
        if (run.stream) {
          StreamStore(d, value, to);
        } else {
          StoreElements<kGaps>(d, value, to, d_x_step);
        }
      }
    }
  }
}

template <class T, int kRows, bool kGaps>
void BackwardStrips(const BackwardRun& run, const RowTask& task) {
  block_softmax::for_strips(task, kRows,
                            [&](const RowGroup& strip, const RowGroup* next, std::int64_t next_z) {
                              BackwardStrip<T, kRows, kGaps>(run, task.z, strip, next, next_z);
                            });
  if (run.stream) hwy::FlushStream();
}

template <class T>
void BackwardRows(const BackwardRun& run, const RowTask& task) {
  const BlockSoftmaxProblem& p = *run.problem;
  const bool gaps =
      p.y.strides[3] != 1 || p.d_y.strides[3] != 1 || (run.d_x != nullptr && p.d_x.strides[3] != 1);
  if (gaps) return BackwardStrips<T, 1, true>(run, task);
  block_softmax::with_strip_rows(task, p.block,
                                 [&]<int kRows>() { BackwardStrips<T, kRows, false>(run, task); });
}

// Adds ds of token row i of a block to sum [b].
template <class T>
HWY_INLINE void AddRow(const BackwardRun& run, std::int64_t z, const BlockLayout::Block& block,
                       std::int64_t i, Real<T>* sum) {
  using R = Real<T>;
  const SegmentTag<T> d;
  const BlockSoftmaxProblem& p = *run.problem;
  const std::int64_t b = p.block;
  T y_scratch[kMaxBlock], d_y_scratch[kMaxBlock];
  const T* y = Gathered(At<T>(p.y, run.y, z, block.rank, i), p.y.strides[3], b, y_scratch);
  const T* d_y =
      Gathered(At<T>(p.d_y, run.d_y, z, block.rank, i), p.d_y.strides[3], b, d_y_scratch);
  const std::int64_t head_row = z * p.layout->heads() + block.head;
  const auto delta = hn::Set(
      d, static_cast<const R*>(run.delta)[(head_row * p.layout->rows() + block.row) * b + i]);
  for (std::int64_t j = 0; j < b; j += static_cast<std::int64_t>(hn::Lanes(d))) {
    const auto probability = HWY_NAMESPACE::Load(d, y + j);
    const auto ds = hn::Mul(probability, hn::Sub(HWY_NAMESPACE::Load(d, d_y + j), delta));
    const auto seen = hn::IfThenZeroElse(hn::Eq(probability, hn::Zero(d)), ds);
    hn::StoreU(hn::Add(hn::LoadU(d, sum + j), seen), d, sum + j);
  }
}

template <class T>
HWY_INLINE void StoreRow(const Real<T>* from, T* row, std::int64_t stride, std::int64_t b) {
  const SegmentTag<T> d;
  T scratch[kMaxBlock];
  T* to = Writable(row, stride, scratch);
  for (std::int64_t j = 0; j < b; j += static_cast<std::int64_t>(hn::Lanes(d))) {
    Store(d, hn::LoadU(d, from + j), to + j);
  }
  Scatter(to, row, stride, b);
}

// One block row of d_rpe or d_attn_mask.
template <class T>
void SumBlockRow(const BackwardRun& run, const SumTask& task) {
  using R = Real<T>;
  const BlockLayout& layout = *run.problem->layout;
  const std::int64_t b = run.problem->block;
  R* sum = reinterpret_cast<R*>(task.scratch);
  // How many blocks of each head's row have been passed.
  auto* passed = reinterpret_cast<std::int32_t*>(sum + b * b);
  std::fill(passed, passed + (task.h_end - task.h_begin), 0);
  for (std::int64_t column = 0; column < layout.columns(); ++column) {
    std::fill(sum, sum + b * b, R{0});
    for (std::int64_t h = task.h_begin; h < task.h_end; ++h) {
      const auto blocks = layout.row(h, task.block_row);
      std::int32_t& next = passed[h - task.h_begin];
      if (static_cast<std::size_t>(next) == blocks.size()) continue;
      const auto& block = blocks[static_cast<std::size_t>(next)];
      if (block.column != column) continue;
      ++next;
      for (std::int64_t z = task.z_begin; z < task.z_end; ++z) {
        for (std::int64_t i = 0; i < b; ++i) AddRow<T>(run, z, block, i, sum + i * b);
      }
    }
    T* gradient = static_cast<T*>(task.gradient) + task.block_row * b * task.row_stride +
                  column * b * task.column_stride;
    for (std::int64_t i = 0; i < b; ++i) {
      StoreRow<T>(sum + i * b, gradient + i * task.row_stride, task.column_stride, b);
    }
  }
}

// One block column of d_key_padding_mask.
template <class T>
void SumBlockColumn(const BackwardRun& run, const SumTask& task) {
  using R = Real<T>;
  const BlockLayout& layout = *run.problem->layout;
  const std::int64_t b = run.problem->block;
  R sum[kMaxBlock] = {};
  for (std::int64_t h = task.h_begin; h < task.h_end; ++h) {
    for (const auto& block : layout.column(h, task.block_column)) {
      // Sums of sums lose less than one long sum.
      R block_sum[kMaxBlock] = {};
      for (std::int64_t i = 0; i < b; ++i) AddRow<T>(run, task.z_begin, block, i, block_sum);
      for (std::int64_t j = 0; j < b; ++j) sum[j] += block_sum[j];
    }
  }
  StoreRow<T>(sum, static_cast<T*>(task.gradient), task.column_stride, b);
}

void BackwardGroup(const BackwardRun& run, const RowTask& task) {
  dispatch_floating(run.problem->x.dtype, [&]<class T>() { BackwardRows<T>(run, task); });
}
void BackwardSumRow(const BackwardRun& run, const SumTask& task) {
  dispatch_floating(run.problem->x.dtype, [&]<class T>() { SumBlockRow<T>(run, task); });
}
void BackwardSumColumn(const BackwardRun& run, const SumTask& task) {
  dispatch_floating(run.problem->x.dtype, [&]<class T>() { SumBlockColumn<T>(run, task); });
}
bool BackwardStreams(const BlockSoftmaxProblem& p, const void* d_x) {
  return dispatch_floating(p.x.dtype, [&]<class T>() { return Streamable<T>(p.d_x, d_x); });
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pullback {
HWY_EXPORT(BackwardGroup);
HWY_EXPORT(BackwardSumRow);
HWY_EXPORT(BackwardSumColumn);
HWY_EXPORT(BackwardStreams);

namespace block_softmax {
namespace {

class CpuBackward final : public Body {
 public:
  CpuBackward(const BlockSoftmaxProblem& problem, const Device& device)
      : problem_(problem),
        sizes_(sizes_of(problem)),
        threads_(device.threads),
        tasks_(*problem.layout, problem.block) {
    const auto& [Z, H, R, C, b, nnz] = sizes_;
    const DType real = accumulation_dtype(problem.x.dtype);
    if (problem.d_rpe.given() || problem.d_attn_mask.given() ||
        problem.d_key_padding_mask.given()) {
      delta_bytes_ = workspace_aligned(static_cast<std::size_t>(Z * H * R * b) * size_of(real));
      slot_bytes_ = workspace_aligned(static_cast<std::size_t>(b * b) * size_of(real) +
                                      static_cast<std::size_t>(H) * sizeof(std::int32_t));
      workspace_bytes = delta_bytes_ + slot_bytes_ * static_cast<std::size_t>(threads_.count());
    }
    description = "strips of rows, read twice in cache; sums in " + std::string(name_of(real)) +
                  "; same bits for any number of threads";
  }

  void run(Stream, const BlockSoftmaxTensors& tensors, Workspace workspace) const override {
    const BlockSoftmaxProblem& p = problem_;
    const bool sums = tensors.d_rpe != nullptr || tensors.d_attn_mask != nullptr ||
                      tensors.d_key_padding_mask != nullptr;
    const bool in_place = tensors.d_x == tensors.d_y;
    BackwardRun run{.problem = &p,
                    .y = tensors.y,
                    .d_y = tensors.d_y,
                    .d_x = tensors.d_x,
                    .delta = sums ? workspace.data : nullptr,
                    .stream = false};
    const auto bytes = p.d_x.numel() * static_cast<std::int64_t>(size_of(p.d_x.dtype));
    run.stream = bytes > kStreamBytes && !in_place && tensors.d_x != nullptr &&
                 HWY_DYNAMIC_DISPATCH(BackwardStreams)(p, tensors.d_x);
    // In place, d_x replaces the d_y that the sums need: it comes last then.
    if (sums && in_place) run.d_x = nullptr;
    rows(run);
    if (!sums) return;
    std::byte* scratch = static_cast<std::byte*>(workspace.data) + delta_bytes_;
    if (tensors.d_rpe != nullptr) {
      sum_rows(run, p.d_rpe, tensors.d_rpe, p.d_rpe.shape[0], p.d_rpe.shape[1],
               {p.d_rpe.strides[0], p.d_rpe.strides[1], p.d_rpe.strides[2], p.d_rpe.strides[3]},
               scratch);
    }
    if (tensors.d_attn_mask != nullptr) {
      sum_rows(run, p.d_attn_mask, tensors.d_attn_mask, 1, 1,
               {0, 0, p.d_attn_mask.strides[0], p.d_attn_mask.strides[1]}, scratch);
    }
    if (tensors.d_key_padding_mask != nullptr) sum_columns(run, tensors.d_key_padding_mask);
    if (in_place && tensors.d_x != nullptr) {
      run.d_x = tensors.d_x;
      run.delta = nullptr;
      rows(run);
    }
  }

 private:
  void rows(const BackwardRun& run) const {
    if (run.d_x == nullptr && run.delta == nullptr) return;
    const auto bytes = problem_.y.numel() * static_cast<std::int64_t>(size_of(problem_.y.dtype));
    tasks_.for_each(threads_, sizes_.Z, bytes > kFetchBytes, [&](const RowTask& task, int) {
      HWY_DYNAMIC_DISPATCH(BackwardGroup)(run, task);
    });
  }

  // A gradient of planes [z_planes|1, h_planes|1, R·b, C·b]; a single plane sums all z, or all h.
  void sum_rows(const BackwardRun& run, const TensorSpec& spec, void* gradient,
                std::int64_t z_planes, std::int64_t h_planes,
                const std::array<std::int64_t, 4>& strides, std::byte* scratch) const {
    if (spec.numel() == 0) return;
    const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
    threads_.parallel_for(z_planes * h_planes * sizes_.R, [&, this](std::int64_t index, int slot) {
      const std::int64_t row = index % sizes_.R, h = index / sizes_.R % h_planes;
      const std::int64_t z = index / sizes_.R / h_planes;
      SumTask task{};
      task.gradient =
          static_cast<std::byte*>(gradient) + (z * strides[0] + h * strides[1]) * element;
      task.row_stride = strides[2];
      task.column_stride = strides[3];
      task.z_begin = z_planes == 1 ? 0 : z;
      task.z_end = z_planes == 1 ? sizes_.Z : z + 1;
      task.h_begin = h_planes == 1 ? 0 : h;
      task.h_end = h_planes == 1 ? sizes_.H : h + 1;
      task.block_row = row;
      task.scratch = scratch + static_cast<std::size_t>(slot) * slot_bytes_;
      HWY_DYNAMIC_DISPATCH(BackwardSumRow)(run, task);
    });
  }

  void sum_columns(const BackwardRun& run, void* gradient) const {
    const TensorSpec& spec = problem_.d_key_padding_mask;
    const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
    threads_.parallel_for(sizes_.Z * sizes_.C, [&, this](std::int64_t index, int) {
      const std::int64_t column = index % sizes_.C, z = index / sizes_.C;
      SumTask task{};
      task.gradient = static_cast<std::byte*>(gradient) +
                      (z * spec.strides[0] + column * sizes_.b * spec.strides[1]) * element;
      task.column_stride = spec.strides[1];
      task.z_begin = z;
      task.h_end = sizes_.H;
      task.block_column = column;
      HWY_DYNAMIC_DISPATCH(BackwardSumColumn)(run, task);
    });
  }

  BlockSoftmaxProblem problem_;
  Sizes sizes_;
  Threads threads_;
  RowTasks tasks_;
  std::size_t delta_bytes_ = 0, slot_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Body> make_cpu_backward(const BlockSoftmaxProblem& problem, const Device& device) {
  return std::make_unique<CpuBackward>(problem, device);
}

}  // namespace block_softmax
}  // namespace pullback
#endif
