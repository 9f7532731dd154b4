// Times the passes of one request, and says how far its results are from double precision.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ceilings.hpp"
#include "driver/driver.hpp"
#include "machine.hpp"

namespace pullback::tool {

struct MeasureSettings {
  double seconds = 0.5;          // of timing, per pass
  std::size_t rotate_bytes = 0;  // working set that runs walk through: past the last-level cache
  std::size_t memory_limit = 0;  // of all copies together
  bool verify = false;           // against the reference, however long that takes
  bool compare = true;           // large problems with double precision, on a GPU with the CPU
};

struct Timing {
  double median = 0, p20 = 0, p80 = 0;  // seconds
  int runs = 0;
  double host = 0;  // on a GPU: median time that run() keeps its caller
};

// The worst tensor of a pass: largest difference over the largest value.
struct PassError {
  // "reference", "f64" (this library in double precision), "cpu" (this library there) or ""
  // (unknown).
  std::string against;
  std::string tensor;
  double relative = 0;
};

struct PassResult {
  Pass pass = Pass::forward;
  std::string variant, description;
  Timing time;
  driver::Cost cost;
  std::size_t workspace_bytes = 0;
  double plan_seconds = 0;  // of make_plan, with whatever it had to compile or load
  PassError error;

  bool bound_by_products() const { return cost.flops > 0; }
};

struct Measurement {
  std::vector<PassResult> passes;
  int copies = 0;                     // of all tensors, used in turn
  std::vector<std::string> failures;  // outputs that disagree with the reference
};

// From what a plan says of itself: "entmax forward: cpu\n…" gives "cpu".
std::string variant_of(const std::string& description);

Measurement measure(const driver::Request& request, const MeasureSettings& settings);

// The matrix product ceiling that a dtype is held against; 0 when not measured.
double product_ceiling(const Ceilings& ceilings, DType dtype);

// The least time the machine allows over the time taken; 0 when the ceiling is not known.
double share_of_ceiling(const PassResult& result, DType dtype, const Ceilings& ceilings);

// The dtype that a problem is named by: of its first floating input.
DType main_dtype(const driver::TensorMap& inputs);

}  // namespace pullback::tool
