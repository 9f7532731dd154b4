#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>

#include "commands.hpp"
#include "driver/safetensors.hpp"
#include "print.hpp"
#include "pullback/error.hpp"
#include "report.hpp"

namespace pullback::tool {
namespace {

struct CompareOptions {
  std::string before, after;
  double threshold = 0.05;
};

struct Time {
  double median, p20, p80;
};
using Times = std::map<std::string, Time>;  // by "op case dtype pass"

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: {}", driver::printable(path, 400), why));
}

Times read_times(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file.peek() != std::ifstream::traits_type::eof()) text << file.rdbuf();
  if (!file.is_open() || file.bad()) refuse(path, "cannot read the file");
  const Json report = Json::parse(text.str(), nullptr, false);
  if (report.is_discarded()) refuse(path, "expected JSON from pullback bench --json");
  try {
    const Json& schema = report.at("schema");
    if (schema != Json(kReportSchema)) {
      // Anything else may be of any size and depth.
      refuse(path, fmt::format("expected schema {}, got {}", kReportSchema,
                               schema.is_number() ? schema.dump() : schema.type_name()));
    }
    Times times;
    for (const Json& record : report.at("results").get_ref<const Json::array_t&>()) {
      const Json& seconds = record.at("seconds");
      const Time time{seconds.at("median"), seconds.at("p20"), seconds.at("p80")};
      if (!(time.median > 0)) refuse(path, "expected times above 0");
      const std::string name = driver::printable(
          fmt::format("{} · {} · {} · {}", record.at("op").get<std::string>(),
                      record.at("case").get<std::string>(), record.at("dtype").get<std::string>(),
                      record.at("pass").get<std::string>()),
          400);
      if (!times.emplace(name, time).second) refuse(path, fmt::format("'{}' is there twice", name));
    }
    return times;
  } catch (const Json::exception&) {
    refuse(path, "expected a report of pullback bench --json, got other JSON");
  }
}

int run_compare(const CompareOptions& options) {
  const Times before = read_times(options.before);
  const Times after = read_times(options.after);
  Table table({{"benchmark"}, {"before", true}, {"after", true}, {"after / before", true}, {""}});
  std::size_t slower = 0, faster = 0, same = 0, unmatched = 0;
  for (const auto& [name, a] : before) {
    const auto it = after.find(name);
    if (it == after.end()) {
      table.add({name, time_text(a.median), "—", "—", "only before"});
      ++unmatched;
      continue;
    }
    const Time& b = it->second;
    const double ratio = b.median / a.median;
    // A change counts when it exceeds the threshold and the spreads do not even touch.
    std::string verdict;
    if (ratio > 1 + options.threshold && b.p20 > a.p80) {
      verdict = "SLOWER";
      ++slower;
    } else if (ratio < 1 / (1 + options.threshold) && b.p80 < a.p20) {
      verdict = "faster";
      ++faster;
    } else {
      ++same;
    }
    table.add(
        {name, time_text(a.median), time_text(b.median), fmt::format("{:.3f}", ratio), verdict});
  }
  for (const auto& [name, b] : after) {
    if (before.contains(name)) continue;
    table.add({name, "—", time_text(b.median), "—", "only after"});
    ++unmatched;
  }
  if (slower + faster + same == 0) refuse(options.after, "no benchmark of the file before");
  fmt::print("{}{} slower, {} faster, {} the same within noise, {} in one file only\n",
             table.text(), slower, faster, same, unmatched);
  return slower == 0 ? kDone : kCheckFailed;
}

}  // namespace

void add_compare(CLI::App& app, Command& command) {
  CLI::App* compare =
      app.add_subcommand("compare", "Compares two files of bench --json; status 1 when slower");
  auto options = std::make_shared<CompareOptions>();
  compare->add_option("before", options->before, "older results")->required()->type_name("A.json");
  compare->add_option("after", options->after, "newer results")->required()->type_name("B.json");
  compare
      ->add_option("--threshold", options->threshold,
                   "relative change that counts, if the p20–p80 spreads do not overlap (0.05)")
      ->check(number_between(0, 10))
      ->type_name("X");
  compare->callback(
      [options, &command] { command.run = [options] { return run_compare(*options); }; });
}

}  // namespace pullback::tool
