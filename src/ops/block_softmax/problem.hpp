// What the backends of block_softmax see: a problem that complete() has checked.
#pragma once

#include <memory>

#include "core/arithmetic.hpp"
#include "core/threads.hpp"
#include "core/variant.hpp"
#include "core/workspace.hpp"
#include "pullback/block_sparse.hpp"

namespace pullback::block_softmax {

enum class Feature { rpe, key_padding_mask, attn_mask, mask_gradients };

inline constexpr std::string_view kFeatureNames[] = {"rpe", "key_padding_mask", "attn_mask",
                                                     "mask gradients"};

inline constexpr FeatureSet kAllFeatures =
    features(Feature::rpe, Feature::key_padding_mask, Feature::attn_mask, Feature::mask_gradients);

struct Sizes {
  std::int64_t Z, H, R, C, b, nnz;
};

inline Sizes sizes_of(const BlockSoftmaxProblem& problem) {
  const BlockLayout& layout = *problem.layout;
  return {problem.x.shape[0], layout.heads(), layout.rows(),
          layout.columns(),   problem.block,  layout.nnz()};
}

using Body = PlanBody<BlockSoftmaxTensors>;

std::unique_ptr<Body> make_cpu(const BlockSoftmaxProblem& problem, const Device& device, Pass pass);
// The two passes of the cpu variant.
std::unique_ptr<Body> make_cpu_forward(const BlockSoftmaxProblem& problem, const Device& device);
std::unique_ptr<Body> make_cpu_backward(const BlockSoftmaxProblem& problem, const Device& device);
std::unique_ptr<Body> make_cuda(const BlockSoftmaxProblem& problem, const Device& device,
                                Pass pass);
// The two passes of the cuda variant.
std::unique_ptr<Body> make_cuda_forward(const BlockSoftmaxProblem& problem, const Device& device);
std::unique_ptr<Body> make_cuda_backward(const BlockSoftmaxProblem& problem, const Device& device);
std::unique_ptr<Body> make_reference(const BlockSoftmaxProblem& problem, const Device& device,
                                     Pass pass);
std::unique_ptr<Body> make_textbook(const BlockSoftmaxProblem& problem, const Device& device,
                                    Pass pass);

}  // namespace pullback::block_softmax
