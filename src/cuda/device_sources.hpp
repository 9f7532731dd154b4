// The device sources (*.cuh and what host and device share), embedded in the library at build time.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "cuda/nvrtc.hpp"

namespace pullback::cuda {

// Names are include paths from src/: "device/warp.cuh".
std::span<const Header> device_sources();

// Hash of a header and of all that it includes by #include "name", names and texts; of the name
// alone if it is not among `headers`.
std::string header_hash(std::span<const Header> headers, std::string_view name);

// Hash of the device sources that this one includes, directly or not: part of a kernel's key, so
// that a change leaves the kernels alone that it cannot change.
std::string device_sources_hash(std::string_view source);

}  // namespace pullback::cuda
