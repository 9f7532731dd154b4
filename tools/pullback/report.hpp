// A benchmark's results as JSON (docs/command-line.md gives the schema), as a table, as a web page.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "measure.hpp"

namespace CLI {
class App;
}

namespace pullback::tool {

using Json = nlohmann::ordered_json;

inline constexpr int kReportSchema = 1;

Json new_report(const Machine& machine, const Ceilings& ceilings, const Device& device,
                std::uint64_t seed);

// Two records, forward and backward, beside these ceilings. `title` names the problem; `repeat` is
// a command line.
void add_results(Json& report, const Ceilings& ceilings, const std::string& title,
                 const driver::Request& request, const Measurement& measurement,
                 const std::string& repeat);

// The copy's rate, or from which to which it went.
std::string copy_text(const Json& report);

// Machine and ceilings in a few lines, and a table with a line a record.
std::string heading_text(const Json& report);
std::string table_text(const Json& report);

// One page that needs nothing else: tables and inline SVG.
std::string html_of(const Json& report);

// --json and --html: where a report goes, if anywhere.
struct ReportFiles {
  std::string json, html;

  void add_to(CLI::App& app);
  // Before long work. Throws Error where a file cannot be written, or both are one.
  void check() const;
  void save(const Json& report) const;
};

}  // namespace pullback::tool
