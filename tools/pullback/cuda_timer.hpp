// Time on a GPU, by its own clock.
#pragma once

#include <functional>
#include <vector>

#include "ceilings.hpp"
#include "pullback/device.hpp"

namespace pullback::tool {

struct DeviceTimes {
  std::vector<double> seconds;       // on the device, of each call
  std::vector<double> host_seconds;  // that each call kept the caller
};

// Calls run(0), run(1), … which enqueue work on `stream`, for about `seconds`, at least `fewest`
// times. One call is made before, unmeasured, for each of `warm_up`.
DeviceTimes time_on_device(const Device& device, Stream stream, double seconds, int fewest,
                           int warm_up, const std::function<void(int)>& run);

// What copies and matrix products on the device reach.
Ceilings measure_device_ceilings(const Device& device);

}  // namespace pullback::tool
