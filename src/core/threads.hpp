// The threads of one plan. Results must not depend on their number: split work by the problem
// alone, and combine partial results in a fixed order.
#pragma once

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <cstdint>

#include "core/cpu_info.hpp"

namespace pullback {

class Threads {
 public:
  // 0 = as many as the process may use.
  explicit Threads(int count) : arena_(count > 0 ? count : available_cpus()) {}

  int count() const { return arena_.max_concurrency(); }

  // Calls body(i, slot) for every i in [0, count), `grain` neighbours at a time on one thread.
  // `slot` is in [0, this->count()) and belongs to one thread at a time: the index of its scratch.
  template <class Body>
  void parallel_for(std::int64_t count, const Body& body, std::int64_t grain = 1) const {
    if (count <= grain || arena_.max_concurrency() == 1) {
      for (std::int64_t i = 0; i < count; ++i) body(i, 0);
      return;
    }
    arena_.execute([&] {
      tbb::parallel_for(
          tbb::blocked_range<std::int64_t>(0, count, static_cast<std::size_t>(grain)),
          [&](const tbb::blocked_range<std::int64_t>& range) {
            const int slot = tbb::this_task_arena::current_thread_index();
            for (std::int64_t i = range.begin(); i < range.end(); ++i) body(i, slot);
          },
          tbb::simple_partitioner());
    });
  }

 private:
  mutable tbb::task_arena arena_;
};

}  // namespace pullback
