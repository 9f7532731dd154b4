// One row of attention by one warp, in plain loops that leave out what the row does not see instead
// of multiplying it by 0:
//   m = max s_j,  l = Σ exp(s_j − m),  out = Σ exp(s_j − m) drop_j v_j / l,  lse = m + log l
// Serves f64, and rows that a product of tiles cannot do because values hold NaN or infinity.
// Each lane makes the score of one key in 32, then elements lane, lane + 32, … of the sum.
#pragma once

#include "device/float.cuh"
#include "device/warp.cuh"
#include "ops/attention/cuda/params.cuh"

namespace pullback::attention {

using namespace device;

inline constexpr int kMaxHeadDim = 256;

// The row's query is at position i of the sequence. kBlocks: there may be a block mask.
template <class T, bool kBlocks>
void plain_row(const ForwardParams& params, const Sequence& sequence, int64_t batch, int32_t head,
               int64_t i) {
  using R = Real<T>;
  const Problem& p = params.problem;
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  const int64_t kv_head = head / p.group;
  const auto row_of = [&](const HeadRows& rows, int64_t row, int64_t h) {
    return static_cast<T*>(rows.data) + batch * rows.batch + row * rows.row + h * rows.head;
  };
  const T* const q = row_of(params.q, sequence.q_begin + i, head);
  const T* const k = row_of(params.k, sequence.k_begin, kv_head);
  const T* const v = row_of(params.v, sequence.k_begin, kv_head);
  const T* const bias = static_cast<const T*>(params.bias.data) + batch * params.bias.batch +
                        head * params.bias.head + i * params.bias.query;
  const uint64_t plane = static_cast<uint64_t>(batch) * p.heads + head;
  const R scale = sizeof(R) == 8 ? static_cast<R>(p.exact_scale) : static_cast<R>(p.scale);
  const R softcap = sizeof(R) == 8 ? static_cast<R>(p.exact_softcap) : static_cast<R>(p.softcap);
  const auto power = [](R x) { return sizeof(R) == 8 ? exp(x) : expf(x); };

  const auto score = [&](int64_t j) {
    R added = 0;
    if (kBlocks && !p.blocks.sees(batch, head, i, j)) return -infinity<R>();
    if (params.bias.data != nullptr) {
      added = to_real(bias[j * params.bias.key]);
      if (added == -infinity<R>()) return added;
    }
    R s = 0;
    for (int d = 0; d < p.head_dim; ++d) {
      s += to_real(q[d * params.q.element]) * to_real(k[j * params.k.row + d * params.k.element]);
    }
    s *= scale;
    if (softcap > 0) s = softcap * (sizeof(R) == 8 ? tanh(s / softcap) : tanhf(s / softcap));
    return s + added;
  };

  R out[kMaxHeadDim / kWarpSize] = {};
  R maximum = -infinity<R>(), sum = 0;
  const Range seen = visible_keys(p.band, sequence, i);
  for (int64_t begin = seen.begin; begin < seen.end; begin += kWarpSize) {
    const int64_t own = begin + lane;
    const R s = own < seen.end ? score(own) : -infinity<R>();
    const R before = maximum;
    maximum = warp_max(s > maximum ? s : maximum);
    if (maximum == -infinity<R>() && !__any_sync(kAllLanes, s != s)) continue;
    const R correction = before == -infinity<R>() ? R{0} : power(before - maximum);
    const R weight = s == -infinity<R>() ? R{0} : power(s - maximum);
    sum = sum * correction + warp_sum(weight);
#pragma unroll
    for (R& element : out) element *= correction;
    const bool kept =
        s != -infinity<R>() && (!p.dropout.active() || p.dropout.with_seed().keeps(plane, i, own));
    const unsigned taken = __ballot_sync(kAllLanes, kept);
    for (unsigned rest = taken; rest != 0; rest &= rest - 1) {
      const int from = __ffs(static_cast<int>(rest)) - 1;
      const R w = __shfl_sync(kAllLanes, weight, from);
      const T* const value = v + (begin + from) * params.v.row;
#pragma unroll
      for (int e = 0; e < kMaxHeadDim / kWarpSize; ++e) {
        const int d = e * kWarpSize + lane;
        if (d < p.value_dim) out[e] += w * to_real(value[d * params.v.element]);
      }
    }
  }
  // A NaN score is lost to the maximum, but not to the sum.
  const R keep_scale = sizeof(R) == 8 ? p.dropout.scale() : static_cast<R>(p.keep_scale);
  const R factor = maximum == -infinity<R>() && sum == R{0} ? R{0} : keep_scale / sum;
  T* const to = row_of(params.out, sequence.q_begin + i, head);
#pragma unroll
  for (int e = 0; e < kMaxHeadDim / kWarpSize; ++e) {
    const int d = e * kWarpSize + lane;
    if (d < p.value_dim) to[d * params.out.element] = from_real<T>(out[e] * factor);
  }
  if (params.lse.data != nullptr && lane == 0) {
    R* const lse = static_cast<R*>(params.lse.data) + batch * params.lse.batch +
                   head * params.lse.head + (sequence.q_begin + i) * params.lse.row;
    *lse = maximum + (sizeof(R) == 8 ? log(sum) : logf(sum));
  }
}

}  // namespace pullback::attention
