// From index tensors that nobody vouches for to segments that can be walked without a thought.
//
// One rule repairs what is out of order: an offset or id smaller than one before it counts as the
// largest so far, after clamping (offsets to [0, N], ids to [-1, S]). Ascending tensors are their
// own repair, and ascending offsets are used where they lie.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/element.hpp"
#include "core/threads.hpp"
#include "pullback/segment.hpp"

namespace pullback {

// A tensor of one dimension, i32 or i64.
struct IndexView {
  const void* data = nullptr;
  std::int64_t stride = 1;
  bool wide = true;

  IndexView() = default;
  IndexView(const TensorSpec& spec, const void* data_)
      : data(data_),
        stride(spec.shape[0] == 1 ? 0 : spec.strides[0]),
        wide(spec.dtype == DType::i64) {}

  std::int64_t operator[](std::int64_t i) const {
    return wide ? static_cast<const std::int64_t*>(data)[i * stride]
                : static_cast<const std::int32_t*>(data)[i * stride];
  }
  // Calls f(at), where at(i) is the same without a look at what they are.
  template <class F>
  auto visit(const F& f) const {
    if (stride != 1) return f([this](std::int64_t i) { return (*this)[i]; });
    if (wide) {
      return f([from = static_cast<const std::int64_t*>(data)](std::int64_t i) { return from[i]; });
    }
    return f([from = static_cast<const std::int32_t*>(data)](std::int64_t i) {
      return std::int64_t{from[i]};
    });
  }
};

// Segment s has the rows [begin(s), end(s)) of the sorted order; they rise with s, within [0, N].
struct Segments {
  std::int64_t rows = 0;   // N
  std::int64_t count = 0;  // S
  IndexView offsets;       // [S+1]
  IndexView permutation;   // [N], or no data

  std::int64_t begin(std::int64_t s) const { return offsets[s]; }
  std::int64_t end(std::int64_t s) const { return offsets[s + 1]; }
  std::int64_t first_row() const { return offsets[0]; }
  std::int64_t last_row() const { return offsets[count]; }
  bool permuted() const { return permutation.data != nullptr; }
  // Row of x at place r of the sorted order; -1 when the permutation holds no row there.
  std::int64_t row(std::int64_t r) const {
    if (!permuted()) return r;
    const std::int64_t n = permutation[r];
    return n >= 0 && n < rows ? n : -1;
  }
  // The same for reading, where a bad entry stands for row 0.
  std::int64_t readable_row(std::int64_t r) const { return std::max<std::int64_t>(row(r), 0); }
};

// The offsets as they are. Nothing may be read by them before ascend() has held for all that is
// used.
Segments unproven_segments(const SegmentProblem& problem, const SegmentTensors& tensors);

// Whether offsets [begin, end] ascend, within [0, N].
bool ascend(const Segments& segments, std::int64_t begin, std::int64_t end);

// Scratch of check_indices and make_segments.
std::size_t segments_workspace_bytes(const SegmentProblem& problem);

// O(S), or O(N) from ids; in parallel while the tensors are ascending.
Segments make_segments(const SegmentProblem& problem, const SegmentTensors& tensors, void* scratch,
                       const Threads& threads);

// What is told of an id that is none of them.
std::string expected_ids(std::int64_t segments);

// If the problem asks for checks: throws Error(invalid_argument) naming the first bad offset, id or
// permutation entry. Before make_segments, as both use the scratch.
void check_indices(const SegmentProblem& problem, const SegmentTensors& tensors, void* scratch);

// Throws when a compact arg is given and a segment is too long for it.
void check_places(const SegmentProblem& problem, const SegmentTensors& tensors,
                  const Segments& segments);

// Writes offset(s) = number of rows whose key is below s, for s in [0, S], from keys in ascending
// order, clamped to [-1, S]. False when they are not; the offsets then mean nothing.
template <class Key, class SetOffset>
bool offsets_of_keys(std::int64_t rows, std::int64_t count, const Threads& threads,
                     const Key& key_of, const SetOffset& set_offset_of) {
  constexpr std::int64_t kBlock = 1 << 14, kPart = 1 << 10;
  const auto clamped = [=](std::int64_t key) { return std::clamp<std::int64_t>(key, -1, count); };
  std::atomic<bool> ascending = true;
  threads.parallel_for((rows + kBlock - 1) / kBlock, [&](std::int64_t block, int) {
    // Copies, which no store to memory changes.
    const Key key = key_of;
    const SetOffset set_offset = set_offset_of;
    std::int64_t last = std::numeric_limits<std::int64_t>::min();
    if (block > 0) last = key(block * kBlock - 1);
    const std::int64_t stop = std::min(rows, (block + 1) * kBlock);
    for (std::int64_t part = block * kBlock; part < stop; part += kPart) {
      // Rows with another key than the one before, listed without a guess which those are.
      std::int32_t firsts[kPart];
      const std::int64_t length = std::min(kPart, stop - part);
      std::int64_t found = 0, before = last;
      bool falls = false;
      for (std::int64_t r = 0; r < length; ++r) {
        const std::int64_t next = key(part + r);
        firsts[found] = static_cast<std::int32_t>(r);
        found += next != last;
        falls |= next < last;
        last = next;
      }
      if (falls) {
        ascending.store(false, std::memory_order_relaxed);
        return;
      }
      for (std::int64_t k = 0; k < found; ++k) {
        const std::int64_t n = part + firsts[k], next = clamped(key(n));
        for (std::int64_t s = clamped(before) + 1; s <= next; ++s) set_offset(s, n);
        before = next;
      }
    }
  });
  const std::int64_t last = rows == 0 ? -1 : clamped(key_of(rows - 1));
  for (std::int64_t s = last + 1; s <= count; ++s) set_offset_of(s, rows);
  return ascending.load();
}

}  // namespace pullback
