// y = exp(s - max s) / sum exp(s - max s) over the blocks of a row, s = scale · x + added terms.
//
// A task is a group of token rows of one block row. It goes over them three times:
//   1. block by block, so that x is read in long runs: s into scratch, row after row;
//   2. row by row in scratch: maximum, exponentials, their sum;
//   3. block by block again: y = exponential / sum, streamed out.
// Every x is read before any y of the group is written, so y may be x's memory.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/block_softmax/cpu/forward.cpp"
#include <hwy/foreach_target.h>

#include <hwy/cache_control.h>

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
  bool stream;
  std::int64_t z;
  RowGroup group;
  std::int64_t next_z;
  const RowGroup* next;  // what this thread will probably do next; may be null
  std::byte* scratch;
};

// Rows in scratch are this many elements longer than needed, lest they compete for cache sets.
inline constexpr std::int64_t kRowPadding = 16;

}  // namespace pullback::block_softmax
#endif

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

using block_softmax::ForwardTask;
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
  const auto* from = static_cast<const std::uint8_t*>(term.data) + offset;
  for (std::int64_t j = 0; j < b; ++j) scratch[j] = static_cast<Real<T>>(from[j * stride]);
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

// exp(x) for x <= 0, NaN for NaN; larger x do not matter. For f32 a result below 2^-126 is 0, and
// the error is below 1 ulp: 2^n · exp(r) with x = n · log 2 + r, and exp(r) by the Cephes
// polynomial.
template <class D>
HWY_INLINE hn::Vec<D> ExpNonPositive(D d, hn::Vec<D> x) {
  if constexpr (std::is_same_v<hn::TFromD<D>, double>) {
    return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));  // Exp() gives 0 for NaN
  } else {
    const hn::RebindToUnsigned<D> bits;
    // Adding 1.5 · 2^23 rounds to an integer in the low bits; 127 more make those 2^n's exponent.
    const auto rounder = hn::Set(d, 12582912.0f + 127.0f);
    const auto shifted = hn::MulAdd(x, hn::Set(d, 1.44269504088896341f), rounder);
    const auto n = hn::Sub(shifted, rounder);
    const auto two_to_n = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(bits, shifted)));
    auto r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
    r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
    auto p = hn::MulAdd(hn::Set(d, 1.9875691500e-4f), r, hn::Set(d, 1.3981999507e-3f));
    p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
    p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
    p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
    p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
    p = hn::MulAdd(p, hn::Mul(r, r), hn::Add(r, hn::Set(d, 1.0f)));
    const auto vanishes = hn::Lt(x, hn::Set(d, -87.33654f));
    return hn::IfThenZeroElse(vanishes, hn::Mul(p, two_to_n));
  }
}

// Replaces the scores of one row by exp(s - max), and returns 1 / their sum, or 0 for a row that
// sees nothing.
template <class T, class R = Real<T>>
HWY_INLINE R Exponentials(R* s, std::int64_t count, Upcoming& upcoming) {
  const hn::CappedTag<R, 16> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  auto most0 = hn::LoadU(d, s), most1 = most0;
  std::int64_t j = lanes;
  for (; j + lanes < count; j += 2 * lanes) {
    most0 = hn::Max(most0, hn::LoadU(d, s + j));
    most1 = hn::Max(most1, hn::LoadU(d, s + j + lanes));
  }
  if (j < count) most0 = hn::Max(most0, hn::LoadU(d, s + j));
  auto most = hn::MaxOfLanes(d, hn::Max(most0, most1));
  // Nothing is seen (or NaN besides): any finite shift leaves exponentials of 0 (or NaN).
  const auto nothing = hn::Eq(most, hn::Neg(hn::Inf(d)));
  most = hn::IfThenZeroElse(nothing, most);

  // The maximum may have lost a NaN; the sum keeps it.
  auto sum = hn::Zero(d);
  for (j = 0; j < count; j += lanes) {
    upcoming.Fetch(lanes * static_cast<std::int64_t>(sizeof(T)));
    const auto value = ExpNonPositive(d, hn::Sub(hn::LoadU(d, s + j), most));
    hn::StoreU(value, d, s + j);
    sum = hn::Add(sum, value);
  }
  const R total = hn::GetLane(hn::SumOfLanes(d, sum));
  return total == 0 ? R{0} : R{1} / total;
}

// All terms at the segment of token row `row` that begins at token column `column`.
template <class T>
HWY_NOINLINE void ApplyTerms(const ForwardTask& task, std::int64_t head, std::int64_t row,
                             std::int64_t column, Real<T>* s) {
  for (const Term& term : task.terms) {
    if (term.data == nullptr) continue;
    const std::int64_t offset = task.z * term.z_stride + head * term.h_stride +
                                row * term.row_stride + column * term.column_stride;
    ApplyTerm<T>(term, offset, task.problem->block, s);
  }
}

