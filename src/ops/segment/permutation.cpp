// Stable radix sort of (id, row) pairs, least significant digit first, one pass for every 11 bits
// of num_segments. Each pass counts digits per block of pairs, sums the counts in (digit, block)
// order, and moves the pairs; so the result is that of a serial counting sort whatever the threads.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/check.hpp"
#include "core/element.hpp"
#include "core/variant.hpp"
#include "ops/segment/index.hpp"
#include "ops/segment/problem.hpp"

namespace pullback {
namespace {

constexpr std::string_view kOp = "segment_permutation";

}  // namespace

SegmentPermutationProblem complete(const SegmentPermutationProblem& given) {
  const Checker check(kOp);
  SegmentPermutationProblem problem = given;
  check.given("ids", problem.ids);
  check.rank("ids", problem.ids, 1);
  check.dtype("ids", problem.ids, {DType::i64, DType::i32});
  constexpr std::int64_t kMostSegments = std::int64_t{1} << 56;
  check.that(problem.num_segments >= 0 && problem.num_segments < kMostSegments, "num_segments",
             "0 or more, and below 2^56", fmt::format("{}", problem.num_segments));
  const std::int64_t rows = problem.ids.shape[0];
  if (!problem.permutation.given()) {
    problem.permutation = TensorSpec::contiguous(DType::i64, {rows});
  }
  if (!problem.offsets.given()) {
    problem.offsets = TensorSpec::contiguous(problem.permutation.dtype, {problem.num_segments + 1});
  }
  check.dtype("permutation", problem.permutation, {DType::i64, DType::i32});
  check.shape("permutation", problem.permutation, {rows});
  check.writable("permutation", problem.permutation);
  check.dtype("offsets", problem.offsets, {problem.permutation.dtype});
  check.shape("offsets", problem.offsets, {problem.num_segments + 1});
  check.writable("offsets", problem.offsets);
  check.that(problem.permutation.dtype == DType::i64 || rows <= 0x7fffffff, "permutation",
             "dtype i64 for 2^31 rows or more", "i32");
  return problem;
}

namespace {

constexpr int kDigitBits = 11;
constexpr std::int64_t kDigits = 1 << kDigitBits;
constexpr std::int64_t kMostBlocks = 64;  // bounds the table of counts: 1 MiB
constexpr std::int64_t kFewestRows = 1 << 14;

struct Layout {
  std::int64_t block_rows, blocks;
  int passes;
  std::size_t counts_bytes, pairs_bytes;
};

template <class Word>
struct Pair {
  Word id, row;
};

bool fits_32_bits(const SegmentPermutationProblem& problem) {
  return problem.ids.shape[0] <= 0xffffffff && problem.num_segments <= 0xffffffff;
}

Layout layout_of(const SegmentPermutationProblem& problem) {
  const std::int64_t rows = problem.ids.shape[0];
  Layout layout;
  layout.block_rows = std::max(kFewestRows, (rows + kMostBlocks - 1) / kMostBlocks);
  layout.blocks = (rows + layout.block_rows - 1) / layout.block_rows;
  const int bits = std::bit_width(static_cast<std::uint64_t>(problem.num_segments));
  layout.passes = std::max(1, (bits + kDigitBits - 1) / kDigitBits);
  layout.counts_bytes = static_cast<std::size_t>(layout.blocks * kDigits) * sizeof(std::int64_t);
  const std::size_t pair =
      fits_32_bits(problem) ? sizeof(Pair<std::uint32_t>) : sizeof(Pair<std::uint64_t>);
  layout.pairs_bytes = static_cast<std::size_t>(rows) * pair;
  return layout;
}

// Turns counts[block][digit] into the place where that block's first pair with that digit goes.
void sum_counts(std::int64_t* counts, std::int64_t blocks) {
  std::int64_t place = 0;
  for (std::int64_t digit = 0; digit < kDigits; ++digit) {
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::int64_t count = counts[block * kDigits + digit];
      counts[block * kDigits + digit] = place;
      place += count;
    }
  }
}

template <class Word>
void sort(const SegmentPermutationProblem& problem, const SegmentPermutationTensors& tensors,
          std::byte* workspace, const Threads& threads) {
  const std::int64_t rows = problem.ids.shape[0];
  const std::int64_t segments = problem.num_segments;
  const Layout layout = layout_of(problem);
  auto* counts = reinterpret_cast<std::int64_t*>(workspace);
  auto* from = reinterpret_cast<Pair<Word>*>(workspace + layout.counts_bytes);
  auto* to = reinterpret_cast<Pair<Word>*>(workspace + layout.counts_bytes + layout.pairs_bytes);
  const auto for_blocks = [&](const auto& body) {
    threads.parallel_for(layout.blocks, [&](std::int64_t block, int) {
      body(block * layout.block_rows, std::min(rows, (block + 1) * layout.block_rows),
           counts + block * kDigits);
    });
  };

  const IndexView ids(problem.ids, tensors.ids);
  for_blocks([&](std::int64_t begin, std::int64_t end, std::int64_t*) {
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int64_t id = ids[n];
      const bool inside = id >= 0 && id < segments;
      from[n] = {static_cast<Word>(inside ? id : segments), static_cast<Word>(n)};
    }
  });
  for (int pass = 0; pass < layout.passes; ++pass) {
    const int shift = pass * kDigitBits;
    const auto digit_of = [shift](const Pair<Word>& pair) {
      return static_cast<std::int64_t>((pair.id >> shift) & (kDigits - 1));
    };
    for_blocks([&](std::int64_t begin, std::int64_t end, std::int64_t* count) {
      std::fill(count, count + kDigits, 0);
      for (std::int64_t n = begin; n < end; ++n) ++count[digit_of(from[n])];
    });
    sum_counts(counts, layout.blocks);
    for_blocks([&](std::int64_t begin, std::int64_t end, std::int64_t* place) {
      for (std::int64_t n = begin; n < end; ++n) to[place[digit_of(from[n])]++] = from[n];
    });
    std::swap(from, to);
  }

