// Workspaces in parts.
#pragma once

#include <cstddef>

#include "pullback/device.hpp"

namespace pullback {

// Where the part that follows `bytes` of a workspace may begin.
constexpr std::size_t workspace_aligned(std::size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

}  // namespace pullback
