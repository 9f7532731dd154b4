// y = exp(s - max s) / sum exp(s - max s) over the blocks of a row, s = scale · x + added terms.
//
// A task takes token rows of one or more block rows, a strip of one to four rows at a time:
//   1. the maxima of s; x comes from memory, or where it has terms or gaps s goes to scratch first;
//   2. the exponentials of s into scratch, and their sums; x comes from the first-level cache.
// Step 2 computes for longer than it takes to load and store as much. In between it stores y =
// exponential / sum of the strip before and prefetches x of the next one, so that memory never
// waits for the arithmetic. A strip is read before any y of it is written, so y may be x's memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/block_softmax/cpu/forward.cpp"
#include <hwy/foreach_target.h>

#include <hwy/cache_control.h>

#include <cmath>

#include "cpu/exp-inl.hpp"
#include "cpu/simd-inl.hpp"
#include "ops/block_softmax/cpu/row_groups.hpp"
#include "ops/block_softmax/cpu/segment-inl.hpp"
#include "ops/block_softmax/problem.hpp"

#ifndef PULLBACK_BLOCK_SOFTMAX_FORWARD_TASK
#define PULLBACK_BLOCK_SOFTMAX_FORWARD_TASK
namespace pullback::block_softmax {

// An added term or keep mask, with strides 0 for the dimensions it does not have or broadcasts.
struct Term {
  const void* data = nullptr;
  DType dtype = DType::f32;
  MaskMode mode = MaskMode::add;
  std::int64_t z_stride = 0, h_stride = 0, row_stride = 0, column_stride = 0;
};

struct ForwardTask {
  const BlockSoftmaxProblem* problem;
  const BlockSoftmaxTensors* tensors;
  Term terms[3];  // in the order they are added; those without data are skipped
  bool direct;    // x is s but for the scale: no terms, no gaps
  bool stream;
  RowTask rows;
  std::byte* scratch;
  std::int64_t strip_elements;  // of each of the strips in scratch
};

}  // namespace pullback::block_softmax
#endif

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

using block_softmax::ForwardTask;
using block_softmax::RowGroup;
using block_softmax::Term;

// The term's segment at `offset`, as Real.
template <class T>
HWY_INLINE const Real<T>* TermSegment(const Term& term, std::int64_t offset, std::int64_t b,
                                      Real<T>* scratch) {
  const std::int64_t stride = term.column_stride;
  if (term.dtype == kDTypeOf<T>) {
    const T* from = static_cast<const T*>(term.data) + offset;
    if constexpr (std::is_same_v<T, Real<T>>) {
      return Gathered(from, stride, b, scratch);
    } else {
      T gathered[kMaxBlock];
      from = Gathered(from, stride, b, gathered);
      const SegmentTag<T> d;
      for (std::int64_t j = 0; j < b; j += static_cast<std::int64_t>(hn::Lanes(d))) {
        hn::StoreU(HWY_NAMESPACE::Load(d, from + j), d, scratch + j);
      }
      return scratch;
    }
  }
  std::uint8_t gathered[kMaxBlock];
  const auto* from =
      Gathered(static_cast<const std::uint8_t*>(term.data) + offset, stride, b, gathered);
  for (std::int64_t j = 0; j < b; ++j) scratch[j] = static_cast<Real<T>>(from[j]);
  return scratch;
}

template <class T>
HWY_INLINE void ApplyTerm(const Term& term, std::int64_t offset, std::int64_t b, Real<T>* s) {
  const SegmentTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  Real<T> scratch[kMaxBlock];
  const Real<T>* values = TermSegment<T>(term, offset, b, scratch);
  if (term.mode == MaskMode::add) {
    for (std::int64_t j = 0; j < b; j += lanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, s + j), hn::LoadU(d, values + j)), d, s + j);
    }
  } else {
    const auto hidden = hn::Neg(hn::Inf(d));
    for (std::int64_t j = 0; j < b; j += lanes) {
      const auto hide = hn::Eq(hn::LoadU(d, values + j), hn::Zero(d));
      hn::StoreU(hn::IfThenElse(hide, hidden, hn::LoadU(d, s + j)), d, s + j);
    }
  }
}

// Outputs that wait in scratch: y = factor · exponentials.
template <class T, int kRows>
struct Outputs {
  const Real<T>* exponentials = nullptr;  // [blocks][b / lanes][kRows][lanes]; null: none
  Strip<T> y = {};
  Real<T> factor[kRows] = {};
};

