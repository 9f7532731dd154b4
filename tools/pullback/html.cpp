// The report as one web page: no scripts, no external resources, light and dark.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "print.hpp"
#include "report.hpp"

namespace pullback::tool {
namespace {

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5c6773; --line: #d7dce2;
  --page: #ffffff; --card: #f4f6f8; --roof: #8a94a0;
  --f64: #7b4bb7; --f32: #1668b8; --bf16: #b4530a; --f16: #1b7f4d; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ed; --soft: #9aa5b1; --line: #343c46; --page: #14181d; --card: #1d232a;
    --roof: #7d8894; --f64: #b592ea; --f32: #6cb0f2; --bf16: #f0a35e; --f16: #62c796; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 76rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p { margin: .3rem 0; color: var(--soft); max-width: 60rem; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.card { background: var(--card); border-radius: 8px; padding: .6rem 1rem; }
.card b { display: block; font-size: 1.15rem; } .card span { color: var(--soft); font-size: .85rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { padding: .28rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; } .text { text-align: left; }
td.case { white-space: normal; min-width: 12rem; }
.meter { display: inline-block; width: 4rem; height: .5rem; border-radius: 3px;
  background: var(--line); margin-left: .5rem; overflow: hidden; }
.meter i { display: block; height: 100%; background: var(--f32); }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg .soft { fill: var(--soft); }
svg .grid { stroke: var(--line); } svg .roof { stroke: var(--roof); stroke-width: 2; fill: none; }
.f64 { fill: var(--f64); stroke: var(--f64); } .f32 { fill: var(--f32); stroke: var(--f32); }
.bf16 { fill: var(--bf16); stroke: var(--bf16); } .f16 { fill: var(--f16); stroke: var(--f16); }
.backward { fill: var(--page); stroke-width: 2; }
.bar { stroke: none; } .bar.backward { fill-opacity: .55; }
.bar.backward.f64 { fill: var(--f64); } .bar.backward.f32 { fill: var(--f32); }
.bar.backward.bf16 { fill: var(--bf16); } .bar.backward.f16 { fill: var(--f16); }
)";

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string text_of(const Json& value) { return escaped(value.get<std::string>()); }

struct Row {
  int number;
  const Json* record;
  const Json& operator[](const char* key) const { return (*record)[key]; }
  double seconds() const { return (*record)["seconds"]["median"]; }
  double flops_rate() const { return (*record)["flops"].get<double>() / seconds(); }
  double bytes_rate() const { return (*record)["bytes"].get<double>() / seconds(); }
  double intensity() const {
    return (*record)["flops"].get<double>() / std::max((*record)["bytes"].get<double>(), 1.0);
  }
  bool products() const { return (*record)["bound"] == "products"; }
  std::string marks() const {
    return text_of((*record)["dtype"]) + " " + text_of((*record)["pass"]);
  }
  std::string tip() const {
    return fmt::format("{}: {} {} {}, {}, {}", number, text_of((*record)["case"]),
                       text_of((*record)["dtype"]), text_of((*record)["pass"]),
                       time_text(seconds()),
                       products() ? flops_text(flops_rate()) : bandwidth_text(bytes_rate()));
  }
};

// Maps [low, high], widened to whole powers of ten, to pixels on a logarithmic scale.
struct LogScale {
  double low, high, from, to;
  LogScale(double least, double most, double from_pixel, double to_pixel)
      : low(std::floor(std::log10(least))),
        high(std::max(std::ceil(std::log10(most)), low + 1)),
        from(from_pixel),
        to(to_pixel) {}
  double operator()(double value) const {
    return from + (std::log10(value) - low) / (high - low) * (to - from);
  }
};

// Attainable rate over arithmetic intensity (Williams, Waterman, Patterson 2009).
std::string roofline(const std::vector<Row>& rows, const Json& ceilings) {
  constexpr double kLeft = 70, kRight = 880, kTop = 20, kBottom = 330;
  const double copy = ceilings["copy_bytes_per_second"];
  struct Roof {
    const char* dtype;
    double rate;
  };
  std::vector<Roof> roofs;
  const bool has_half = !ceilings["bf16_flops_per_second"].is_null();
  const auto roof_of = [&](const Json& dtype) -> std::string_view {
    return dtype == "f64" || dtype == "f32" ? dtype.get<std::string_view>()
           : has_half                       ? "bf16"
                                            : "f32";
  };
  for (const char* dtype : {"bf16", "f32", "f64"}) {
    const Json& rate = ceilings[fmt::format("{}_flops_per_second", dtype)];
    const bool used = std::any_of(rows.begin(), rows.end(),
                                  [&](const Row& row) { return roof_of(row["dtype"]) == dtype; });
    if (!rate.is_null() && used) roofs.push_back({dtype, rate});
  }
  double least_x = 1, most_x = 10, least_y = 1e300, most_y = 0;
  for (const Row& row : rows) {
    least_x = std::min(least_x, row.intensity());
    most_x = std::max(most_x, row.intensity());
    least_y = std::min(least_y, row.flops_rate());
    most_y = std::max(most_y, row.flops_rate());
  }
  for (const Roof& roof : roofs) {
    most_x = std::max(most_x, roof.rate / copy * 2);
    most_y = std::max(most_y, roof.rate);
  }
  const LogScale x(least_x, most_x, kLeft, kRight), y(least_y, most_y, kBottom, kTop);
  std::string svg = R"(<svg viewBox="0 0 960 380" role="img" aria-label="roofline">)";
  for (double power = x.low; power <= x.high; ++power) {
    const double at = x(std::pow(10, power));
    svg +=
        fmt::format(R"(<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>)"
                    R"(<text class="soft" x="{0:.1f}" y="{3}" text-anchor="middle">{4:g}</text>)",
                    at, kTop, kBottom, kBottom + 18, std::pow(10, power));
  }
  for (double power = y.low; power <= y.high; ++power) {
    const double at = y(std::pow(10, power));
    svg += fmt::format(R"(<line class="grid" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>)"
                       R"(<text class="soft" x="{3}" y="{4:.1f}" text-anchor="end">{5:g}</text>)",
                       kLeft, kRight, at, kLeft - 8, at + 4, std::pow(10, power - 9));
  }
  svg += fmt::format(R"(<text class="soft" x="{}" y="368" text-anchor="middle">)"
                     R"(FLOP per byte of compulsory traffic</text>)"
                     R"(<text class="soft" x="14" y="{}" text-anchor="middle" )"
                     R"svg(transform="rotate(-90 14 {})">GFLOP/s</text>)svg",
                     (kLeft + kRight) / 2, (kTop + kBottom) / 2, (kTop + kBottom) / 2);
  for (const Roof& roof : roofs) {
    // The slope, from the lower left border up to the ridge, then flat.
    const double start = std::max(std::pow(10, x.low), std::pow(10, y.low) / copy);
    const double ridge = std::clamp(roof.rate / copy, start, std::pow(10, x.high));
    svg += fmt::format(
        R"(<path class="roof" d="M{:.1f} {:.1f}L{:.1f} {:.1f}L{:.1f} {:.1f}"/>)"
        R"(<text class="soft" x="{:.1f}" y="{:.1f}" text-anchor="end">{} matrix product {}</text>)",
        x(start), y(start * copy), x(ridge), y(ridge * copy), kRight, y(roof.rate), kRight,
        y(roof.rate) - 6, roof.dtype, flops_text(roof.rate));
  }
  for (const Row& row : rows) {
    const double cx = x(row.intensity()), cy = y(row.flops_rate());
    svg += fmt::format(R"(<g><title>{}</title><circle class="{}" cx="{:.1f}" cy="{:.1f}" r="5"/>)"
                       R"(<text x="{:.1f}" y="{:.1f}" font-size="10">{}</text></g>)",
                       row.tip(), row.marks(), cx, cy, cx + 8, cy + 4, row.number);
  }
  return svg + "</svg>";
}

// Rates of the ops that move data, beside what a copy reaches.
std::string bars(const std::vector<Row>& rows, double copy) {
  constexpr double kLeft = 40, kRight = 850, kStep = 18;
  double most = copy;
  for (const Row& row : rows) most = std::max(most, row.bytes_rate());
  const auto width = [&](double rate) { return rate / most * (kRight - kLeft); };
  const double bottom = 24 + kStep * static_cast<double>(rows.size());
  std::string svg = fmt::format(
      R"(<svg viewBox="0 0 960 {:.0f}" role="img" aria-label="bandwidth">)", bottom + 8);
  double top = 24;
  for (const Row& row : rows) {
    svg += fmt::format(
        R"(<g><title>{}</title><rect class="bar {}" x="{}" y="{}" width="{:.1f}" height="12"/>)"
        R"(<text class="soft" x="{}" y="{}" text-anchor="end">{}</text>)"
        R"(<text x="{:.1f}" y="{}">{}</text></g>)",
        row.tip(), row.marks(), kLeft, top, width(row.bytes_rate()), kLeft - 8, top + 10,
        row.number, kLeft + width(row.bytes_rate()) + 6, top + 10,
        bandwidth_text(row.bytes_rate()));
    top += kStep;
  }
  svg +=
      fmt::format(R"(<path class="roof" d="M{0:.1f} 18V{1:.1f}"/>)"
                  R"(<text class="soft" x="{0:.1f}" y="12" text-anchor="middle">copy {2}</text>)",
                  kLeft + width(copy), bottom, bandwidth_text(copy));
  return svg + "</svg>";
}

std::string error_cell(const Json& error) {
  if (error.is_null()) return "<td>—</td>";
  const Json& against = error["against"];
  return fmt::format(
      R"(<td title="{}, against {}">{}</td>)", text_of(error["tensor"]),
      against == "f64"   ? "this library in f64"
      : against == "cpu" ? "this library on the CPU"
                         : "the f64 reference",
      error["relative"].is_null() ? "not finite" : error_text(error["relative"].get<double>()));
}

std::string table_of(const std::vector<Row>& rows) {
  std::string html =
      R"(<div class="scroll"><table><tr><th></th><th class="text">case</th>)"
      R"(<th class="text">dtype</th><th class="text">pass</th><th class="text">variant</th>)"
      R"(<th>median</th><th>p20–p80</th><th>rate</th><th>of ceiling</th><th>error</th>)"
      R"(<th>workspace</th></tr>)";
  for (const Row& row : rows) {
    const Json& share = row["share_of_ceiling"];
    const double part = share.is_null() ? 0 : share.get<double>();
    std::string inputs;
    for (const auto& [name, spec] : row["inputs"].items()) {
      inputs += fmt::format("{} {}\n", name, spec.get<std::string>());
    }
    for (const auto& [name, value] : row["options"].items()) {
      inputs += fmt::format("--{} {}\n", name, value.get<std::string>());
    }
    inputs += row["repeat"].get<std::string>();
    html += fmt::format(
        R"(<tr><td>{}</td><td class="text case" title="{}">{}</td><td class="text">{}</td>)"
        R"(<td class="text">{}</td><td class="text" title="{}">{}</td>)"
        R"(<td>{}</td><td>{}–{}</td><td>{}</td>)",
        row.number, escaped(inputs), text_of(row["case"]), text_of(row["dtype"]),
        text_of(row["pass"]), text_of(row["description"]), text_of(row["variant"]),
        time_text(row.seconds()), time_text(row["seconds"]["p20"]),
        time_text(row["seconds"]["p80"]),
        row.products() ? flops_text(row.flops_rate()) : bandwidth_text(row.bytes_rate()));
    html +=
        share.is_null()
            ? "<td>—</td>"
            : fmt::format(R"(<td>{}<span class="meter"><i style="width:{:.0f}%"></i></span></td>)",
                          percent_text(part), std::min(part, 1.0) * 100);
    html += error_cell(row["error"]) +
            fmt::format("<td>{}</td></tr>", bytes_text(row["workspace_bytes"]));
  }
  return html + "</table></div>";
}

std::string card(const std::string& value, const std::string& label) {
  return fmt::format(R"(<div class="card"><b>{}</b><span>{}</span></div>)", escaped(value),
                     escaped(label));
}

std::string legend() {
  std::string svg = R"(<svg viewBox="0 0 960 22" aria-hidden="true">)";
  double x = 40;
  for (const char* dtype : {"f64", "f32", "bf16", "f16"}) {
    svg += fmt::format(
        R"(<circle class="{0}" cx="{1}" cy="11" r="5"/><text x="{2}" y="15">{0}</text>)", dtype, x,
        x + 10);
    x += 60;
  }
  for (const char* pass : {"forward", "backward"}) {
    svg += fmt::format(
        R"(<circle class="f32 {0}" cx="{1}" cy="11" r="5"/><text x="{2}" y="15">{0}</text>)", pass,
        x, x + 10);
    x += 90;
  }
  return svg + "</svg>";
}

}  // namespace

std::string html_of(const Json& report) {
  const Json& machine = report["machine"];
  const Json& ceilings = report["ceilings"];
  std::string isa = machine["simd"];
  for (const auto& extra : machine["isa"]) isa += ", " + extra.get<std::string>();
  std::string html = fmt::format(
      R"(<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Pullback: measured</title>)"
      R"(<meta name="viewport" content="width=device-width, initial-scale=1"><style>{}</style></head>)"
      R"(<body><h1>Pullback: measured</h1><p>{}, {}</p><div class="cards">)",
      kStyle, text_of(report["tool"]), text_of(report["time"]));
  if (const Json& gpu = report["gpu"]; !gpu.is_null()) {
    html += card(gpu["name"], fmt::format("{}, {} multiprocessors, CUDA {}", text_of(gpu["arch"]),
                                          gpu["multiprocessors"].get<int>(), text_of(gpu["cuda"])));
  } else {
    html += card(machine["cpu"], isa);
    html += card(fmt::format("{} threads", report["threads"].get<int>()),
                 fmt::format("{} usable cores", machine["cores"].get<int>()));
  }
  html += card(copy_text(report), "copy ceiling, " + ceilings["copy_method"].get<std::string>());
  if (ceilings["f32_flops_per_second"].is_null()) {
    html += card("unavailable", "matrix product ceiling: " + ceilings["blas"].get<std::string>());
  } else {
    html += card(flops_text(ceilings["f32_flops_per_second"]), "f32 matrix product ceiling");
    html += card(flops_text(ceilings["f64_flops_per_second"]), "f64 matrix product ceiling");
  }
  if (const Json& half = ceilings["bf16_flops_per_second"]; !half.is_null()) {
    html += card(flops_text(half), "bf16 matrix product ceiling");
  }
  html +=
      "</div><p>The share of the ceiling is the least time that the machine allows (compulsory "
      "bytes at the copy rate then, or the FLOPs at the rate of matrix products: f64 for f64, else "
      "f32 by OpenBLAS, and on a GPU for 16 bits bf16 by cuBLAS; whichever is longer) over the "
      "median time. An error is the largest "
      "difference from double precision over the largest value. Point at a cell for inputs, "
      "options and plans.</p>";

  std::vector<std::pair<std::string, std::vector<Row>>> ops;
  int number = 0;
  for (const Json& record : report["results"]) {
    const std::string op = record["op"];
    if (ops.empty() || ops.back().first != op) ops.push_back({op, {}});
    ops.back().second.push_back({++number, &record});
  }
  for (const auto& [op, rows] : ops) {
    std::vector<Row> products, copies;
    for (const Row& row : rows) (row.products() ? products : copies).push_back(row);
    html += "<h2>" + escaped(op) + "</h2>" + legend();
    if (!products.empty()) html += roofline(products, ceilings);
    if (!copies.empty()) html += bars(copies, ceilings["copy_bytes_per_second"]);
    html += table_of(rows);
  }
  return html + "</body></html>\n";
}

}  // namespace pullback::tool
