// The device sources (*.cuh and what host and device share), embedded in the library at build time.
#pragma once

#include <span>
#include <string>

#include "cuda/nvrtc.hpp"

namespace pullback::cuda {

// Names are include paths from src/: "device/warp.cuh".
std::span<const Header> device_sources();

// Hash of all names and texts: part of every kernel's key.
const std::string& device_sources_hash();

}  // namespace pullback::cuda
