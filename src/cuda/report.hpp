// What the CUDA side of this machine looks like, for people.
#pragma once

#include <string>

namespace pullback::cuda {

// Lines "name  value": driver, devices, NVRTC and the kernel cache, or why there is none.
// Initialises the driver; never throws.
std::string report();

}  // namespace pullback::cuda
