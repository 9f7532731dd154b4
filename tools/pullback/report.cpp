#include "report.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>

#include "commands.hpp"
#include "cuda/driver.hpp"
#include "driver/output_file.hpp"
#include "driver/safetensors.hpp"
#include "print.hpp"
#include "pullback/error.hpp"

namespace pullback::tool {
namespace {

// JSON has no infinity; null stands for what is not finite or not known.
Json number_or_null(double value, bool known = true) {
  return known && std::isfinite(value) ? Json(value) : Json(nullptr);
}

std::string rate_text(const Json& record) {
  if (record["bound"] == "products") {
    return flops_text(record["flops"].get<double>() / record["seconds"]["median"].get<double>());
  }
  return bandwidth_text(record["bytes"].get<double>() / record["seconds"]["median"].get<double>());
}

std::string error_cell(const Json& record) {
  const Json& error = record["error"];
  if (error.is_null()) return "—";
  return error["relative"].is_null() ? "not finite" : error_text(error["relative"]);
}

Json gpu_of(const Device& device) {
  if (device.kind == DeviceKind::cpu) return nullptr;
  const cuda::DeviceInfo& info = cuda::device_info(device.index);
  return {{"name", info.name},
          {"arch", fmt::format("sm_{}", info.arch())},
          {"multiprocessors", info.multiprocessors},
          {"l2_bytes", info.l2_bytes},
          {"memory_bytes", info.memory_bytes},
          {"cuda", fmt::format("{}.{}", cuda::driver().version / 1000,
                               cuda::driver().version % 1000 / 10)}};
}

void write_text_file(const std::string& path, const std::string& text) {
  driver::OutputFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

}  // namespace

Json new_report(const Machine& machine, const Ceilings& ceilings, const Device& device,
                std::uint64_t seed) {
  const bool products = ceilings.f32_flops_per_second > 0;
  return {{"schema", kReportSchema},
          {"tool", "pullback " PULLBACK_VERSION},
          {"time", time_now()},
          {"machine",
           {{"cpu", machine.cpu},
            {"cores", machine.cores},
            {"simd", machine.simd.empty() ? "none" : machine.simd.front()},
            {"isa", machine.extra_isa},
            {"last_level_cache_bytes", machine.cache_bytes},
            {"memory_available_bytes", machine.memory_bytes},
            {"compiler", machine.compiler}}},
          {"device", device.kind == DeviceKind::cpu ? "cpu" : fmt::format("cuda:{}", device.index)},
          {"gpu", gpu_of(device)},
          {"threads", ceilings.threads},
          {"seed", seed},
          {"ceilings",
           {{"copy_bytes_per_second", ceilings.copy_bytes_per_second},
            {"copy_method", ceilings.copy_method},
            {"copy_buffer_bytes", ceilings.copy_bytes},
            {"bf16_flops_per_second",
             number_or_null(ceilings.bf16_flops_per_second, ceilings.bf16_flops_per_second > 0)},
            {"f32_flops_per_second", number_or_null(ceilings.f32_flops_per_second, products)},
            {"f64_flops_per_second", number_or_null(ceilings.f64_flops_per_second, products)},
            {"blas", ceilings.blas}}},
          {"results", Json::array()}};
}

void add_results(Json& report, const Ceilings& ceilings, const std::string& title,
                 const driver::Request& request, const Measurement& measurement,
                 const std::string& repeat) {
  const DType dtype = main_dtype(request.inputs);
  Json inputs = Json::object(), options = Json::object();
  for (const auto& [name, tensor] : request.inputs) inputs[name] = tensor.spec().to_string();
  for (const auto& [name, value] : request.options) options[name] = value;
  for (const PassResult& pass : measurement.passes) {
    const double share = share_of_ceiling(pass, dtype, ceilings);
    Json error = nullptr;
    if (!pass.error.against.empty()) {
      error = {{"relative", number_or_null(pass.error.relative)},
               {"tensor", pass.error.tensor},
               {"against", pass.error.against}};
    }
    report["results"].push_back({{"op", request.op},
                                 {"case", title},
                                 {"dtype", name_of(dtype)},
                                 {"pass", pass.pass == Pass::forward ? "forward" : "backward"},
                                 {"variant", pass.variant},
                                 {"description", pass.description},
                                 {"seconds",
                                  {{"median", pass.time.median},
                                   {"host", number_or_null(pass.time.host, pass.time.host > 0)},
                                   {"p20", pass.time.p20},
                                   {"p80", pass.time.p80},
                                   {"runs", pass.time.runs}}},
                                 {"flops", pass.cost.flops},
                                 {"bytes", pass.cost.bytes},
                                 {"bound", pass.bound_by_products() ? "products" : "copy"},
                                 {"copy_bytes_per_second", ceilings.copy_bytes_per_second},
                                 {"share_of_ceiling", number_or_null(share, share > 0)},
                                 {"workspace_bytes", pass.workspace_bytes},
                                 {"plan_seconds", pass.plan_seconds},
                                 {"copies", measurement.copies},
                                 {"error", error},
                                 {"inputs", inputs},
                                 {"options", options},
                                 {"repeat", repeat}});
  }
}

std::string copy_text(const Json& report) {
  const double most = report["ceilings"]["copy_bytes_per_second"];
  double least = most;
  for (const Json& record : report["results"]) {
    least = std::min(least, record["copy_bytes_per_second"].get<double>());
  }
  if (most < 1.1 * least) return bandwidth_text(most);
  return fmt::format("{} to {}", bandwidth_text(least), bandwidth_text(most));
}

std::string heading_text(const Json& report) {
  const Json& machine = report["machine"];
  const Json& ceilings = report["ceilings"];
  std::string products = "no matrix product ceiling: " + ceilings["blas"].get<std::string>();
  if (!ceilings["f32_flops_per_second"].is_null()) {
    products =
        fmt::format("matrix product f32 {}, f64 {}", flops_text(ceilings["f32_flops_per_second"]),
                    flops_text(ceilings["f64_flops_per_second"]));
  }
  if (!report["gpu"].is_null()) {
    const Json& gpu = report["gpu"];
    const Json& half = ceilings["bf16_flops_per_second"];
    if (!half.is_null()) products += ", bf16 " + flops_text(half);
    return fmt::format("{} ({}), {} multiprocessors, CUDA {}\nceilings: copy {}, {}\n",
                       gpu["name"].get<std::string>(), gpu["arch"].get<std::string>(),
                       gpu["multiprocessors"].get<int>(), gpu["cuda"].get<std::string>(),
                       copy_text(report), products);
  }
  std::string isa = machine["simd"];
  for (const auto& extra : machine["isa"]) isa += ", " + extra.get<std::string>();
  return fmt::format("{}, {} threads, {}\nceilings: copy {} ({}), {}\n",
                     machine["cpu"].get<std::string>(), report["threads"].get<int>(), isa,
                     copy_text(report), ceilings["copy_method"].get<std::string>(), products);
}

std::string table_text(const Json& report) {
  Table table({{"op"},
               {"case"},
               {"dtype"},
               {"pass"},
               {"time", true},
               {"p20–p80", true},
               {"rate", true},
               {"of ceiling", true},
               {"error", true},
               {"workspace", true}});
  const bool on_gpu = !report["gpu"].is_null();
  if (on_gpu) table.add_column({"host", true});
  for (const Json& record : report["results"]) {
    const Json& seconds = record["seconds"];
    const Json& share = record["share_of_ceiling"];
    std::vector<std::string> row = {
        record["op"],
        record["case"],
        record["dtype"],
        record["pass"],
        time_text(seconds["median"]),
        fmt::format("{}–{}", time_text(seconds["p20"]), time_text(seconds["p80"])),
        rate_text(record),
        share.is_null() ? "—" : percent_text(share),
        error_cell(record),
        bytes_text(record["workspace_bytes"])};
    if (on_gpu) row.push_back(time_text(seconds["host"]));
    table.add(std::move(row));
  }
  return table.text();
}

void ReportFiles::add_to(CLI::App& app) {
  app.add_option("--json", json, "write the results, for pullback compare")
      ->check(some_path)
      ->type_name("FILE");
  app.add_option("--html", html, "write one page with tables and plots")
      ->check(some_path)
      ->type_name("FILE");
}

void ReportFiles::check() const {
  for (const std::string& path : {json, html}) {
    if (!path.empty()) driver::check_output_file(path);
  }
  if (!json.empty() && json == html) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--html: expected another file than --json, got {}",
                            driver::printable(html, 400)));
  }
}

void ReportFiles::save(const Json& report) const {
  if (!json.empty()) write_text_file(json, report.dump(1) + "\n");
  if (!html.empty()) write_text_file(html, html_of(report));
}

}  // namespace pullback::tool
