// The forward of rows of any layout: strides, masks, ragged rows, alpha per row, f64, any length.
// A group (a warp, or a block of kAnyWarps) takes a row and reads it from global memory in every
// step: once for the maximum, once for each step of the threshold, once for the outputs. The
// threshold of the threads' own maxima, a lower bound of the row's, is where the steps begin.
#pragma once

#include "ops/entmax/cuda/forward_params.cuh"
#include "ops/entmax/cuda/smxx_bounds.cuh"
#include "ops/entmax/cuda/smxx_steep.cuh"

namespace pullback::entmax {

// One row in global memory. Positions count from its first element.
template <class T>
struct RowOfAny {
  using R = device::Real<T>;

  const T* x;
  const uint8_t* mask;  // null: all visible
  T* y;
  uint8_t* support;
  int64_t x_step, mask_step, y_step, support_step, length;

  R operator[](int64_t i) const {
    if (mask && mask[i * mask_step] == 0) return -device::infinity<R>();
    return device::to_real(x[i * x_step]);
  }
};

template <class R>
struct RowResult {
  R tau;
  int size;
};

template <class T, class G, class ValueOf>
void store_y(const RowOfAny<T>& row, const G& group, const ValueOf& value_of) {
  if (!row.y) return;
#pragma unroll 1
  for (int64_t i = group.thread(); i < row.length; i += G::kThreads) {
    row.y[i * row.y_step] = device::from_real<T>(value_of(i));
  }
}

template <class T, class G>
void store_no_support(const RowOfAny<T>& row, const G& group) {
  if (!row.support) return;
#pragma unroll 1
  for (int64_t i = group.thread(); i < (row.length + 7) / 8; i += G::kThreads) {
    row.support[i * row.support_step] = 0;
  }
}

// Counts what `active` holds for, and stores its bits when wanted.
template <class T, class G, class Active>
int store_support(const RowOfAny<T>& row, G& group, const Active& active) {
  int64_t mine = 0;
#pragma unroll 1
  for (int64_t byte = group.thread(); byte < (row.length + 7) / 8; byte += G::kThreads) {
    unsigned bits = 0;
#pragma unroll 1
    for (int64_t i = 8 * byte; i < row.length && i < 8 * byte + 8; ++i) {
      if (active(row[i])) bits |= 1u << (i - 8 * byte);
    }
    if (row.support) row.support[byte * row.support_step] = static_cast<uint8_t>(bits);
    mine += __popc(bits);
  }
  double count = static_cast<double>(mine), unused = 0;
  group.sum(count, unused);
  return static_cast<int>(min(count, 2147483647.0));
}

template <class T, class G>
RowResult<device::Real<T>> degenerate_row(const RowOfAny<T>& row, const G& group, bool nan) {
  using R = device::Real<T>;
  store_y(row, group, [&](int64_t) { return nan ? device::quiet_nan<R>() : R{0}; });
  store_no_support(row, group);
  if (nan) return {device::quiet_nan<R>(), -1};
  return {device::infinity<R>(), 0};
}

template <class T, class G>
RowResult<device::Real<T>> softmax_row(const RowOfAny<T>& row, G& group, device::Real<T> largest) {
  using R = device::Real<T>;
  double sum = 0, count = 0;
#pragma unroll 1
  for (int64_t i = group.thread(); i < row.length;) {
    R part = 0;
#pragma unroll 1
    for (int k = 0; k < kPartLength && i < row.length; ++k, i += G::kThreads) {
      const R x = row[i];
      part += exp_of(x - largest);
      count += x > -device::infinity<R>();  // also where exp underflows
    }
    sum += static_cast<double>(part);
  }
  group.sum(sum, count);
  const R scale = static_cast<R>(1 / sum);
  store_y(row, group, [&](int64_t i) { return scale * exp_of(row[i] - largest); });
  return {static_cast<R>(static_cast<double>(largest) + log(sum)),
          static_cast<int>(min(count, 2147483647.0))};
}

template <class T, class G>
RowResult<device::Real<T>> steep_row(const RowOfAny<T>& row, double alpha, G& group,
                                     device::Real<T> largest_of_row, bool wants_size) {
  using R = device::Real<T>;
  const auto largest = static_cast<double>(largest_of_row);
  const auto all = [&](auto use) {
#pragma unroll 1
    for (int64_t i = group.thread(); i < row.length; i += G::kThreads) use(row[i] - largest);
  };
  const SteepThreshold threshold = SteepRow(alpha, group, all).threshold();
  store_y(row, group,
          [&](int64_t i) { return static_cast<R>(threshold.probability(row[i] - largest)); });
  int count = 0;
  if (wants_size || row.support) {
    count = store_support(row, group, [&](R x) { return threshold.supports(x - largest); });
  }
  return {static_cast<R>(threshold.tau(largest)), count};
}

template <Family kFamily, class T, class G>
RowResult<device::Real<T>> sparse_row(const RowOfAny<T>& row, double alpha, G& group,
                                      device::Real<T> largest, device::Real<T> own_largest,
                                      bool wants_size) {
  using R = device::Real<T>;
  const Power<kFamily, R> power(alpha);
  const auto all = [&](auto use) {
#pragma unroll 1
    for (int64_t i = group.thread(); i < row.length; i += G::kThreads) use(row[i] - largest);
  };
  const R bound = lower_bound(power, own_largest - largest, group);
  const Threshold<R> threshold = solve<double>(
      power, [&](const auto&) { return bound; }, group, all, kAllDigits<R>);
  store_y(row, group,
          [&](int64_t i) { return probability<T>(power, row[i] - largest, threshold); });
  int count = 0;
  if (wants_size || row.support) {
    count = store_support(row, group,
                          [&](R x) { return power.excess(x - largest, threshold) > power.edge; });
  }
  return {tau_of<decltype(power)>(alpha, largest, threshold), count};
}

template <Family kFamily, class T, class G>
RowResult<device::Real<T>> row_of_family(const RowOfAny<T>& row, double alpha, G& group,
                                         device::Real<T> largest, device::Real<T> own,
                                         bool wants_size) {
  if constexpr (kFamily == Family::softmax) {
    return softmax_row(row, group, largest);
  } else if constexpr (kFamily == Family::steep) {
    return steep_row(row, alpha, group, largest, wants_size);
  } else {
    return sparse_row<kFamily>(row, alpha, group, largest, own, wants_size);
  }
}

// Where all families are in one kernel; inlined they take the compiler minutes.
template <Family kFamily, class T, class G>
__noinline__ RowResult<device::Real<T>> outlined_row(const RowOfAny<T>& row, double alpha, G& group,
                                                     device::Real<T> largest, device::Real<T> own,
                                                     bool wants_size) {
  return row_of_family<kFamily>(row, alpha, group, largest, own, wants_size);
}

// kOnly: the family of the one alpha, or `invalid` where each row has its own.
template <Family kOnly, class T, class G>
RowResult<device::Real<T>> any_row(const RowOfAny<T>& row, double alpha, G& group,
                                   bool wants_size) {
  using R = device::Real<T>;
  R own = -device::infinity<R>();
#pragma unroll 1
  for (int64_t i = group.thread(); i < row.length; i += G::kThreads) own = max_or_nan(own, row[i]);
  const R largest = group.max(own);
  const Family family = family_of(alpha);
  if (family == Family::invalid || !(largest < device::infinity<R>())) {
    return degenerate_row(row, group, true);
  }
  if (largest == -device::infinity<R>()) return degenerate_row(row, group, false);
  if constexpr (kOnly != Family::invalid) {
    return row_of_family<kOnly>(row, alpha, group, largest, own, wants_size);
  }
  switch (family) {
    case Family::softmax:
      return outlined_row<Family::softmax>(row, alpha, group, largest, own, wants_size);
    case Family::near_one:
      return outlined_row<Family::near_one>(row, alpha, group, largest, own, wants_size);
    case Family::entmax15:
      return outlined_row<Family::entmax15>(row, alpha, group, largest, own, wants_size);
    case Family::general:
      return outlined_row<Family::general>(row, alpha, group, largest, own, wants_size);
    case Family::sparsemax:
      return outlined_row<Family::sparsemax>(row, alpha, group, largest, own, wants_size);
    default:
      return outlined_row<Family::steep>(row, alpha, group, largest, own, wants_size);
  }
}

// The first row from `row` on, counted by `step`, whose own alpha is not is_general(); a lane looks
// at one.
inline int64_t next_of_others(const ForwardParams& p, int64_t row, int64_t step) {
  for (; row < p.rows.count; row += device::kWarpSize * step) {
    const int64_t own = row + lane_index() * step;
    const bool other = own < p.rows.count && !is_general(alpha_of<true>(p, own));
    const unsigned others = __ballot_sync(device::kAllLanes, other);
    if (others != 0) return row + (__ffs(static_cast<int>(others)) - 1) * step;
  }
  return row;
}

// T is the element, kWarps the group: 1 or kAnyWarps.
template <class T, Family kOnly, int kWarps>
void forward_any(const ForwardParams& p) {
  using R = device::Real<T>;
  __shared__ GroupScratch<kWarps> scratch;
  Group<kWarps> group(scratch);
  constexpr int kGroups = kAnyWarps / kWarps;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGroups +
                        (kWarps == 1 ? threadIdx.x / device::kWarpSize : 0);
  const bool ragged = p.rows.offsets != nullptr;
  // Ragged: one more for the elements that belong to no row.
  const int64_t tasks = p.rows.groups + (ragged ? 1 : 0);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kGroups;
  const auto next = [&](int64_t task) {
    return kOnly == Family::invalid && p.general_elsewhere ? next_of_others(p, task, step) : task;
  };
#pragma unroll 1
  for (int64_t task = next(first); task < p.rows.count * tasks; task = next(task + step)) {
    const int64_t outer = tasks == 1 ? task : task / tasks;
    const int64_t index = task - outer * tasks;
    const bool outside = ragged && index == p.rows.groups;
    int64_t begin = 0, end = p.rows.length;
    if (ragged && !outside) {
      begin = p.rows.offsets[index];
      end = p.rows.offsets[index + 1];
    }
    const auto at = [&](const RowTensor& tensor, int64_t along) {
      return row_offset(p.rows, tensor, outer) + along * tensor.axis;
    };
    RowOfAny<T> row;
    row.x = static_cast<const T*>(p.x.data) + at(p.x, begin);
    row.mask = p.mask.data ? static_cast<const uint8_t*>(p.mask.data) + at(p.mask, begin) : nullptr;
    row.y = p.y.data ? static_cast<T*>(p.y.data) + at(p.y, begin) : nullptr;
    row.support =
        p.support.data ? static_cast<uint8_t*>(p.support.data) + at(p.support, 0) : nullptr;
    row.x_step = p.x.axis;
    row.mask_step = p.mask.axis;
    row.y_step = p.y.axis;
    row.support_step = p.support.axis;
    row.length = end - begin;
    if (outside) {
      const int64_t left = p.rows.offsets[0], right = p.rows.offsets[p.rows.groups];
      row.length = left;
      store_y(row, group, [](int64_t) { return R{0}; });
      if (row.y) row.y += right * row.y_step;
      row.length = p.rows.length - right;
      store_y(row, group, [](int64_t) { return R{0}; });
      continue;
    }
    const double alpha = p.alpha_per_row.data
                             ? static_cast<double>(static_cast<const R*>(
                                   p.alpha_per_row.data)[at(p.alpha_per_row, index)])
                             : p.alpha;
    const RowResult<R> result = any_row<kOnly>(row, alpha, group, p.support_size.data != nullptr);
    if (group.thread() == 0) {
      if (p.tau.data) static_cast<R*>(p.tau.data)[at(p.tau, index)] = result.tau;
      if (p.support_size.data) {
        static_cast<int32_t*>(p.support_size.data)[at(p.support_size, index)] = result.size;
      }
    }
  }
}

}  // namespace pullback::entmax
