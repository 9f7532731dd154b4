// Segments: the b elements of one token row inside one block, at any column stride.
//
// Load() of simd-inl.hpp is called by its full name here and wherever the pointer may be to Real:
// Highway's own Load(), which wants aligned memory, is found through its arguments otherwise.

#if defined(PULLBACK_BLOCK_SOFTMAX_SEGMENT_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef PULLBACK_BLOCK_SOFTMAX_SEGMENT_INL_HPP
#undef PULLBACK_BLOCK_SOFTMAX_SEGMENT_INL_HPP
#else
#define PULLBACK_BLOCK_SOFTMAX_SEGMENT_INL_HPP
#endif

#include <hwy/cache_control.h>

#include "cpu/simd-inl.hpp"
#include "ops/block_softmax/cpu/row_groups.hpp"
#include "ops/block_softmax/problem.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {

// b is a multiple of 16, so that vectors of at most 16 lanes need no remainder.
template <class T>
using SegmentTag = hn::CappedTag<Real<T>, 16>;

inline constexpr std::int64_t kMaxBlock = 128;

// Token row i of a block of a tensor [Z,nnz,b,b].
template <class T>
HWY_INLINE const T* At(const TensorSpec& spec, const void* data, std::int64_t z, std::int64_t rank,
                       std::int64_t i) {
  return static_cast<const T*>(data) + z * spec.strides[0] + rank * spec.strides[1] +
         i * spec.strides[2];
}

// The segment itself when its elements are neighbours, else a copy of it in `scratch` [kMaxBlock].
template <class T>
HWY_INLINE const T* Gathered(const T* from, std::int64_t stride, std::int64_t b, T* scratch) {
  if (stride == 1) return from;
  for (std::int64_t j = 0; j < b; ++j) scratch[j] = from[j * stride];
  return scratch;
}

// Where to write a segment: in place when its elements are neighbours, else into `scratch`, from
// where Scatter() takes it.
template <class T>
HWY_INLINE T* Writable(T* to, std::int64_t stride, T* scratch) {
  return stride == 1 ? to : scratch;
}
template <class T>
HWY_INLINE void Scatter(const T* from, T* to, std::int64_t stride, std::int64_t b) {
  if (from == to) return;
  for (std::int64_t j = 0; j < b; ++j) to[j * stride] = from[j];
}

// Stores one vector past the caches; `to` is aligned to the vector's bytes.
template <class D, class T>
HWY_INLINE void StreamStore(D d, hn::Vec<D> value, T* to) {
  if constexpr (std::is_same_v<T, hn::TFromD<D>>) {
    hn::Stream(value, d, to);
  } else {
    const hn::Rebind<std::uint16_t, D> d16;
    HWY_ALIGN T buffer[hn::MaxLanes(d)];
    Store(d, value, buffer);
    hn::Stream(hn::Load(d16, reinterpret_cast<const std::uint16_t*>(buffer)), d16,
               reinterpret_cast<std::uint16_t*>(to));
  }
}

// The part of a tensor [Z,nnz,b,b] that the next task will read, to be brought near while this one
// computes: the hardware sees a stream only once a task has begun on it.
class Upcoming {
 public:
  Upcoming() = default;
  Upcoming(const TensorSpec& spec, const void* data, const BlockLayout& layout,
           const block_softmax::RowGroup& group, std::int64_t z) {
    const std::int64_t b = spec.shape[3];
    if (spec.strides[3] != 1 || spec.strides[2] != b) return;
    const auto size = static_cast<std::int64_t>(size_of(spec.dtype));
    const auto blocks = layout.row(group.head, group.row);
    at_ = static_cast<const char*>(data) +
          (z * spec.strides[0] + blocks[0].rank * spec.strides[1] + group.begin * b) * size;
    piece_ = (group.end - group.begin) * b * size;
    stride_ = spec.strides[1] * size;
    pieces_ = static_cast<std::int64_t>(blocks.size());
  }

  // The next `bytes` of it. Few at a time: there is a queue, and when it is full loads wait.
  HWY_INLINE void Fetch(std::int64_t bytes) {
    for (owed_ += bytes; owed_ > 0 && pieces_ > 0; owed_ -= kLine) {
      hwy::Prefetch(at_ + done_);
      done_ += kLine;
      if (done_ < piece_) continue;
      done_ = 0;
      at_ += stride_;
      --pieces_;
    }
  }

 private:
  static constexpr std::int64_t kLine = 64;
  const char* at_ = nullptr;
  std::int64_t piece_ = 0, stride_ = 0, pieces_ = 0, done_ = 0, owed_ = 0;
};

// Whether a tensor [Z,nnz,b,b] at `data` may be written with StreamStore: every vector is aligned.
template <class T>
bool Streamable(const TensorSpec& spec, const void* data) {
  const std::size_t vector = hn::Lanes(SegmentTag<T>()) * sizeof(T);
  if (spec.strides[3] != 1 || reinterpret_cast<std::uintptr_t>(data) % vector != 0) return false;
  for (int dim = 0; dim < 3; ++dim) {
    if (spec.strides[dim] * static_cast<std::int64_t>(sizeof(T)) %
            static_cast<std::int64_t>(vector) !=
        0) {
      return false;
    }
  }
  return true;
}

}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
