// The ops of this build. Apart from the rest, so that a test can link a list of its own instead.
#include "driver/case.hpp"
#include "driver/driver.hpp"

namespace pullback::driver {

// The last element, an empty one, is there for a build without any op.

std::span<const OpDriver* const> all_drivers() {
#define PULLBACK_OP(op) &op##_driver(),
  static const OpDriver* const drivers[] = {
#include "op_list.inc"
      nullptr};
#undef PULLBACK_OP
  return std::span(drivers).first(std::size(drivers) - 1);
}

std::span<const CaseLists> all_case_lists() {
#define PULLBACK_OP(op) {#op, op##_cases, op##_fuzz, op##_bench},
  static const CaseLists lists[] = {
#include "op_list.inc"
      {}};
#undef PULLBACK_OP
  return std::span(lists).first(std::size(lists) - 1);
}

#define PULLBACK_CUDA_BENCH(op) std::vector<Case> op##_cuda_bench();
#include "cuda_bench_list.inc"
#undef PULLBACK_CUDA_BENCH

std::vector<Case> all_cuda_benches() {
  std::vector<Case> all;
#define PULLBACK_CUDA_BENCH(op) \
  for (Case & test : op##_cuda_bench()) all.push_back(std::move(test));
#include "cuda_bench_list.inc"
#undef PULLBACK_CUDA_BENCH
  return all;
}

}  // namespace pullback::driver
