// Cases that a variant for one GPU architecture takes, and that the variant for all of them has to
// pass all the same.
#pragma once

#include "driver/case.hpp"

namespace pullback::testing {

// Which have no part that only the variant for all takes; some that it takes anyway are among them.
inline bool has_portable_twin(const driver::Case& test, DType dtype) {
  return test.op == "attention" && size_of(dtype) == 2 && !test.options.contains("softcap") &&
         !test.name.starts_with("units of tiles");  // nothing else has units, and they take long
}
inline constexpr const char* kPortableVariant = "cuda";

}  // namespace pullback::testing