// The elements of the largest scores of a strip's rows, whose scale has this sign; 0 for a row that
// sees nothing.
template <int kRows, class D, class S, class R = hn::TFromD<D>>
HWY_INLINE void RowMaxima(D d, const Strip<const S>& x, std::int64_t b, R sign, R* most) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto by = hn::Set(d, sign);
  hn::Vec<D> row_most[kRows];
  for (int i = 0; i < kRows; ++i) row_most[i] = hn::Neg(hn::Inf(d));
  for (std::int64_t k = 0; k < x.blocks; ++k) {
    const S* from = x.block(k);
    for (std::int64_t j = 0; j < b; j += lanes, from += lanes) {
      for (int i = 0; i < kRows; ++i) {
        const auto s = hn::Mul(HWY_NAMESPACE::Load(d, from + i * x.row_stride), by);
        row_most[i] = hn::Max(row_most[i], s);
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    // Nothing is seen (or NaN besides): any finite shift leaves exponentials of 0 (or NaN).
    const auto all = hn::MaxOfLanes(d, row_most[i]);
    const auto nothing = hn::Eq(all, hn::Neg(hn::Inf(d)));
    most[i] = sign * hn::GetLane(hn::IfThenZeroElse(nothing, all));
  }
}

// Exponentials of a strip into scratch, and 1 / their sums, or 0 for a row that sees nothing. In
// between it stores the outputs of the strip before and asks for the input of the next one, so that
// memory has work in both directions while exponentials are computed.
template <class T, int kRows, class S, class R = Real<T>>
HWY_INLINE void Exponentials(const Strip<const S>& x, std::int64_t b, R scale, const R* most,
                             const Outputs<T, kRows>& before, bool stream,
                             const Strip<const T>& next, R* to, R* factor) {
  const SegmentTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto by = hn::Set(d, scale);
  hn::Vec<decltype(d)> sum[kRows], whole[kRows], row_most[kRows], row_factor[kRows];
  for (int i = 0; i < kRows; ++i) {
    sum[i] = whole[i] = hn::Zero(d);
    row_most[i] = hn::Set(d, most[i]);
    row_factor[i] = hn::Set(d, before.factor[i]);
  }
  const R* waiting = before.exponentials;
  for (std::int64_t k = 0; k < x.blocks; ++k) {
    if (k % kSumBlocks == 0) EndSums(d, sum, whole);
    const S* from = x.block(k);
    const bool store = k < before.y.blocks;
    T* y = store ? before.y.block(k) : nullptr;
    const bool fetch = k < next.blocks;
    const T* ahead = fetch ? next.block(k) : nullptr;
    for (std::int64_t j = 0; j < b; j += lanes) {
      for (int i = 0; i < kRows; ++i) {
        if (fetch) Fetch<kRows>(ahead + i * next.row_stride + j);
        // The maximum may have lost a NaN; the sum keeps it. Differences come first: of scores
        // that are large the fused product would have digits that the maximum has not.
        const auto below = hn::Sub(HWY_NAMESPACE::Load(d, from + i * x.row_stride), row_most[i]);
        const auto value = ExpNonPositive(d, hn::Mul(below, by));
        hn::StoreU(value, d, to);
        to += lanes;
        sum[i] = hn::Add(sum[i], value);
      }
      from += lanes;
      if (!store) continue;
      for (int i = 0; i < kRows; ++i) {
        const auto value = hn::Mul(hn::LoadU(d, waiting), row_factor[i]);
        waiting += lanes;
        T* row = y + i * before.y.row_stride + j;
        stream ? StreamStore(d, value, row) : Store(d, value, row);
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    const R total = hn::GetLane(hn::SumOfLanes(d, hn::Add(whole[i], sum[i])));
    factor[i] = total == 0 ? R{0} : R{1} / total;
  }
}

// Stores outputs of all blocks but the first ones; y_stride is between neighbours of a row.
template <class T, int kRows>
HWY_INLINE void Write(const Outputs<T, kRows>& outputs, std::int64_t first, std::int64_t b,
                      std::int64_t y_stride, bool stream) {
  const SegmentTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t k = first; k < outputs.y.blocks; ++k) {
    for (int i = 0; i < kRows; ++i) {
      const Real<T>* from = outputs.exponentials + k * b * kRows + i * lanes;
      T* y = outputs.y.block(k) + i * outputs.y.row_stride;
      const auto by = hn::Set(d, outputs.factor[i]);
      T scratch[kMaxBlock];
      T* to = Writable(y, y_stride, scratch);
      for (std::int64_t j = 0; j < b; j += lanes, from += kRows * lanes) {
        const auto value = hn::Mul(hn::LoadU(d, from), by);
        stream ? StreamStore(d, value, to + j) : Store(d, value, to + j);
      }
      Scatter(to, y, y_stride, b);
    }
  }
}

// All terms at the segment of token row `row` that begins at token column `column`. Asks for what
// `ahead` rows later comes of them: their rows lie pages apart.
template <class T>
HWY_NOINLINE void ApplyTerms(const ForwardTask& task, std::int64_t head, std::int64_t row,
                             std::int64_t column, std::int64_t ahead, Real<T>* s) {
  const std::int64_t b = task.problem->block;
  for (const Term& term : task.terms) {
    if (term.data == nullptr) continue;
    const std::int64_t offset = task.rows.z * term.z_stride + head * term.h_stride +
                                row * term.row_stride + column * term.column_stride;
    if (term.row_stride != 0 && term.column_stride == 1) {
      const auto bytes = static_cast<std::int64_t>(size_of(term.dtype));
      const std::int64_t later = (offset + ahead * term.row_stride) * bytes;
      const auto from = reinterpret_cast<std::uintptr_t>(term.data) +
                        static_cast<std::uintptr_t>(later);  // may lie past the tensor
      for (std::uintptr_t line = 0; line < static_cast<std::uintptr_t>(b * bytes); line += 64) {
        __builtin_prefetch(reinterpret_cast<const void*>(from + line));
      }
    }
    ApplyTerm<T>(term, offset, b, s);
  }
}

// s of token rows [row, row + kRows) of a block row, for rows that have terms or gaps.
template <class T, int kRows, class R = Real<T>>
HWY_INLINE void Scores(const ForwardTask& task, const RowGroup& strip, R* s) {
  const SegmentTag<T> d;
  const BlockSoftmaxProblem& p = *task.problem;
  const std::int64_t b = p.block;
  const auto scale = hn::Set(d, static_cast<R>(p.scale));
  for (const auto& block : p.layout->row(strip.head, strip.row)) {
    const T* x = At<T>(p.x, task.tensors->x, task.rows.z, block.rank, strip.begin);
    for (int i = 0; i < kRows; ++i, x += p.x.strides[2], s += b) {
      T scratch[kMaxBlock];
      const T* from = Gathered(x, p.x.strides[3], b, scratch);
      for (std::int64_t j = 0; j < b; j += static_cast<std::int64_t>(hn::Lanes(d))) {
        hn::StoreU(hn::Mul(HWY_NAMESPACE::Load(d, from + j), scale), d, s + j);
      }
      ApplyTerms<T>(task, block.head, block.row * b + strip.begin + i, block.column * b, kRows, s);
    }
  }
}

template <class T, int kRows>
void ForwardStrips(const ForwardTask& task) {
  using R = Real<T>;
  const SegmentTag<T> d;
  const BlockSoftmaxProblem& p = *task.problem;
  const BlockSoftmaxTensors& tensors = *task.tensors;
  const std::int64_t b = p.block;
  const auto scale = static_cast<R>(p.scale);
  R* exponentials = reinterpret_cast<R*>(task.scratch);
  R* other = exponentials + task.strip_elements;
  R* scores = other + task.strip_elements;

  Outputs<T, kRows> before;
  const auto run = [&](const RowGroup& strip, const RowGroup* next, std::int64_t next_z) {
    const auto x = StripOf<T>(p.x, tensors.x, *p.layout, task.rows.z, strip);
    Strip<const T> x_next;
    if (next != nullptr) x_next = StripOf<T>(p.x, tensors.x, *p.layout, next_z, *next);
    Outputs<T, kRows> outputs{
        .exponentials = exponentials,
        .y = WritableStrip(StripOf<T>(p.y, tensors.y, *p.layout, task.rows.z, strip))};
    R most[kRows];
    if (task.direct) {
      RowMaxima<kRows>(d, x, b, std::copysign(R{1}, scale), most);
      Exponentials<T, kRows>(x, b, scale, most, before, task.stream, x_next, exponentials,
                             outputs.factor);
    } else {
      Scores<T, kRows>(task, strip, scores);
      const Strip<const R> s{scores, kRows * b, b, x.blocks};
      RowMaxima<kRows>(d, s, b, R{1}, most);
      Exponentials<T, kRows>(s, b, R{1}, most, before, task.stream, x_next, exponentials,
                             outputs.factor);
    }
    Write(before, x.blocks, b, 1, task.stream);
    if (p.y.strides[3] == 1) {
      before = outputs;
      std::swap(exponentials, other);
    } else {
      Write(outputs, 0, b, p.y.strides[3], false);
    }
  };
  block_softmax::for_strips(task.rows, kRows, run);
  Write(before, 0, b, 1, task.stream);
  if (task.stream) hwy::FlushStream();
}

void ForwardGroup(const ForwardTask& task) {
  dispatch_floating(task.problem->x.dtype, [&]<class T>() {
    block_softmax::with_strip_rows(task.rows, task.problem->block,
                                   [&]<int kRows>() { ForwardStrips<T, kRows>(task); });
  });
}

bool ForwardStreams(const BlockSoftmaxProblem& p, const void* y) {
  return dispatch_floating(p.x.dtype, [&]<class T>() { return Streamable<T>(p.y, y); });
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pullback {
HWY_EXPORT(ForwardGroup);
HWY_EXPORT(ForwardStreams);

namespace block_softmax {
namespace {

class CpuForward final : public Body {
 public:
  CpuForward(const BlockSoftmaxProblem& problem, const Device& device)
      : problem_(problem), threads_(device.threads), tasks_(*problem.layout, problem.block) {
    for (const RowGroup& group : tasks_.groups()) {
      const auto blocks =
          static_cast<std::int64_t>(problem.layout->row(group.head, group.row).size());
      const std::int64_t rows = std::min(strip_rows(problem.block), group.end - group.begin);
      strip_elements_ = std::max(strip_elements_, rows * blocks * problem.block);
    }
    direct_ = problem.x.strides[3] == 1 && !problem.rpe.given() &&
              !problem.key_padding_mask.given() && !problem.attn_mask.given();
    // Exponentials of two strips, and scores of one.
    const std::size_t bytes = static_cast<std::size_t>(strip_elements_ * (direct_ ? 2 : 3)) *
                              size_of(accumulation_dtype(problem.x.dtype));
    slot_bytes_ = workspace_aligned(bytes);
    workspace_bytes = slot_bytes_ * static_cast<std::size_t>(threads_.count());
    description = "strips of rows, read twice in cache; sums in " +
                  std::string(name_of(accumulation_dtype(problem.x.dtype))) +
                  "; same bits for any number of threads";
  }

  void run(Stream, const BlockSoftmaxTensors& tensors, Workspace workspace) const override {
    const BlockSoftmaxProblem& p = problem_;
    ForwardTask common{.problem = &p,
                       .tensors = &tensors,
                       .terms = {rpe_term(p.rpe, tensors.rpe),
                                 key_term(p.key_padding_mask, tensors.key_padding_mask),
                                 attn_term(p.attn_mask, tensors.attn_mask)},
                       .direct = direct_,
                       .stream = false,
                       .rows = {},
                       .scratch = nullptr,
                       .strip_elements = strip_elements_};
    const auto bytes = p.y.numel() * static_cast<std::int64_t>(size_of(p.y.dtype));
    common.stream = bytes > kStreamBytes && tensors.y != tensors.x &&
                    HWY_DYNAMIC_DISPATCH(ForwardStreams)(p, tensors.y);
    tasks_.for_each(threads_, p.x.shape[0], bytes > kFetchBytes,
                    [&](const RowTask& rows, int slot) {
                      ForwardTask task = common;
                      task.rows = rows;
                      task.scratch = static_cast<std::byte*>(workspace.data) +
                                     static_cast<std::size_t>(slot) * slot_bytes_;
                      HWY_DYNAMIC_DISPATCH(ForwardGroup)(task);
                    });
  }

 private:
  static Term rpe_term(const TensorSpec& spec, const void* data) {
    return {data,
            spec.dtype,
            MaskMode::add,
            spec.shape[0] == 1 ? 0 : spec.strides[0],
            spec.shape[1] == 1 ? 0 : spec.strides[1],
            spec.strides[2],
            spec.strides[3]};
  }
  Term key_term(const TensorSpec& spec, const void* data) const {
    return {data, spec.dtype, problem_.key_padding_mode, spec.strides[0], 0, 0, spec.strides[1]};
  }
  Term attn_term(const TensorSpec& spec, const void* data) const {
    return {data, spec.dtype, problem_.attn_mask_mode, 0, 0, spec.strides[0], spec.strides[1]};
  }

  BlockSoftmaxProblem problem_;
  Threads threads_;
  RowTasks tasks_;
  std::int64_t strip_elements_ = 0;
  bool direct_ = false;
  std::size_t slot_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Body> make_cpu_forward(const BlockSoftmaxProblem& problem, const Device& device) {
  return std::make_unique<CpuForward>(problem, device);
}

}  // namespace block_softmax
}  // namespace pullback
#endif
