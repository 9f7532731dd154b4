// Workspaces in parts.
#pragma once

#include <concepts>
#include <cstddef>

#include "pullback/device.hpp"

namespace pullback {

// Where the part that follows `bytes` of a workspace may begin.
constexpr std::size_t workspace_aligned(std::size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

// The parts of a workspace, each by where it begins.
class WorkspaceLayout {
 public:
  std::size_t take(std::integral auto bytes) {
    const std::size_t at = bytes_;
    bytes_ += workspace_aligned(static_cast<std::size_t>(bytes));
    return at;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};

}  // namespace pullback
