// Cases that not only the variant which is chosen for them has to pass on a GPU.
#pragma once

#include <string>

#include "driver/case.hpp"

namespace pullback::testing {

// The other variant; empty: there is none. Of attention, the one for all architectures. (Nothing
// but Hopper's has units of tiles, and they take long.)
inline std::string other_variant(const driver::Case& test, DType dtype) {
  if (test.op == "attention" && size_of(dtype) == 2 && !test.name.starts_with("units of tiles")) {
    return "cuda";
  }
  return "";
}

}  // namespace pullback::testing
