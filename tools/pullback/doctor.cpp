#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "commands.hpp"
#include "core/cpu_info.hpp"
#include "cuda/driver.hpp"
#include "cuda/report.hpp"
#include "driver/case.hpp"
#include "driver/kernel_list.hpp"
#include "machine.hpp"
#include "measure.hpp"
#include "print.hpp"
#include "pullback/error.hpp"

namespace pullback::tool {
namespace {

// The plans of a small problem of the op: what would run, and why. If no case has a plan, why not.
void describe_op(const driver::CaseLists& lists, DType dtype, const Device& device, Table& table,
                 std::vector<std::string>& reasons, std::set<std::string>& refusals) {
  std::string refusal;
  for (const driver::Case& test : lists.cases()) {
    if (std::find(test.dtypes.begin(), test.dtypes.end(), dtype) == test.dtypes.end()) continue;
    driver::Random random(1);
    const driver::Request request{.op = test.op,
                                  .inputs = test.inputs(dtype, random),
                                  .options = test.options,
                                  .device = device,
                                  .variant = {}};
    std::unique_ptr<driver::Session> session;
    try {
      session = driver::find_driver(test.op).prepare(request);
    } catch (const Error& error) {
      if (refusal.empty()) refusal = error.what();
      if (error.code() != ErrorCode::unsupported) break;  // every case would meet it
      continue;
    }
    table.add({device.kind == DeviceKind::cpu ? "cpu" : "cuda", std::string(lists.op),
               std::string(name_of(dtype)), variant_of(session->forward_description),
               variant_of(session->backward_description)});
    if (dtype == DType::f32) {
      reasons.push_back(session->forward_description);
      reasons.push_back(session->backward_description);
    }
    return;
  }
  if (!refusal.empty()) refusals.insert(refusal);
}

int run_doctor(bool verbose) {
  const Machine machine = this_machine();
  std::string isa = fmt::format("{}", fmt::join(machine.simd, ", "));
  for (const auto& extra : machine.extra_isa) isa += ", " + extra;
  fmt::print("pullback {} ({})\n\n", PULLBACK_VERSION, machine.compiler);
  fmt::print("CPU               {}\n", machine.cpu);
  fmt::print("usable cores      {}\n", machine.cores);
  fmt::print("SIMD, best first  {}\n", isa);
  fmt::print("last-level cache  {}\n", bytes_text(static_cast<double>(machine.cache_bytes)));
  fmt::print("free memory       {}\n", bytes_text(static_cast<double>(machine.memory_bytes)));
  fmt::print("NVIDIA driver     {}\n",
             machine.nvidia_driver.empty() ? "none" : machine.nvidia_driver);
  fmt::print("{}", cuda::report());
  if (const char* forced = std::getenv("PULLBACK_FORCE_VARIANT")) {
    fmt::print("forced variant    {} (PULLBACK_FORCE_VARIANT)\n", forced);
  }

  Table table({{"device"}, {"op"}, {"dtype"}, {"forward runs"}, {"backward runs"}});
  std::vector<std::string> reasons;
  std::set<std::string> refusals;
  for (const driver::CaseLists& lists : driver::all_case_lists()) {
    for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
      describe_op(lists, dtype, Device::cpu(), table, reasons, refusals);
      if (driver::has_cuda(lists.op) && cuda::driver_problem().empty()) {
        describe_op(lists, dtype, Device::cuda(), table, reasons, refusals);
      }
    }
  }
  fmt::print("\n{}", table.text());
  for (const std::string& refusal : refusals) fmt::print("{}\n", refusal);
  fmt::print(
      "Every op also has the variants reference (double precision, plain loops) and "
      "textbook, by name.\n");
  if (verbose) {
    for (const std::string& reason : reasons) fmt::print("\n{}\n", reason);
  }
  return kDone;
}

}  // namespace

void add_doctor(CLI::App& app, Command& command) {
  CLI::App* doctor =
      app.add_subcommand("doctor", "What this machine has, and which variant of each op would run");
  auto verbose = std::make_shared<bool>(false);
  doctor->add_flag("--verbose", *verbose, "also why, and with which tiles (for f32)");
  doctor->callback(
      [verbose, &command] { command.run = [verbose] { return run_doctor(*verbose); }; });
}

}  // namespace pullback::tool
