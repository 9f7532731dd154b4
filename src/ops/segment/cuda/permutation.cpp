// plan_permutation on CUDA: the passes of smxx_sort.cuh.
#include "ops/segment/problem.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "ops/segment/cuda/stages.hpp"

namespace pullback::segment_cuda {
namespace {

using SortKernel = cuda::PlannedKernel<SortParams>;

cuda::OpKernel sort_kernel(std::string_view what, bool wide, int threads = kSortThreads) {
  return {
      .name = fmt::format("segment_sort_{}{}", what, wide ? "_wide" : ""),
      .file = "ops/segment/cuda/smxx_sort.cuh",
      .function = what == "sum" ? "segment_cuda::sort_sum"
                                : fmt::format("segment_cuda::sort_{}<{}>", what,
                                              wide ? "uint64_t" : "uint32_t"),
      .parameters = "segment_cuda::SortParams",
      .threads = threads,
      .constants = {{"segment_cuda::kSortTile", kSortTile}, {"segment_cuda::kDigits", kDigits}}};
}
cuda::OpKernel sum_kernel() { return sort_kernel("sum", false, kSortSumThreads); }

class Permutation final : public cuda::CudaBody<SegmentPermutationTensors> {
 public:
  Permutation(const SegmentPermutationProblem& problem, const Device& device) : CudaBody(device) {
    const std::int64_t rows = problem.ids.shape[0];
    const bool wide = rows > 0xffffffff || problem.num_segments > 0xffffffff;
    params_.rows = rows;
    params_.segments = problem.num_segments;
    params_.tiles = std::max<std::int64_t>(1, (rows + kSortTile - 1) / kSortTile);
    params_.ids = indices(problem.ids);
    params_.permutation = indices(problem.permutation);
    params_.offsets = indices(problem.offsets);
    const int bits = std::bit_width(static_cast<std::uint64_t>(problem.num_segments));
    passes_ = std::max(1, (bits + kDigitBits - 1) / kDigitBits);
    count_ = {sort_kernel("count", wide), device_};
    sum_ = {sum_kernel(), device_};
    move_ = {sort_kernel("move", wide), device_};
    store_ = {sort_kernel("store", wide), device_};
    count_.shape.grid[0] = move_.shape.grid[0] = static_cast<unsigned>(params_.tiles);
    const std::int64_t work = std::max(rows, problem.num_segments + 1);
    store_.shape.grid[0] = static_cast<unsigned>(
        std::min<std::int64_t>(16 * device_.multiprocessors, work / kSortThreads + 1));

    WorkspaceLayout layout;
    const auto cells = static_cast<std::size_t>(kDigits * params_.tiles);
    const std::size_t pairs = static_cast<std::size_t>(rows) * (wide ? 16 : 8);
    counts_at_ = layout.take(cells * sizeof(std::uint32_t));
    places_at_ = layout.take(cells * sizeof(std::int64_t));
    for (std::size_t& at : pairs_at_) at = layout.take(pairs);
    workspace_bytes = layout.bytes();
    description =
        fmt::format("stable radix sort, {} passes of {} bits; deterministic", passes_, kDigitBits);
  }

 private:
  void enqueue(Stream stream, const SegmentPermutationTensors& tensors,
               Workspace workspace) const override {
    auto* memory = static_cast<std::byte*>(workspace.data);
    SortParams p = params_;
    p.ids.data = tensors.ids;
    p.permutation.data = tensors.permutation;
    p.offsets.data = tensors.offsets;
    p.counts = reinterpret_cast<std::uint32_t*>(memory + counts_at_);
    p.places = reinterpret_cast<std::int64_t*>(memory + places_at_);
    for (int pass = 0; pass < passes_; ++pass) {
      p.shift = pass * kDigitBits;
      p.first = pass == 0;
      p.from = memory + pairs_at_[pass % 2];
      p.to = memory + pairs_at_[(pass + 1) % 2];
      count_.launch(stream, p);
      sum_.launch(stream, p);
      move_.launch(stream, p);
    }
    p.from = p.to;
    store_.launch(stream, p);
  }

  SortParams params_{};
  SortKernel count_, sum_, move_, store_;
  int passes_;
  std::size_t counts_at_, places_at_, pairs_at_[2];
};

}  // namespace
}  // namespace pullback::segment_cuda

namespace pullback {

std::unique_ptr<PlanBody<SegmentPermutationTensors>> make_permutation_cuda(
    const SegmentPermutationProblem& problem, const Device& device) {
  return cuda::make_body<segment_cuda::Permutation>(problem, device);
}

}  // namespace pullback

namespace pullback::cuda {

std::vector<KernelSource> segment_permutation_kernels(int arch) {
  using namespace segment_cuda;
  std::vector<KernelSource> all = {op_kernel<SortParams>(sum_kernel(), arch)};
  for (const bool wide : {false, true}) {
    for (const char* what : {"count", "move", "store"}) {
      all.push_back(op_kernel<SortParams>(sort_kernel(what, wide), arch));
    }
  }
  return all;
}

}  // namespace pullback::cuda
