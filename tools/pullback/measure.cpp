#include "measure.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "core/check.hpp"
#include "cuda_timer.hpp"
#include "driver/check.hpp"

namespace pullback::tool {
namespace {

using driver::HostTensor;
using driver::TensorMap;
using Clock = std::chrono::steady_clock;

// Above these the reference's plain loops take longer than a benchmark should.
constexpr double kReferenceFlops = 4e8;
constexpr double kReferenceBytes = 4e6;

std::size_t bytes_of(const TensorMap& tensors) {
  std::size_t bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto [low, high] = tensor.spec().offset_range();
    bytes += static_cast<std::size_t>(high - low + 1) * size_of(tensor.spec().dtype);
  }
  return bytes;
}

// The same layout in memory of its own.
HostTensor clone(const HostTensor& tensor) {
  HostTensor copy(tensor.spec());
  const auto [low, high] = tensor.spec().offset_range();
  const auto size = static_cast<std::int64_t>(size_of(tensor.spec().dtype));
  std::memcpy(static_cast<std::byte*>(copy.data()) + low * size,
              static_cast<const std::byte*>(tensor.data()) + low * size,
              static_cast<std::size_t>((high - low + 1) * size));
  return copy;
}

struct Copy {
  driver::Request request;
  std::unique_ptr<driver::Session> session;
};

std::vector<Copy> make_copies(const driver::Request& request, const MeasureSettings& settings) {
  std::vector<Copy> copies;
  copies.push_back({request, driver::find_driver(request.op).prepare(request)});
  const std::size_t bytes =
      std::max<std::size_t>(bytes_of(request.inputs) + bytes_of(copies[0].session->outputs), 1);
  // One set that is larger than all of it has left the cache when its turn comes again.
  const std::size_t wanted =
      bytes > 4 * settings.rotate_bytes ? 1 : settings.rotate_bytes / bytes + 2;
  const std::size_t affordable = settings.memory_limit / bytes;
  constexpr std::size_t kMost = 64;  // more would take longer to set up than to run
  for (std::size_t i = 1; i < std::min({wanted, affordable, kMost}); ++i) {
    driver::Request copy = request;
    for (auto& [name, tensor] : copy.inputs) tensor = clone(tensor);
    auto session = driver::find_driver(copy.op).prepare(copy);
    copies.push_back({std::move(copy), std::move(session)});
  }
  return copies;
}

Timing summary(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const auto at = [&](double quantile) {
    return times[static_cast<std::size_t>(quantile * static_cast<double>(times.size() - 1) + 0.5)];
  };
  return {at(0.5), at(0.2), at(0.8), static_cast<int>(times.size())};
}

template <class Run>
Timing time_runs(std::vector<Copy>& copies, double seconds, const Run& run) {
  constexpr std::size_t kFewest = 3, kWanted = 5, kMost = 20000;
  for (Copy& copy : copies) run(*copy.session);
  std::vector<double> times;
  const auto begin = Clock::now();
  for (std::size_t i = 0; i < kMost; ++i) {
    const auto start = Clock::now();
    run(*copies[i % copies.size()].session);
    const auto stop = Clock::now();
    times.push_back(std::chrono::duration<double>(stop - start).count());
    const double total = std::chrono::duration<double>(stop - begin).count();
    const std::size_t enough = total >= 8 * seconds ? kFewest : kWanted;
    if (total >= seconds && times.size() >= enough) break;
  }
  return summary(std::move(times));
}

template <class Run>
Timing time_device_runs(std::vector<Copy>& copies, double seconds, const Device& device,
                        const Run& run) {
  const auto count = static_cast<int>(copies.size());
  const DeviceTimes times =
      time_on_device(device, copies[0].session->stream(), seconds, 5, std::max(count, 2),
                     [&](int i) { run(*copies[static_cast<std::size_t>(i % count)].session); });
  Timing timing = summary(times.seconds);
  timing.host = summary(times.host_seconds).median;
  return timing;
}

double relative_difference(const HostTensor& got, const HostTensor& expected) {
  const driver::LargestErrors errors = driver::largest_errors(got, expected);
  return errors.difference == 0 ? 0 : errors.difference / errors.largest;
}

// Of the sum of all sizes: more is no rounding, whatever the problem. Single elements may differ by
// any amount, as where one rounding moves one across the edge of entmax's support.
double gross_error(DType dtype) {
  return std::min(0.25, 64 * std::sqrt(driver::epsilon_of(dtype)));
}

void add_error(Measurement& result, const driver::OpDriver& driver, const std::string& tensor,
               double relative, const std::string& against) {
  PassError& worst = result.passes[driver::is_gradient(driver, tensor) ? 1 : 0].error;
  if (worst.against.empty() || relative > worst.relative || std::isnan(relative)) {
    worst = {against, tensor, relative};
  }
}

void add_errors(Measurement& result, const driver::Request& request, const TensorMap& outputs,
                const MeasureSettings& settings) {
  const driver::OpDriver& driver = driver::find_driver(request.op);
  double flops = 0, bytes = 0;
  for (const PassResult& pass : result.passes) {
    flops += pass.cost.flops;
    bytes += pass.cost.bytes;
  }
  if (settings.verify || (flops <= kReferenceFlops && bytes <= kReferenceBytes)) {
    const driver::CheckReport report = driver::verify_outputs(request, outputs);
    result.failures = report.failures;
    for (const auto& error : report.errors) {
      const double relative = error.error == 0 ? 0 : error.error / error.scale;
      add_error(result, driver, error.tensor, relative, "reference");
    }
    return;
  }
  const bool on_gpu = request.device.kind == DeviceKind::cuda;
  if (settings.compare && (on_gpu || main_dtype(request.inputs) != DType::f64)) {
    // `pullback check` holds all of these against the reference.
    driver::Request exact = request;
    exact.variant = "cpu";  // whatever variant is forced
    exact.device = Device::cpu(request.device.threads);
    if (!on_gpu) exact.inputs = driver::in_double(request.inputs);
    for (const auto& [name, expected] : driver::evaluate(exact)) {
      const auto found = outputs.find(name);
      if (found == outputs.end()) {
        result.failures.push_back(name + ": missing");
        continue;
      }
      const HostTensor& got = found->second;
      if (!is_floating(expected.spec().dtype)) continue;
      add_error(result, driver, name, relative_difference(got, expected), on_gpu ? "cpu" : "f64");
      const double off = driver::mean_errors(got, expected).ratio(),
                   most = gross_error(got.spec().dtype);
      if (!(off <= most)) {
        result.failures.push_back(
            fmt::format("{}: off by {:.3g} in the mean, more than {:.3g}", name, off, most));
      }
    }
  }
}

}  // namespace

