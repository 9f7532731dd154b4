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

// A few token rows of one block row, in the tensor or in scratch: row i of block k begins at
// at + k · block_stride + i · row_stride.
template <class T>
struct Strip {
  T* at = nullptr;
  std::int64_t block_stride = 0, row_stride = 0, blocks = 0;

  T* block(std::int64_t k) const { return at + k * block_stride; }
};

// The strip in a tensor [Z,nnz,b,b]: the blocks of a row have neighbouring ranks.
template <class T>
HWY_INLINE Strip<const T> StripOf(const TensorSpec& spec, const void* data,
                                  const BlockLayout& layout, std::int64_t z,
                                  const block_softmax::RowGroup& strip) {
  const auto blocks = layout.row(strip.head, strip.row);
  return {At<T>(spec, data, z, blocks[0].rank, strip.begin), spec.strides[1], spec.strides[2],
          static_cast<std::int64_t>(blocks.size())};
}
template <class T>
HWY_INLINE Strip<T> WritableStrip(const Strip<const T>& strip) {
  return {const_cast<T*>(strip.at), strip.block_stride, strip.row_stride, strip.blocks};
}

// So many blocks of a row are added up by themselves: sums of sums lose less than one long sum.
inline constexpr std::int64_t kSumBlocks = 64;

template <class D, int kRows>
HWY_INLINE void EndSums(D d, hn::Vec<D> (&sum)[kRows], hn::Vec<D> (&whole)[kRows]) {
  for (int i = 0; i < kRows; ++i) {
    whole[i] = hn::Add(whole[i], sum[i]);
    sum[i] = hn::Zero(d);
  }
}

// Asks for what the next strip will read. A strip's lines lie whole blocks apart and share few sets
// of the first-level cache: rows of many small blocks would displace there what is still needed.
template <int kRows>
HWY_INLINE void Fetch(const void* from) {
  constexpr int kFirstLevel = 3, kSecondLevel = 2;
  __builtin_prefetch(from, 0, kRows > 1 ? kSecondLevel : kFirstLevel);
}

// Whether a tensor [Z,nnz,b,b] at `data` may be written with StreamStore: every vector is aligned.
template <class T>
bool Streamable(const TensorSpec& spec, const void* data) {
  const std::size_t vector = hn::Lanes(SegmentTag<T>()) * sizeof(T);
  if (spec.strides[3] != 1 || reinterpret_cast<std::uintptr_t>(data) % vector != 0) return false;
  for (int dim = 0; dim < 3; ++dim) {
    if (spec.shape[dim] == 1) continue;  // whatever its stride
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