template <class T>
void ForwardRows(const ForwardTask& task) {
  using R = Real<T>;
  const SegmentTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const BlockSoftmaxProblem& p = *task.problem;
  const auto blocks = p.layout->row(task.group.head, task.group.row);
  const std::int64_t b = p.block, begin = task.group.begin, rows = task.group.end - begin;
  const auto row_length = static_cast<std::int64_t>(blocks.size()) * b;
  const std::int64_t pitch = row_length + block_softmax::kRowPadding;
  R* s = reinterpret_cast<R*>(task.scratch);

  const auto scale = hn::Set(d, static_cast<R>(p.scale));
  const bool has_terms = std::any_of(std::begin(task.terms), std::end(task.terms),
                                     [](const Term& term) { return term.data != nullptr; });
  const std::int64_t x_stride = p.x.strides[2];
  for (std::size_t k = 0; k < blocks.size(); ++k) {
    const T* x = static_cast<const T*>(task.tensors->x) + task.z * p.x.strides[0] +
                 blocks[k].rank * p.x.strides[1] + begin * x_stride;
    R* to = s + static_cast<std::int64_t>(k) * b;
    for (std::int64_t i = 0; i < rows; ++i, x += x_stride, to += pitch) {
      T scratch[kMaxBlock];
      const T* from = Gathered(x, p.x.strides[3], b, scratch);
      for (std::int64_t j = 0; j < b; j += lanes) {
        hn::StoreU(hn::Mul(HWY_NAMESPACE::Load(d, from + j), scale), d, to + j);
      }
      if (has_terms) {
        ApplyTerms<T>(task, blocks[k].head, blocks[k].row * b + begin + i, blocks[k].column * b,
                      to);
      }
    }
  }

  R factor[kMaxBlock];
  Upcoming upcoming;
  if (task.next != nullptr)
    upcoming = Upcoming(p.x, task.tensors->x, *p.layout, *task.next, task.next_z);
  for (std::int64_t i = 0; i < rows; ++i) {
    factor[i] = Exponentials<T>(s + i * pitch, row_length, upcoming);
  }

  const std::int64_t y_stride = p.y.strides[2];
  for (std::size_t k = 0; k < blocks.size(); ++k) {
    T* y = static_cast<T*>(task.tensors->y) + task.z * p.y.strides[0] +
           blocks[k].rank * p.y.strides[1] + begin * y_stride;
    const R* from = s + static_cast<std::int64_t>(k) * b;
    for (std::int64_t i = 0; i < rows; ++i, y += y_stride, from += pitch) {
      const auto by = hn::Set(d, factor[i]);
      if (task.stream) {
        for (std::int64_t j = 0; j < b; j += lanes) {
          StreamStore(d, hn::Mul(hn::LoadU(d, from + j), by), y + j);
        }
        continue;
      }
      T scratch[kMaxBlock];
      T* to = Writable(y, p.y.strides[3], scratch);
      for (std::int64_t j = 0; j < b; j += lanes) {
        Store(d, hn::Mul(hn::LoadU(d, from + j), by), to + j);
      }
      Scatter(to, y, p.y.strides[3], b);
    }
  }
  if (task.stream) hwy::FlushStream();
}

void ForwardGroup(const ForwardTask& task) {
  dispatch_floating(task.problem->x.dtype, [&]<class T>() { ForwardRows<T>(task); });
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
      : problem_(problem),
        threads_(device.threads),
        groups_(make_row_groups(*problem.layout, problem.block)) {
    std::int64_t most = 0;
    for (const RowGroup& group : groups_) {
      const auto blocks =
          static_cast<std::int64_t>(problem.layout->row(group.head, group.row).size());
      most = std::max(most, (group.end - group.begin) * (blocks * problem.block + kRowPadding));
    }
    const std::size_t bytes =
        static_cast<std::size_t>(most) * size_of(accumulation_dtype(problem.x.dtype));
    slot_bytes_ = (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    workspace_bytes = slot_bytes_ * static_cast<std::size_t>(threads_.count());
    description = "groups of rows, three passes over each in cache; sums in " +
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
                       .stream = false,
                       .z = 0,
                       .group = {},
                       .next_z = 0,
                       .next = nullptr,
                       .scratch = nullptr};
    const auto bytes = p.y.numel() * static_cast<std::int64_t>(size_of(p.y.dtype));
    common.stream = bytes > kStreamBytes && tensors.y != tensors.x &&
                    HWY_DYNAMIC_DISPATCH(ForwardStreams)(p, tensors.y);
    const auto group_count = static_cast<std::int64_t>(groups_.size());
    const std::int64_t task_count = p.x.shape[0] * group_count;
    threads_.parallel_for(task_count, [&](std::int64_t index, int slot) {
      ForwardTask task = common;
      task.z = index / group_count;
      task.group = groups_[static_cast<std::size_t>(index % group_count)];
      if (bytes > kFetchBytes && index + 1 < task_count) {
        task.next_z = (index + 1) / group_count;
        task.next = &groups_[static_cast<std::size_t>((index + 1) % group_count)];
      }
      task.scratch =
          static_cast<std::byte*>(workspace.data) + static_cast<std::size_t>(slot) * slot_bytes_;
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
  std::vector<RowGroup> groups_;
  std::size_t slot_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Body> make_cpu_forward(const BlockSoftmaxProblem& problem, const Device& device) {
  return std::make_unique<CpuForward>(problem, device);
}

}  // namespace block_softmax
}  // namespace pullback
#endif
