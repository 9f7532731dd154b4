// The threads of one plan. Results must not depend on their number: split work by the problem
// alone, and combine partial results in a fixed order.
#pragma once

#include <cstdint>

#include "core/cpu_info.hpp"

// ThreadSanitizer cannot look into TBB and takes its hand-overs for races. Under it, plain threads
// take TBB's place, so that what it reports is ours.
#if defined(__SANITIZE_THREAD__)
#define PULLBACK_PLAIN_THREADS 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define PULLBACK_PLAIN_THREADS 1
#endif
#endif

#include <algorithm>

#ifdef PULLBACK_PLAIN_THREADS
#include <atomic>
#include <thread>
#include <vector>
#else
#include <tbb/blocked_range.h>
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>
#endif

namespace pullback {

class Threads {
 public:
  // 0 = as many as the process may use.
#ifdef PULLBACK_PLAIN_THREADS
  explicit Threads(int count) : count_(count > 0 ? count : available_cpus()) {}
  int count() const { return count_; }
#else
  explicit Threads(int count) : arena_(std::min(count > 0 ? count : available_cpus(), limit())) {}
  int count() const { return arena_.max_concurrency(); }
#endif

  // Calls body(i, slot) for every i in [0, count), `grain` neighbours at a time on one thread.
  // `slot` is in [0, this->count()) and belongs to one thread at a time: the index of its scratch.
  template <class Body>
  void parallel_for(std::int64_t count, const Body& body, std::int64_t grain = 1) const {
    if (count <= grain || this->count() == 1) {
      for (std::int64_t i = 0; i < count; ++i) body(i, 0);
    } else {
      on_all_threads(count, body, grain);
    }
  }

 private:
#ifdef PULLBACK_PLAIN_THREADS
  template <class Body>
  void on_all_threads(std::int64_t count, const Body& body, std::int64_t grain) const {
    std::atomic<std::int64_t> next = 0;
    std::vector<std::jthread> threads;
    for (int slot = 0; slot < count_; ++slot) {
      threads.emplace_back([&, slot] {
        // Relaxed: taking a range must not order the work of one thread before that of another.
        for (std::int64_t i; (i = next.fetch_add(grain, std::memory_order_relaxed)) < count;) {
          for (const std::int64_t end = std::min(i + grain, count); i < end; ++i) body(i, slot);
        }
      });
    }
  }

  int count_;
#else
  // TBB has no workers beyond this, and would say so on stderr.
  static int limit() {
    using tbb::global_control;
    return static_cast<int>(global_control::active_value(global_control::max_allowed_parallelism));
  }

  template <class Body>
  void on_all_threads(std::int64_t count, const Body& body, std::int64_t grain) const {
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

  mutable tbb::task_arena arena_;
#endif
};

}  // namespace pullback
