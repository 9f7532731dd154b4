// What the backends of block_matmul see: a problem that complete() has checked.
#pragma once

#include <memory>

#include "core/arithmetic.hpp"
#include "core/threads.hpp"
#include "core/variant.hpp"
#include "pullback/block_sparse.hpp"

namespace pullback::block_matmul {

enum class Feature { sdd, dsd, dds };

inline constexpr std::string_view kFeatureNames[] = {"sdd", "dsd", "dds"};

inline constexpr FeatureSet kAllFeatures = features(Feature::sdd, Feature::dsd, Feature::dds);

// The logical product of every (z, h): c [M,N] = op(a) [M,K] · op(b) [K,N].
struct Sizes {
  std::int64_t Z, H, M, N, K, b, nnz;
};

Sizes sizes_of(const BlockMatmulProblem& problem);

using Body = PlanBody<BlockMatmulTensors>;

std::unique_ptr<Body> make_cpu(const BlockMatmulProblem& problem, const Device& device, Pass pass);
std::unique_ptr<Body> make_cuda(const BlockMatmulProblem& problem, const Device& device, Pass pass);
std::unique_ptr<Body> make_reference(const BlockMatmulProblem& problem, const Device& device,
                                     Pass pass);
std::unique_ptr<Body> make_textbook(const BlockMatmulProblem& problem, const Device& device,
                                    Pass pass);

}  // namespace pullback::block_matmul
