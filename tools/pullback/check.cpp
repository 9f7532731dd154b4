#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>

#include "commands.hpp"
#include "driver/check.hpp"
#include "print.hpp"
#include "pullback/error.hpp"

namespace pullback::tool {
namespace {

struct CheckOptions {
  std::vector<std::string> ops;
  DeviceOptions device;
  std::string cases = "quick", filter, variant;
  std::uint64_t seed = 1;
  int fuzz = -1;  // problems an op; by default few for quick and many for full
  std::optional<std::uint64_t> fuzz_seed;
};

struct Job {
  driver::Case test;
  DType dtype;
  std::uint64_t seed;
  std::string repeat;
};

std::vector<Job> jobs_of(const driver::CaseLists& lists, const CheckOptions& options) {
  std::vector<Job> jobs;
  const bool full = options.cases == "full";
  const std::string command = fmt::format("pullback check {}", lists.op);
  const auto add_fuzz = [&](std::uint64_t seed) {
    driver::Case test = lists.fuzz(seed);
    const DType dtype = test.dtypes[seed % test.dtypes.size()];
    jobs.push_back({std::move(test), dtype, seed, fmt::format("{} --fuzz-seed {}", command, seed)});
  };
  if (options.fuzz_seed) {
    add_fuzz(*options.fuzz_seed);
    return jobs;
  }
  for (const driver::Case& test : lists.cases()) {
    if (test.full_only && !full) continue;
    if (test.name.find(options.filter) == std::string::npos) continue;
    for (DType dtype : test.dtypes) {
      jobs.push_back({test, dtype, options.seed,
                      fmt::format("{} --cases {} --seed {} --fuzz 0 --filter {}", command,
                                  options.cases, options.seed, shell_quoted(test.name))});
    }
  }
  const int fuzz = options.fuzz >= 0 ? options.fuzz : !options.filter.empty() ? 0 : full ? 200 : 20;
  for (int i = 0; i < fuzz; ++i) {
    add_fuzz(options.seed * 1000003 + static_cast<std::uint64_t>(i));
  }
  return jobs;
}

// What went wrong, and the error of the worst tensor as a part of what is allowed.
struct Outcome {
  std::vector<std::string> failures;
  double worst = 0;
};

Outcome run_job(const Job& job, const Device& device, const std::string& variant) {
  Outcome outcome;
  try {
    const auto report = driver::check_case(job.test, job.dtype, device, job.seed, variant);
    outcome.failures = report.failures;
    for (const auto& error : report.errors) {
      outcome.worst = std::max(outcome.worst, error.error / error.allowed);
    }
  } catch (const Error& error) {
    if (error.code() == ErrorCode::device) throw;  // the next case would fare no better
    outcome.failures.push_back(fmt::format("{} '{}' {} seed {}: {}", job.test.op, job.test.name,
                                           name_of(job.dtype), job.seed, error.what()));
  }
  return outcome;
}

// A variant that there is not, or not for any of the cases, is bad usage, not a failure of all.
void check_variant(const std::vector<Job>& jobs, const Device& device,
                   const CheckOptions& options) {
  std::exception_ptr refusal;
  for (const Job& job : jobs) {
    driver::Random random(job.seed);
    try {
      driver::find_driver(job.test.op)
          .prepare({.op = job.test.op,
                    .inputs = job.test.inputs(job.dtype, random),
                    .options = job.test.options,
                    .device = device,
                    .variant = options.variant});
      return;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::unsupported) throw;
      if (!refusal) refusal = std::current_exception();
    }
  }
  if (refusal && !options.variant.empty()) std::rethrow_exception(refusal);
}

int run_check(const CheckOptions& options) {
  const Device device = options.device.get();
  for (const auto& op : options.ops) driver::find_driver(op);  // throws where there is none
  std::vector<std::pair<std::string_view, std::vector<Job>>> plan;
  std::size_t total = 0;
  for (const driver::CaseLists& lists : driver::all_case_lists()) {
    const bool wanted = options.ops.empty() || std::find(options.ops.begin(), options.ops.end(),
                                                         lists.op) != options.ops.end();
    if (!wanted) continue;
    plan.emplace_back(lists.op, jobs_of(lists, options));
    total += plan.back().second.size();
    check_variant(plan.back().second, device, options);
  }
  if (total == 0) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("check: no case has '{}' in its name", options.filter));
  }

  Table table({{"op"}, {"cases", true}, {"passed", true}, {"worst error / allowed", true}});
  std::vector<std::string> failures;
  {
    Progress progress(total);
    for (const auto& [op, jobs] : plan) {
      std::size_t passed = 0;
      double worst = 0;
      for (const Job& job : jobs) {
        progress.next(fmt::format("{} {} {}", op, name_of(job.dtype), job.test.name));
        const Outcome outcome = run_job(job, device, options.variant);
        passed += outcome.failures.empty();
        worst = std::max(worst, outcome.worst);
        for (const auto& failure : outcome.failures) failures.push_back("FAILED " + failure);
        if (!outcome.failures.empty()) {
          failures.push_back(fmt::format("  repeat: {} {}{}", job.repeat, text_of(device),
                                         variant_text(options.variant)));
        }
      }
      table.add({std::string(op), fmt::format("{}", jobs.size()), fmt::format("{}", passed),
                 fmt::format("{:.2f}", worst)});
    }
  }
  for (const auto& failure : failures) fmt::print("{}\n", failure);
  fmt::print("{}", table.text());
  return failures.empty() ? kDone : kCheckFailed;
}

}  // namespace

void add_check(CLI::App& app, Command& command) {
  CLI::App* check = app.add_subcommand(
      "check", "Compares every op with its f64 reference and with finite differences");
  auto options = std::make_shared<CheckOptions>();
  check->add_option("op", options->ops, "ops to check; all when not given")->type_name("OP");
  options->device.add_to(*check);
  check->add_option("--cases", options->cases, "quick, or full with the slow cases")
      ->check(CLI::IsMember({"quick", "full"}))
      ->type_name("SET");
  check->add_option("--seed", options->seed, "seed of the inputs (1)")
      ->check(whole_number)
      ->type_name("N");
  check->add_option("--fuzz", options->fuzz, "random problems an op (quick 20, full 200)")
      ->check(CLI::Range(0, 1000000))
      ->type_name("N");
  check->add_option("--fuzz-seed", options->fuzz_seed, "this random problem only")
      ->check(whole_number)
      ->type_name("N");
  check->add_option("--filter", options->filter, "only cases with this text in their name")
      ->type_name("TEXT");
  check->add_option("--variant", options->variant, "implementation to check")->type_name("NAME");
  check->callback([options, &command] { command.run = [options] { return run_check(*options); }; });
}

}  // namespace pullback::tool
