#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>

#include "commands.hpp"
#include "cuda/driver.hpp"
#include "cuda_timer.hpp"
#include "driver/case.hpp"
#include "driver/safetensors.hpp"
#include "print.hpp"
#include "pullback/error.hpp"
#include "report.hpp"

namespace pullback::tool {
namespace {

struct BenchOptions {
  std::vector<std::string> ops, dtypes;
  DeviceOptions device;
  std::string filter, variant;
  ReportFiles files;
  bool quick = false, no_compare = false;
  double seconds = 0;
  std::uint64_t seed = 1;
};

struct Job {
  driver::Case test;
  DType dtype;
};

std::vector<Job> jobs_of(const BenchOptions& options, const Device& device) {
  const auto listed = [](const std::vector<std::string>& list, std::string_view item) {
    return list.empty() || std::find(list.begin(), list.end(), item) != list.end();
  };
  std::vector<Job> jobs;
  const auto add = [&](const std::vector<driver::Case>& cases) {
    for (const driver::Case& test : cases) {
      if (!listed(options.ops, test.op)) continue;
      if (test.name.find(options.filter) == std::string::npos) continue;
      if (options.quick && test.full_only) continue;
      for (DType dtype : test.dtypes) {
        if (listed(options.dtypes, name_of(dtype))) jobs.push_back({test, dtype});
      }
    }
  };
  if (device.kind == DeviceKind::cuda) {
    add(driver::all_cuda_benches());
  } else {
    for (const driver::CaseLists& lists : driver::all_case_lists()) {
      if (listed(options.ops, lists.op)) add(lists.bench());
    }
  }
  if (jobs.empty()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("bench: no benchmark of these ops and dtypes has '{}' in its name",
                            options.filter));
  }
  return jobs;
}

// Keeps the inputs of the last job of each dtype for the next one, which may have the same.
class Inputs {
 public:
  explicit Inputs(std::uint64_t seed) : seed_(seed) {}

  const driver::TensorMap& of(const Job& job) {
    Kept& kept = kept_[job.dtype];
    if (job.test.same_inputs.empty() || kept.name != job.test.same_inputs) {
      kept = {};  // before the new ones are made: both may not fit
      driver::Random random(seed_);
      kept = {job.test.same_inputs, job.test.inputs(job.dtype, random)};
    }
    return kept.inputs;
  }

 private:
  struct Kept {
    std::string name;
    driver::TensorMap inputs;
  };
  std::uint64_t seed_;
  std::map<DType, Kept> kept_;
};

int run_bench(const BenchOptions& options) {
  const Device device = options.device.get();
  for (const auto& op : options.ops) driver::find_driver(op);  // throws where there is none
  const std::vector<Job> jobs = jobs_of(options, device);
  options.files.check();
  const Machine machine = this_machine();
  Json report;
  std::vector<std::string> failures;
  {
    Progress progress(jobs.size() + 1);
    progress.next("measuring the ceilings of this machine");
    const bool on_gpu = device.kind == DeviceKind::cuda;
    std::optional<CopyCeiling> copy;
    if (!on_gpu) copy.emplace(device.threads, machine);
    Ceilings ceilings =
        on_gpu ? measure_device_ceilings(device) : measure_ceilings(*copy, options.quick);
    double copy_before = ceilings.copy_bytes_per_second;
    report = new_report(machine, ceilings, device, options.seed);
    const auto cache_bytes =
        on_gpu ? static_cast<std::size_t>(cuda::device_info(device.index).l2_bytes)
               : machine.cache_bytes;
    const MeasureSettings settings{
        .seconds = options.seconds > 0       ? options.seconds
                   : on_gpu || options.quick ? 0.1
                                             : 0.5,
        .rotate_bytes = cache_bytes + cache_bytes / 4,
        .memory_limit = std::min<std::size_t>(machine.memory_bytes / 4, std::size_t{4} << 30),
        .compare = !options.no_compare};
    Inputs inputs(options.seed);
    for (const Job& job : jobs) {
      progress.next(fmt::format("{} {} {}", job.test.op, name_of(job.dtype), job.test.name));
      const driver::Request request{.op = job.test.op,
                                    .inputs = inputs.of(job),
                                    .options = job.test.options,
                                    .device = device,
                                    .variant = options.variant};
      const Measurement measurement = measure(request, settings);
      for (const auto& failure : measurement.failures) {
        failures.push_back(
            fmt::format("{} '{}' {}: {}", job.test.op, job.test.name, name_of(job.dtype), failure));
      }
      if (copy) {
        const CopyRate after = copy->measure(1);
        ceilings.copy_bytes_per_second = std::max(copy_before, after.bytes_per_second);
        copy_before = after.bytes_per_second;
        Json& most = report["ceilings"];
        if (after.bytes_per_second > most["copy_bytes_per_second"].get<double>()) {
          most["copy_bytes_per_second"] = after.bytes_per_second;
          most["copy_method"] = after.method;
        }
      }
      add_results(report, ceilings, job.test.name, request, measurement,
                  fmt::format("pullback bench {} --dtype {} --seed {} {}{} --filter {}",
                              job.test.op, name_of(job.dtype), options.seed, text_of(device),
                              variant_text(options.variant), shell_quoted(job.test.name)));
      options.files.save(report);  // an interrupted run leaves what it had
    }
  }
  fmt::print("{}\n{}", heading_text(report), table_text(report));
  for (const auto& failure : failures) fmt::print("FAILED {}\n", failure);
  return failures.empty() ? kDone : kCheckFailed;
}

}  // namespace

void add_bench(CLI::App& app, Command& command) {
  CLI::App* bench = app.add_subcommand(
      "bench", "Times every op, beside what this machine's copy and matrix product reach");
  auto options = std::make_shared<BenchOptions>();
  bench->add_option("op", options->ops, "ops to time; all when not given")->type_name("OP");
  options->device.add_to(*bench);
  options->files.add_to(*bench);
  bench->add_option("--filter", options->filter, "only cases with this text in their name")
      ->type_name("TEXT");
  bench->add_option("--dtype", options->dtypes, "only this dtype; may be repeated")
      ->check(CLI::IsMember({"f64", "f32", "bf16", "f16"}))
      ->allow_extra_args(false)
      ->type_name("DTYPE");
  bench->add_flag("--quick", options->quick, "shorter timings, and no slow cases");
  bench->add_flag("--no-compare", options->no_compare,
                  "leave out the error of large problems, which another computation tells");
  bench
      ->add_option("--seconds", options->seconds,
                   "timing of each pass (0.5; 0.1 when quick and on GPUs)")
      ->check(number_between(0.001, 600))
      ->type_name("X");
  bench->add_option("--seed", options->seed, "seed of the inputs (1)")
      ->check(whole_number)
      ->type_name("N");
  bench->add_option("--variant", options->variant, "implementation to time")->type_name("NAME");
  bench->callback([options, &command] { command.run = [options] { return run_bench(*options); }; });
}

}  // namespace pullback::tool