std::string variant_of(const std::string& description) {
  const std::string line = description.substr(0, description.find('\n'));
  const std::size_t colon = line.find(": ");
  return colon == std::string::npos ? line : line.substr(colon + 2);
}

DType main_dtype(const TensorMap& inputs) {
  for (const auto& [name, tensor] : inputs) {
    if (is_floating(tensor.spec().dtype)) return tensor.spec().dtype;
  }
  return DType::f32;
}

Measurement measure(const driver::Request& request, const MeasureSettings& settings) {
  const driver::OpDriver& driver = driver::find_driver(request.op);
  Measurement result;
  std::vector<Copy> copies = make_copies(request, settings);
  result.copies = static_cast<int>(copies.size());
  for (Pass pass : {Pass::forward, Pass::backward}) {
    const bool forward = pass == Pass::forward;
    const driver::Session& first = *copies[0].session;
    PassResult& timed = result.passes.emplace_back();
    timed.pass = pass;
    timed.description = forward ? first.forward_description : first.backward_description;
    timed.variant = variant_of(timed.description);
    timed.workspace_bytes =
        forward ? first.forward_workspace_bytes : first.backward_workspace_bytes;
    timed.cost = driver.cost(request, pass);
    timed.plan_seconds = forward ? first.forward_plan_seconds : first.backward_plan_seconds;
    const auto run = [forward](driver::Session& session) {
      forward ? session.forward() : session.backward();
    };
    timed.time = request.device.kind == DeviceKind::cpu
                     ? time_runs(copies, settings.seconds, run)
                     : time_device_runs(copies, settings.seconds, request.device, run);
  }
  copies.resize(1);
  copies[0].session->fetch(driver::Fetch::outputs);
  const TensorMap outputs = copies[0].session->outputs;
  add_errors(result, request, outputs, settings);
  return result;
}

double product_ceiling(const Ceilings& ceilings, DType dtype) {
  if (dtype == DType::f64) return ceilings.f64_flops_per_second;
  const bool half = size_of(dtype) == 2 && ceilings.bf16_flops_per_second > 0;
  return half ? ceilings.bf16_flops_per_second : ceilings.f32_flops_per_second;
}

double share_of_ceiling(const PassResult& result, DType dtype, const Ceilings& ceilings) {
  double least = result.cost.bytes / ceilings.copy_bytes_per_second;
  if (result.bound_by_products()) {
    const double rate = product_ceiling(ceilings, dtype);
    if (rate == 0) return 0;
    least = std::max(least, result.cost.flops / rate);
  }
  return least / result.time.median;
}

}  // namespace pullback::tool
