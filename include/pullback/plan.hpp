// The life cycle shared by every op: problem -> plan -> run.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "pullback/device.hpp"

namespace pullback {

// A problem describes forward and backward together, so that the two cannot disagree; a plan is
// made for one of them.
enum class Pass { forward, backward };

// What a variant prepares for one problem. Users hold it through Plan.
template <class Tensors>
class PlanBody {
 public:
  virtual ~PlanBody() = default;
  virtual void run(Stream stream, const Tensors& tensors, Workspace workspace) const = 0;

  std::size_t workspace_bytes = 0;
  std::string description;
};

// A checked problem, bound to the variant that will compute it. Cheap to copy; run() may be called
// from any thread and allocates nothing. It refuses bad pointers, a small workspace, bad indices
// when asked to check them, and on the CPU segments too long for a u8 arg, before it has written
// anything. On a CUDA device it may also fail as any CUDA work may, now or at a later call; outputs
// then mean nothing. (check_indices of entmax on a CUDA device copies indices to the host and
// waits.)
template <class Tensors>
class Plan {
 public:
  explicit Plan(std::shared_ptr<const PlanBody<Tensors>> body) : body_(std::move(body)) {}

  std::size_t workspace_bytes() const { return body_->workspace_bytes; }

  // Variant, tiles, accumulation type, guarantee, why it was chosen and what ruled others out.
  const std::string& describe() const { return body_->description; }

  // `tensors` holds one data pointer for each tensor of the problem; see the op's header for which
  // may be null. A gradient whose pointer is null is not computed.
  void run(Stream stream, const Tensors& tensors, Workspace workspace = {}) const {
    body_->run(stream, tensors, workspace);
  }

 private:
  std::shared_ptr<const PlanBody<Tensors>> body_;
};

struct PlanOptions {
  // Name of the variant to use; empty chooses the best. PULLBACK_FORCE_VARIANT does the same from
  // outside. "reference" (double precision, plain loops) exists for every op.
  std::string variant;
};

}  // namespace pullback
