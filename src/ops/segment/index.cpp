#include "ops/segment/index.hpp"

#include <fmt/format.h>

#include <cstring>

#include "core/check.hpp"
#include "ops/segment/problem.hpp"

namespace pullback {
namespace {

constexpr std::int64_t kBlock = 1 << 14;

std::size_t bitmap_bytes(std::int64_t rows) { return static_cast<std::size_t>((rows + 7) / 8); }

bool all_ascend(const Segments& segments, const Threads& threads) {
  if (segments.count == 0) return ascend(segments, 0, 0);
  std::atomic<bool> all = true;
  threads.parallel_for((segments.count + kBlock - 1) / kBlock, [&](std::int64_t block, int) {
    if (!ascend(segments, block * kBlock, std::min(segments.count, (block + 1) * kBlock))) {
      all.store(false, std::memory_order_relaxed);
    }
  });
  return all.load();
}

}  // namespace

std::size_t segments_workspace_bytes(const SegmentProblem& problem) {
  const auto offsets = static_cast<std::size_t>(problem.num_segments + 1) * sizeof(std::int64_t);
  const bool bitmap = problem.check_indices && problem.permutation.given();
  return std::max(offsets, bitmap ? bitmap_bytes(problem.x.shape[0]) : 0);
}

Segments unproven_segments(const SegmentProblem& problem, const SegmentTensors& tensors) {
  Segments segments{
      .rows = problem.x.shape[0], .count = problem.num_segments, .offsets = {}, .permutation = {}};
  if (problem.offsets.given()) segments.offsets = IndexView(problem.offsets, tensors.offsets);
  if (problem.permutation.given() && segments.rows > 0) {
    segments.permutation = IndexView(problem.permutation, tensors.permutation);
  }
  return segments;
}

Segments make_segments(const SegmentProblem& problem, const SegmentTensors& tensors, void* scratch,
                       const Threads& threads) {
  const std::int64_t rows = problem.x.shape[0];
  const std::int64_t count = problem.num_segments;
  Segments segments = unproven_segments(problem, tensors);
  auto* repaired = static_cast<std::int64_t*>(scratch);
  if (problem.offsets.given()) {
    if (all_ascend(segments, threads)) return segments;
    const IndexView offsets = segments.offsets;
    std::int64_t largest = 0;
    for (std::int64_t s = 0; s <= count; ++s) {
      largest = std::max(largest, std::min(offsets[s], rows));
      repaired[s] = largest;
    }
  } else {
    // Keys out of order let two blocks of rows set the same offset, before it is all thrown away.
    const auto set = [=](std::int64_t s, std::int64_t n) {
      std::atomic_ref<std::int64_t>(repaired[s]).store(n, std::memory_order_relaxed);
    };
    IndexView(problem.ids, tensors.ids).visit([&](const auto& id) {
      if (offsets_of_keys(rows, count, threads, id, set)) return;
      std::int64_t largest = -1;
      for (std::int64_t n = 0; n < rows; ++n) {
        for (const auto next = std::min(id(n), count); largest < next;) repaired[++largest] = n;
      }
      while (largest < count) repaired[++largest] = rows;
    });
  }
  segments.offsets = {};
  segments.offsets.data = repaired;
  return segments;
}

std::string expected_ids(std::int64_t segments) {
  return segments > 0 ? fmt::format("0 to {}", segments - 1) : "none, as there are no segments";
}

namespace {

[[noreturn]] void report(std::string_view tensor, std::int64_t index, const std::string& expected,
                         std::int64_t got, std::string_view remedy) {
  fail(ErrorCode::invalid_argument, "segment", fmt::format("{}[{}]", tensor, index), expected,
       fmt::format("{}", got), remedy);
}

void check_offsets(const IndexView& offsets, std::int64_t count, std::int64_t rows) {
  for (std::int64_t s = 0; s <= count; ++s) {
    const std::int64_t value = offsets[s];
    if (value < 0 || value > rows) {
      report("offsets", s, fmt::format("0 to {} (the rows of x)", rows), value, {});
    }
    if (s > 0 && value < offsets[s - 1]) {
      report("offsets", s, fmt::format("at least {}, the one before", offsets[s - 1]), value, {});
    }
  }
}

void check_ids(const IndexView& ids, std::int64_t count, std::int64_t rows) {
  for (std::int64_t n = 0; n < rows; ++n) {
    const std::int64_t value = ids[n];
    if (value < 0 || value >= count) {
      report("ids", n, expected_ids(count), value,
             "raise the number of segments; rows of ids that are not checked are dropped");
    }
    if (n > 0 && value < ids[n - 1]) {
      report("ids", n, fmt::format("at least {}, the one before", ids[n - 1]), value,
             "sort with segment_permutation");
    }
  }
}

// Those that the offsets and the permutation come from. Rows outside all offsets are in no segment.
void check_ids_of_permutation(const IndexView& ids, const Segments& segments) {
  const auto check_none = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t n = segments.permutation[r];
      if (ids[n] >= 0 && ids[n] < segments.count) {
        report("ids", n, "one of no segment, as the row is outside all offsets", ids[n],
               "pass the ids that segment_permutation sorted");
      }
    }
  };
  check_none(0, segments.first_row());
  check_none(segments.last_row(), segments.rows);
  for (std::int64_t s = 0; s < segments.count; ++s) {
    for (std::int64_t r = segments.begin(s); r < segments.end(s); ++r) {
      const std::int64_t n = segments.permutation[r];
      if (ids[n] != s) {
        report("ids", n, fmt::format("{}, the segment of the row by offsets and permutation", s),
               ids[n], "pass the ids that segment_permutation sorted");
      }
    }
  }
}

