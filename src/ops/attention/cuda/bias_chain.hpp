// How Hopper's kernel sums d_bias over the batch: a thread block adds the part of its keys, step by
// step, once that of the same keys and head of the batch item before has (BackwardParams).
#pragma once

#include <algorithm>
#include <cstdint>

namespace pullback::attention {

inline std::int64_t largest_divisor(std::int64_t of, std::int64_t limit) {
  while (of % limit != 0) --limit;
  return limit;
}

// How many items are in flight together. One that follows another one soon finds its sums in the
// second-level cache, and waits for it at first: where the sums of all heads fit there, one.
inline std::int64_t items_together(std::int64_t items, bool sums_fit) {
  if (sums_fit) return 1;
  const std::int64_t few = largest_divisor(items, 4);
  return few == 1 && (items == 5 || items == 7) ? items : few;
}

// Whether chains fill the device: the tiles of keys of an item do, with those of other items, which
// follow some steps behind.
inline bool chains_pay(std::int64_t items, std::int64_t key_tiles, std::int64_t steps,
                       int multiprocessors, bool sums_fit) {
  constexpr std::int64_t kStepsBehind = 2;
  return (sums_fit || items_together(items, false) > 1) &&
         key_tiles * std::max<std::int64_t>(steps / kStepsBehind, 1) >= multiprocessors;
}

}  // namespace pullback::attention
