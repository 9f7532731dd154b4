#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "commands.hpp"
#include "driver/safetensors.hpp"
#include "print.hpp"
#include "report.hpp"

namespace pullback::tool {
namespace {

struct DemoOptions {
  std::string folder;
  ReportFiles files;
  DeviceOptions device;
};

// The files of examples/data and the options that belong to them (see the README there).
struct DemoJob {
  const char* op;
  const char* shape_of;  // the tensor whose shape stands for the problem
  driver::OptionMap options;
};

const std::vector<DemoJob>& demo_jobs() {
  static const std::vector<DemoJob> jobs = {
      {"attention", "q", {}},
      {"block_softmax", "x", {{"scale", "0.17677669529663687"}}},
      {"entmax", "x", {{"alpha", "1.5"}}},
      {"segment", "x", {{"reduce", "mean"}}},
      {"segment", "x", {{"reduce", "max"}}},
  };
  return jobs;
}

std::string title_of(const DemoJob& job, const driver::Request& request) {
  std::string title;
  for (const auto& [name, value] : job.options) {
    if (name != "scale") title += fmt::format("{} {} ", name, value);
  }
  const std::string shape = driver::spec_of(request.inputs, job.shape_of).to_string();
  return title + shape.substr(shape.find('['));
}

int run_demo(const DemoOptions& options) {
  const Device device = options.device.get();
  options.files.check();
  const Machine machine = this_machine();
  Json report;
  std::vector<std::string> failures;
  {
    Progress progress(demo_jobs().size() + 1);
    progress.next("measuring the ceilings of this machine");
    const Ceilings ceilings = ceilings_of(device, machine, true);
    report = new_report(machine, ceilings, device, 0);
    // The files are small: they are timed in the cache, as the layers around them would leave them.
    const MeasureSettings settings{.seconds = 0.3, .verify = true};
    for (const DemoJob& job : demo_jobs()) {
      progress.next(job.op);
      const std::string path = fmt::format("{}/{}.safetensors", options.folder, job.op);
      const driver::Request request{.op = job.op,
                                    .inputs = driver::read_safetensors(path),
                                    .options = job.options,
                                    .device = device,
                                    .variant = {}};
      const Measurement measurement = measure(request, settings);
      for (const auto& failure : measurement.failures) {
        failures.push_back(fmt::format("{}: {}", job.op, failure));
      }
      std::string repeat =
          fmt::format("pullback grad {} --input {} --output out.safetensors --verify {}", job.op,
                      shell_quoted(path), text_of(device));
      for (const auto& [name, value] : job.options) repeat += fmt::format(" --{} {}", name, value);
      add_results(report, ceilings, title_of(job, request), request, measurement, repeat);
      options.files.save(report);
    }
  }
  fmt::print("{}\n{}", heading_text(report), table_text(report));
  for (const auto& failure : failures) fmt::print("FAILED {}\n", failure);
  if (failures.empty()) {
    fmt::print("Every output and gradient agrees with the f64 reference.\n");
  }
  return failures.empty() ? kDone : kCheckFailed;
}

}  // namespace

void add_demo(CLI::App& app, Command& command) {
  CLI::App* demo = app.add_subcommand(
      "demo", "Computes, verifies and times the gradients of the tensors in examples/data");
  auto options = std::make_shared<DemoOptions>();
  demo->add_option("folder", options->folder, "folder with the files, one an op")
      ->required()
      ->type_name("DIR");
  options->device.add_to(*demo);
  options->files.add_to(*demo);
  demo->callback([options, &command] { command.run = [options] { return run_demo(*options); }; });
}

}  // namespace pullback::tool