void check_permutation(const IndexView& permutation, std::int64_t rows, std::uint8_t* seen) {
  std::memset(seen, 0, bitmap_bytes(rows));
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t n = permutation[r];
    if (n < 0 || n >= rows) {
      report("permutation", r, fmt::format("0 to {}", rows - 1), n,
             "make it with segment_permutation");
    }
    const auto bit = static_cast<std::uint8_t>(1 << (n % 8));
    if (seen[n / 8] & bit) {
      report("permutation", r, "a row not named before", n, "make it with segment_permutation");
    }
    seen[n / 8] |= bit;
  }
}

}  // namespace

void check_indices(const SegmentProblem& problem, const SegmentTensors& tensors, void* scratch) {
  if (!problem.check_indices) return;
  const std::int64_t rows = problem.x.shape[0];
  if (by_ids(problem)) {
    check_ids(IndexView(problem.ids, tensors.ids), problem.num_segments, rows);
    return;
  }
  check_offsets(IndexView(problem.offsets, tensors.offsets), problem.num_segments, rows);
  if (problem.permutation.given()) {
    check_permutation(IndexView(problem.permutation, tensors.permutation), rows,
                      static_cast<std::uint8_t*>(scratch));
    if (problem.ids.given()) {
      check_ids_of_permutation(IndexView(problem.ids, tensors.ids),
                               unproven_segments(problem, tensors));
    }
  }
}

void check_places(const SegmentProblem& problem, const SegmentTensors& tensors,
                  const Segments& segments) {
  if (tensors.arg == nullptr || problem.arg.dtype != DType::u8) return;
  for (std::int64_t s = 0; s < segments.count; ++s) {
    const std::int64_t length = segments.end(s) - segments.begin(s);
    if (length > kNoPlace) {
      fail(ErrorCode::invalid_argument, "segment", "arg",
           fmt::format("segments of at most {} rows, as u8 counts places", kNoPlace),
           fmt::format("{} rows in segment {}", length, s), "use an i32 or i64 arg");
    }
  }
}

}  // namespace pullback