  const TensorSpec& permutation = problem.permutation;
  const TensorSpec& offsets = problem.offsets;
  const auto set = [](const TensorSpec& spec, void* data, std::int64_t i, std::int64_t value) {
    const std::int64_t at = i * spec.strides[0];
    if (spec.dtype == DType::i64) {
      static_cast<std::int64_t*>(data)[at] = value;
    } else {
      static_cast<std::int32_t*>(data)[at] = static_cast<std::int32_t>(value);
    }
  };
  if (tensors.permutation != nullptr) {
    for_blocks([&](std::int64_t begin, std::int64_t end, std::int64_t*) {
      for (std::int64_t r = begin; r < end; ++r) {
        set(permutation, tensors.permutation, r, static_cast<std::int64_t>(from[r].row));
      }
    });
  }
  if (tensors.offsets != nullptr) {
    offsets_of_keys(
        rows, segments, threads,
        [&](std::int64_t r) { return static_cast<std::int64_t>(from[r].id); },
        [&](std::int64_t s, std::int64_t r) { set(offsets, tensors.offsets, s, r); });
  }
}

class PermutationBody final : public PlanBody<SegmentPermutationTensors> {
 public:
  PermutationBody(const SegmentPermutationProblem& problem, const Device& device)
      : problem_(problem), threads_(device.threads) {
    const Layout layout = layout_of(problem);
    workspace_bytes = layout.counts_bytes + 2 * layout.pairs_bytes;
    description = fmt::format("stable radix sort, {} passes of {} bits; deterministic",
                              layout.passes, kDigitBits);
  }

  void run(Stream, const SegmentPermutationTensors& tensors, Workspace workspace) const override {
    auto* memory = static_cast<std::byte*>(workspace.data);
    fits_32_bits(problem_) ? sort<std::uint32_t>(problem_, tensors, memory, threads_)
                           : sort<std::uint64_t>(problem_, tensors, memory, threads_);
  }

 private:
  SegmentPermutationProblem problem_;
  Threads threads_;
};

TensorUses permutation_uses(const SegmentPermutationProblem& problem,
                            const SegmentPermutationTensors& tensors, Pass) {
  TensorUses uses;
  uses.read("ids", problem.ids, tensors.ids);
  uses.write("permutation", problem.permutation, tensors.permutation);
  uses.write("offsets", problem.offsets, tensors.offsets);
  return uses;
}

std::unique_ptr<PlanBody<SegmentPermutationTensors>> make_permutation_cpu(
    const SegmentPermutationProblem& problem, const Device& device, Pass) {
  return std::make_unique<PermutationBody>(problem, device);
}
std::unique_ptr<PlanBody<SegmentPermutationTensors>> make_permutation_on_gpu(
    const SegmentPermutationProblem& problem, const Device& device, Pass) {
  return make_permutation_cuda(problem, device);
}

constexpr Variant<SegmentPermutationProblem, SegmentPermutationTensors> kVariants[] = {
    {{"cpu", DeviceKind::cpu, CpuIsa::any, 0, 10}, make_permutation_cpu},
    {{"cuda", DeviceKind::cuda, CpuIsa::any, 0, 10, 80}, make_permutation_on_gpu},
};

}  // namespace

Plan<SegmentPermutationTensors> plan_permutation(const Device& device,
                                                 const SegmentPermutationProblem& given) {
  const SegmentPermutationProblem problem = complete(given);
  return plan_with_variants<SegmentPermutationProblem, SegmentPermutationTensors>(
      kOp, kVariants, 0, {}, permutation_uses, device, problem, Pass::forward,
      {.variant = device.kind == DeviceKind::cpu ? "cpu" : "cuda"});
}

}  // namespace pullback
