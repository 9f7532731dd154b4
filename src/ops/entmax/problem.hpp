// What the backends of entmax see: the geometry of rows, and the makers of the variants.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>

#include "core/element.hpp"
#include "core/variant.hpp"
#include "pullback/entmax.hpp"

namespace pullback::entmax {

enum class Feature { alpha_per_row, mask, ragged };
inline constexpr std::string_view kFeatureNames[] = {"alpha per row", "mask", "ragged rows"};

// A tensor's steps, in elements: over the dimensions of x without the axis, and along the axis. For
// a tensor with one value per row the latter steps from one ragged row to the next; for the support
// mask, from byte to byte.
struct Steps {
  std::array<std::int64_t, kMaxRank - 1> outer{};
  std::int64_t axis = 0;
};

// The dimensions of x without the axis.
struct Outer {
  int rank = 0;
  std::array<std::int64_t, kMaxRank - 1> sizes{};

  explicit Outer(const EntmaxProblem& problem) {
    for (int dim = 0; dim < problem.x.rank; ++dim) {
      if (dim != problem.axis) sizes[rank++] = problem.x.shape[dim];
    }
  }
};

inline std::int64_t row_length(const EntmaxProblem& problem) {
  return problem.x.shape[problem.axis];
}

// Ragged rows along the axis; -1 when rows are not ragged.
inline std::int64_t group_count(const EntmaxProblem& problem) {
  return problem.offsets.given() ? problem.offsets.shape[0] - 1 : -1;
}

// For tensors with the dimensions of x, and for ragged per-row tensors, which have as many.
inline Steps steps_with_axis(const EntmaxProblem& problem, const TensorSpec& spec) {
  Steps steps;
  for (int dim = 0, outer = 0; dim < spec.rank; ++dim) {
    (dim == problem.axis ? steps.axis : steps.outer[outer++]) = spec.strides[dim];
  }
  return steps;
}

// For tensors with one value per row.
inline Steps steps_per_row(const EntmaxProblem& problem, const TensorSpec& spec) {
  if (problem.offsets.given()) return steps_with_axis(problem, spec);
  Steps steps;
  for (int dim = 0; dim < spec.rank; ++dim) steps.outer[dim] = spec.strides[dim];
  return steps;
}

inline Steps steps_of_support(const TensorSpec& spec) {
  Steps steps;
  for (int dim = 0; dim + 1 < spec.rank; ++dim) steps.outer[dim] = spec.strides[dim];
  if (spec.rank > 0) steps.axis = spec.strides[spec.rank - 1];
  return steps;
}

// Offsets as every backend reads them: inside the axis and never decreasing, whatever they hold.
class OffsetReader {
 public:
  OffsetReader(const EntmaxProblem& problem, const void* data)
      : spec_(problem.offsets), data_(data), length_(row_length(problem)) {}

  // The next one, from offsets[0] on.
  std::int64_t next() {
    const std::int64_t raw = load_index(spec_.dtype, data_, index_++ * spec_.strides[0]);
    return last_ = std::clamp(raw, last_, length_);
  }

 private:
  const TensorSpec& spec_;
  const void* data_;
  std::int64_t length_, index_ = 0, last_ = 0;
};

// Checked mode: throws Error naming the first offset that OffsetReader would have to change.
void check_offsets(const EntmaxProblem& problem, const void* offsets);

using Body = std::unique_ptr<PlanBody<EntmaxTensors>>;
Body make_cpu_forward(const EntmaxProblem& problem, const Device& device);
Body make_cpu_backward(const EntmaxProblem& problem, const Device& device);
Body make_cuda_forward(const EntmaxProblem& problem, const Device& device);
Body make_cuda_backward(const EntmaxProblem& problem, const Device& device);
Body make_reference(const EntmaxProblem& problem, const Device& device, Pass pass);
Body make_textbook(const EntmaxProblem& problem, const Device& device, Pass pass);

}  // namespace pullback::entmax
