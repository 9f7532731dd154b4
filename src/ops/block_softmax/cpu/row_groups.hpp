// How the cpu variant cuts a layout into tasks, for forward and backward alike.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/threads.hpp"
#include "pullback/block_sparse.hpp"

namespace pullback::block_softmax {

// Token rows [begin, end) of block row (head, row), which has at least one block.
struct RowGroup {
  std::int32_t head, row, begin, end;
};

// Elements of a group, unless a single row is longer: few enough that threads share block rows.
inline constexpr std::int64_t kGroupElements = 64 * 1024;

// Small groups are gone through by one task, which has to fill and drain its pipeline only once.
inline constexpr std::int64_t kTaskElements = 32 * 1024;

// Rows that are gone over together: in a block, a run of memory of 64 elements or a few more.
// Longer runs of both input and output would not stay in the first-level cache.
constexpr int strip_rows(std::int64_t block) { return block < 32 ? 4 : block < 64 ? 2 : 1; }

// What one thread does at a time: groups of one z.
struct RowTask {
  std::int64_t z;
  std::span<const RowGroup> groups;
  std::int64_t next_z;
  const RowGroup* next;  // what this thread will probably do after them; null: nothing to fetch
};

// Calls body(strip, next, next_z) for strips of at most `rows` rows, each with the strip after it,
// or null.
template <class Body>
void for_strips(const RowTask& task, int rows, const Body& body) {
  const auto first_strip = [rows](RowGroup group) {
    group.end = std::min(group.end, group.begin + rows);
    return group;
  };
  for (std::size_t i = 0; i < task.groups.size(); ++i) {
    RowGroup rest = task.groups[i];
    while (rest.begin < rest.end) {
      const RowGroup strip = first_strip(rest);
      rest.begin = strip.end;
      const bool ends = rest.begin == rest.end, last = ends && i + 1 == task.groups.size();
      const RowGroup* after = !ends ? &rest : !last ? &task.groups[i + 1] : task.next;
      const RowGroup next = after != nullptr ? first_strip(*after) : strip;
      body(strip, after != nullptr ? &next : nullptr, last ? task.next_z : task.z);
    }
  }
}

// Calls f.template operator()<rows>() with the number of rows that all strips of the task have.
template <class F>
void with_strip_rows(const RowTask& task, std::int64_t block, const F& f) {
  const int rows = strip_rows(block);
  const bool whole = std::all_of(task.groups.begin(), task.groups.end(), [&](const auto& group) {
    return (group.end - group.begin) % rows == 0;
  });
  if (whole && rows == 4) {
    f.template operator()<4>();
  } else if (whole && rows == 2) {
    f.template operator()<2>();
  } else {
    f.template operator()<1>();
  }
}

// All rows of a layout in tasks.
class RowTasks {
 public:
  RowTasks(const BlockLayout& layout, std::int64_t block) {
    std::int64_t elements = kTaskElements;
    for (std::int64_t h = 0; h < layout.heads(); ++h) {
      for (std::int64_t r = 0; r < layout.rows(); ++r) {
        const auto row_length = static_cast<std::int64_t>(layout.row(h, r).size()) * block;
        if (row_length == 0) continue;
        std::int64_t rows = std::clamp<std::int64_t>(kGroupElements / row_length, 1, block);
        if (const int strip = strip_rows(block); rows > strip) rows -= rows % strip;
        for (std::int64_t begin = 0; begin < block; begin += rows) {
          const std::int64_t end = std::min(begin + rows, block);
          if (elements >= kTaskElements) {
            starts_.push_back(groups_.size());
            elements = 0;
          }
          elements += (end - begin) * row_length;
          groups_.push_back({static_cast<std::int32_t>(h), static_cast<std::int32_t>(r),
                             static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end)});
        }
      }
    }
    starts_.push_back(groups_.size());
  }

  std::span<const RowGroup> groups() const { return groups_; }
  // Of one z.
  std::int64_t count() const { return static_cast<std::int64_t>(starts_.size()) - 1; }

  // Calls run(task, slot) for the tasks of all z in [0, Z). With `fetch` they know what comes next.
  template <class Run>
  void for_each(const Threads& threads, std::int64_t Z, bool fetch, const Run& run) const {
    threads.parallel_for(Z * count(), [&](std::int64_t index, int slot) {
      RowTask task{index / count(), groups_of(index), (index + 1) / count(), nullptr};
      if (fetch && index + 1 < Z * count()) task.next = &groups_of(index + 1)[0];
      run(task, slot);
    });
  }

 private:
  std::span<const RowGroup> groups_of(std::int64_t index) const {
    const auto task = static_cast<std::size_t>(index % count());
    return groups().subspan(starts_[task], starts_[task + 1] - starts_[task]);
  }

  std::vector<RowGroup> groups_;
  std::vector<std::size_t> starts_;  // of each task in groups_, and the end
};

// Where a run writes more than this, outputs go past the caches: nothing of them would be left
// there anyway, and the lines need not be read before they are written.
inline constexpr std::int64_t kStreamBytes = std::int64_t{32} << 20;

// Where a tensor has more bytes than this, a task asks for the input of the next one.
inline constexpr std::int64_t kFetchBytes = std::int64_t{1} << 20;

}  // namespace pullback::block_softmax
