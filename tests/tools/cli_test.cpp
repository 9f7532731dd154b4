// The other commands: check, bench, compare, doctor, demo, and help everywhere.
#include <pty.h>
#include <sys/stat.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tools/run_tool.hpp"

namespace pullback::testing {
namespace {

using Json = nlohmann::json;
using Names = std::vector<std::string>;

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

class Cli : public ToolTest {
 protected:
  Result toy(const Names& arguments) const { return run(TOY_TOOL, arguments); }
  // One JSON report of the toy op, made once for all tests: it measures the ceilings.
  const Json& report() const {
    static const Json json = [this] {
      const Result done =
          toy({"bench", "--quick", "--seconds", "0.01", "--threads", "1", "--filter", "small",
               "--json", path("r.json"), "--html", path("r.html")});
      EXPECT_EQ(done.status, 0) << done.err;
      EXPECT_TRUE(has(done.out, "ceilings: copy"));
      html() = content(path("r.html"));
      return Json::parse(content(path("r.json")));
    }();
    return json;
  }
  static std::string& html() {
    static std::string text;
    return text;
  }
  std::string save(const std::string& name, const Json& json) const {
    std::ofstream(path(name)) << json.dump();
    return path(name);
  }
};

TEST_F(Cli, help_is_everywhere) {
  for (const Names& command : {Names{},
                               {"doctor"},
                               {"grad"},
                               {"grad", "toy"},
                               {"check"},
                               {"bench"},
                               {"compare"},
                               {"demo"}}) {
    Names arguments = command;
    arguments.push_back("--help");
    const Result help = toy(arguments);
    EXPECT_EQ(help.status, 0);
    EXPECT_TRUE(has(help.out, "Usage: pullback")) << help.out;
    EXPECT_EQ(help.err, "");
  }
  const std::string help = toy({"grad", "toy", "--help"}).out;
  for (const char* part : {"--scale X", "--window L,R", "d_y", "--verify", "--threads"}) {
    EXPECT_TRUE(has(help, part)) << part;
  }
}

TEST_F(Cli, version_is_the_projects) {
  const Result version = run(PULLBACK_TOOL, {"--version"});
  EXPECT_EQ(version.status, 0);
  EXPECT_TRUE(version.out.starts_with("pullback ") && std::isdigit(version.out[9])) << version.out;
}

TEST_F(Cli, doctor_names_the_machine_and_what_runs) {
  const Result doctor = toy({"doctor", "--verbose"});
  EXPECT_EQ(doctor.status, 0);
  for (const char* part : {"CPU ", "SIMD", "last-level cache", "CUDA  ", "NVRTC  ", "kernel cache",
                           "toy  bf16", "plain loops"}) {
    EXPECT_TRUE(has(doctor.out, part)) << part;
  }
  EXPECT_EQ(run(PULLBACK_TOOL, {"doctor"}).status, 0);
}

TEST_F(Cli, doctor_tells_why_nothing_would_run) {
  const Environment forced("PULLBACK_FORCE_VARIANT", "no_such");
  const Result doctor = run(PULLBACK_TOOL, {"doctor"});
  EXPECT_EQ(doctor.status, 0);
  EXPECT_TRUE(has(doctor.out, "textbook, got no_such; unset PULLBACK_FORCE_VARIANT\n"))
      << doctor.out;
}

TEST_F(Cli, doctor_tells_why_a_compiler_does_not_load) {
  std::ofstream(path("libnvrtc.so.13")) << "no library";
  const Environment chosen("PULLBACK_NVRTC", path("").c_str());
  const Result doctor = run(PULLBACK_TOOL, {"doctor"});
  EXPECT_EQ(doctor.status, 0);
  EXPECT_TRUE(has(doctor.out, "libnvrtc.so.13: file too short")) << doctor.out;
}

TEST_F(Cli, the_cache_of_kernels_is_listed_verified_and_cleared) {
  const Environment folder("PULLBACK_CACHE_DIR", path("cache").c_str());
  EXPECT_TRUE(has(toy({"cache"}).out, "0 damaged"));
  std::filesystem::create_directory(path("cache"));
  const std::string entry = path("cache/0123456789abcdef0123456789abcdef.pbk");
  std::ofstream{entry} << "not an entry";
  // Of others, who may use the folder, too.
  std::ofstream(path("cache/theirs.pbk")) << "kept";
  std::ofstream(path("cache/theirs.tmp-1")) << "kept";
  std::filesystem::create_directory(entry + ".tmp-folder");
  ASSERT_EQ(::mkfifo(path("cache/f123456789abcdef0123456789abcdef.pbk").c_str(), 0600), 0);
  EXPECT_TRUE(has(toy({"cache", "list"}).out, "1 damaged"));
  const Result verify = toy({"cache", "verify"});
  EXPECT_EQ(verify.status, 1);
  EXPECT_TRUE(has(verify.out, "0 sound, 1 damaged, 1 files removed")) << verify.out;
  EXPECT_EQ(toy({"cache", "verify"}).status, 0);
  EXPECT_TRUE(has(toy({"cache", "clear"}).out, "0 files removed"));
  const std::filesystem::directory_iterator left(path("cache"));
  EXPECT_EQ(std::distance(begin(left), end(left)), 4);
  const Environment read_only("PULLBACK_CACHE", "ro");
  EXPECT_EQ(toy({"cache", "clear"}).status, 2);
  EXPECT_EQ(toy({"cache", "burn"}).status, 2);
}

TEST_F(Cli, compile_refuses_what_it_cannot_do) {
  const Environment folder("PULLBACK_CACHE_DIR", path("cache").c_str());
  const Environment nvrtc("PULLBACK_NVRTC", path("none").c_str());
  EXPECT_EQ(toy({"compile", "--arch", "sm_12"}).status, 2);
  const Result missing = toy({"compile", "--arch", "sm_90,80"});
  EXPECT_EQ(missing.status, 3);
  EXPECT_TRUE(has(missing.err, "NVRTC was not found")) << missing.err;
}

TEST_F(Cli, check_passes_what_is_right) {
  const Result check = toy({"check", "toy", "--fuzz", "3", "--cases", "full", "--seed", "5"});
  EXPECT_EQ(check.status, 0) << check.out;
  EXPECT_TRUE(has(check.out, "toy     11      11")) << check.out;  // 2 cases, 4 dtypes, 3 fuzzed
}

TEST_F(Cli, check_reports_what_is_wrong_and_how_to_repeat_it) {
  const Environment fault("TOY_FAULT", "wrong-output");
  const Result check = toy({"check", "--fuzz", "1", "--filter", "scaled", "--threads", "2"});
  EXPECT_EQ(check.status, 1);
  EXPECT_TRUE(has(check.out, "FAILED toy 'scaled' f32 seed 1: y: error 1 exceeds")) << check.out;
  const std::string repeat = "check toy --cases quick --seed 1 --fuzz 0 --filter 'scaled'";
  EXPECT_TRUE(has(check.out, "repeat: pullback " + repeat + " --threads 2")) << check.out;
  EXPECT_TRUE(has(check.out, "repeat: pullback check toy --fuzz-seed 1000003")) << check.out;
  EXPECT_EQ(toy({"check", "toy", "--fuzz-seed", "1000003"}).status, 1);
}

TEST_F(Cli, seeds_have_64_bits) {
  EXPECT_EQ(toy({"check", "--fuzz", "0", "--seed", "18446744073709551615"}).status, 0);
  for (const char* seed : {"-1", "18446744073709551616", "1.5", ""}) {
    EXPECT_EQ(toy({"check", "--fuzz", "0", "--seed", seed}).status, 2) << seed;
    EXPECT_EQ(toy({"check", "--fuzz-seed", seed}).status, 2) << seed;
    EXPECT_EQ(toy({"bench", "--seed", seed}).status, 2) << seed;
  }
}

TEST_F(Cli, nothing_behind_an_equals_sign_is_an_empty_value) {
  const Result filter = toy({"check", "--fuzz=0", "--filter=", "--cases=quick"});
  EXPECT_EQ(filter.status, 0) << filter.err;
  EXPECT_TRUE(has(filter.out, "toy      8       8")) << filter.out;
}

TEST_F(Cli, the_seed_0_is_one_like_others) {
  const Result check = toy({"check", "toy", "--fuzz-seed", "0"});
  EXPECT_TRUE(has(check.out, "toy      1       1")) << check.out;
}

TEST_F(Cli, progress_stays_on_a_line_of_the_terminal) {
  const winsize size{24, 40, 0, 0};
  int terminal, end;
  char name[64];
  ASSERT_EQ(::openpty(&terminal, &end, name, nullptr, &size), 0);
  const std::string tool = TOY_TOOL;
  EXPECT_EQ(run("/bin/sh", {"-c", tool + " check --fuzz 0 2>" + name}).status, 0);
  char bytes[4096];
  const auto count = ::read(terminal, bytes, sizeof(bytes));
  ASSERT_GT(count, 0);
  ::close(terminal);
  ::close(end);
  std::istringstream lines(std::string(bytes, static_cast<std::size_t>(count)));
  for (std::string line; std::getline(lines, line, '\r');) {
    if (line.starts_with("\x1b[K")) line.erase(0, 3);
    EXPECT_LE(std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xc0) != 0x80; }),
              39)
        << line;
  }
}

TEST_F(Cli, commands_to_repeat_have_the_variant) {
  const Environment fault("TOY_FAULT", "wrong-output");
  const Result check = toy({"check", "--fuzz", "0", "--variant", "cpu", "--threads", "2"});
  EXPECT_TRUE(has(check.out, "--threads 2 --variant 'cpu'")) << check.out;
}

TEST_F(Cli, output_that_cannot_be_written_is_a_failure) {
  const Result doctor =
      run("/bin/sh", {"-c", "exec " + std::string(TOY_TOOL) + " doctor >/dev/full"});
  EXPECT_EQ(doctor.status, 3);
  EXPECT_EQ(doctor.err, "pullback: cannot write to standard output: No space left on device\n");
}

TEST_F(Cli, failures_are_told_by_the_status_where_nobody_can_read_them) {
  for (const char* closed : {"2>/dev/full", "2>&-"}) {
    const std::string tool = TOY_TOOL;
    EXPECT_EQ(run("/bin/sh", {"-c", "exec " + tool + " frobnicate " + closed}).status, 2);
    EXPECT_EQ(run("/bin/sh", {"-c", "exec " + tool + " doctor --no " + closed}).status, 2);
  }
}

TEST_F(Cli, a_case_that_throws_is_a_failure) {
  const Environment fault("TOY_FAULT", "refused");
  const Result check = toy({"check", "--fuzz", "0"});
  EXPECT_EQ(check.status, 1);
  EXPECT_TRUE(has(check.out, "no variant serves"));
}

TEST_F(Cli, a_system_that_fails_is_no_failed_check) {
  const Environment fault("TOY_FAULT", "system");
  const Result check = toy({"check", "--fuzz", "0"});
  EXPECT_EQ(check.status, 3);
  EXPECT_TRUE(has(check.err, "no such device"));
}

// NVRTC beside the tool, not beside whoever starts it.
TEST_F(Cli, nothing_is_looked_for_in_the_working_folder) {
  std::filesystem::create_directories(path("nvidia/cu13/lib"));
  std::filesystem::create_directories(path("bin"));
  std::filesystem::create_symlink(TOY_TOOL, path("bin/pullback-toy"));
  std::ofstream(path("nvidia/cu13/lib/libnvrtc.so.13")) << "no library";
  const Environment chosen("PULLBACK_NVRTC", "");
  const Result doctor = run("/bin/sh", {"-c", "cd " + folder_.string() + " && PATH=" + path("bin") +
                                                  ":$PATH pullback-toy doctor"});
  EXPECT_EQ(doctor.status, 0) << doctor.err;
  EXPECT_TRUE(has(doctor.out, "NVRTC  "));
  EXPECT_FALSE(has(doctor.out, "nvidia/cu13")) << doctor.out;
}

TEST_F(Cli, bad_usage_of_the_other_commands) {
  for (const Names& arguments : {Names{"check", "no_op"},
                                 {"check", "--cases", "some"},
                                 {"check", "--filter", "nothing has this"},
                                 {"check", "--fuzz", "-1"},
                                 {"bench", "no_op"},
                                 {"bench", "--filter", "nothing has this"},
                                 {"bench", "--dtype", "f8"},
                                 {"bench", "--seconds", "0"},
                                 {"compare"},
                                 {"bench", "--seconds", "nan"},
                                 {"compare", "a.json"},
                                 {"compare", "a.json", "b.json", "--threshold", "nan"},
                                 {"compile", "--match", "nothing has this"},
                                 {"compile", "--match", "^segment_starts", "--output", ""},
                                 {"bench", "--json", ""},
                                 {"bench", "--json", path("same"), "--html", path("same")},
                                 {"demo"},
                                 {"doctor", "stray"}}) {
    const Result bad = toy(arguments);
    EXPECT_EQ(bad.status, 2) << arguments.front() << " " << bad.err;
    EXPECT_EQ(std::count(bad.err.begin(), bad.err.end(), '\n'), 1) << bad.err;
  }
  EXPECT_EQ(toy({"check", "--device", "cuda"}).status, 3);
  EXPECT_EQ(toy({"bench", "--device", "cuda"}).status, 3);
  EXPECT_EQ(toy({"bench", "--json", path("no/such/file")}).status, 3);
  EXPECT_EQ(files(), Names{});
}

TEST_F(Cli, bench_writes_every_field_of_the_schema) {
  const Json& json = report();
  EXPECT_EQ(json.at("schema"), 1);
  EXPECT_EQ(json.at("threads"), 1);
  EXPECT_GT(json.at("ceilings").at("copy_bytes_per_second"), 1e8);
  for (const char* key : {"cpu", "cores", "simd", "isa", "last_level_cache_bytes", "compiler"}) {
    EXPECT_TRUE(json.at("machine").contains(key)) << key;
  }
  ASSERT_EQ(json.at("results").size(), 8u);  // 4 dtypes, forward and backward
  for (const Json& record : json.at("results")) {
    EXPECT_EQ(record.at("op"), "toy");
    EXPECT_EQ(record.at("case"), "small");
    EXPECT_EQ(record.at("variant"), "cpu");
    const Json& seconds = record.at("seconds");
    EXPECT_GT(seconds.at("p20"), 0);
    EXPECT_LE(seconds.at("p20"), seconds.at("median"));
    EXPECT_LE(seconds.at("median"), seconds.at("p80"));
    EXPECT_GE(seconds.at("runs"), 5);
    EXPECT_EQ(record.at("error").at("against"), "reference");
    EXPECT_LT(record.at("error").at("relative"), 0.01);
    EXPECT_TRUE(has(record.at("repeat"), "pullback bench toy --dtype "));
    EXPECT_GE(record.at("copies"), 1);
    EXPECT_EQ(record.at("inputs").size(), 2u);
  }
  EXPECT_EQ(json.at("results")[0].at("pass"), "forward");
  EXPECT_EQ(json.at("results")[1].at("pass"), "backward");
}

TEST_F(Cli, the_page_needs_nothing_else) {
  report();
  EXPECT_TRUE(html().starts_with("<!doctype html>"));
  EXPECT_TRUE(has(html(), "<svg"));
  EXPECT_TRUE(has(html(), "prefers-color-scheme: dark"));
  for (const char* part : {"http:", "https:", "<script", "<link", "@import", "url("}) {
    EXPECT_FALSE(has(html(), part)) << part;
  }
}

TEST_F(Cli, an_old_report_survives_a_failed_write) {
  const std::string report = path("report.json");
  std::ofstream(report) << "kept";
  const Result bench =
      run(TOY_TOOL,
          {"bench", "--quick", "--seconds", "0.001", "--filter", "small", "--json", report}, 8);
  EXPECT_EQ(bench.status, 3) << bench.err;
  EXPECT_EQ(content(report), "kept");
  EXPECT_EQ(files(), std::vector<std::string>{"report.json"});
}

TEST_F(Cli, bench_fails_when_results_are_wrong) {
  const Environment fault("TOY_FAULT", "wrong-gradient");
  const Result bench =
      toy({"bench", "--quick", "--seconds", "0.001", "--dtype", "f32", "--filter", "small"});
  EXPECT_EQ(bench.status, 1);
  EXPECT_TRUE(has(bench.out, "FAILED toy 'small' f32: d_x: error")) << bench.out;
}

TEST_F(Cli, bench_fails_when_large_results_are_grossly_wrong) {
  const Environment fault("TOY_FAULT", "wrong-in-f32");
  const Result bench = toy({"bench", "--quick", "--seconds", "0.001", "--filter", "large"});
  EXPECT_EQ(bench.status, 1);
  EXPECT_TRUE(has(bench.out, "FAILED toy 'large' f32: y: off by")) << bench.out;
}

// The report with every time multiplied, and the spread around the medians.
Json scaled(Json json, double factor, double spread) {
  for (Json& record : json["results"]) {
    Json& seconds = record["seconds"];
    const double median = seconds["median"].get<double>() * factor;
    seconds = {{"median", median}, {"p20", median * (1 - spread)}, {"p80", median * (1 + spread)}};
  }
  return json;
}

TEST_F(Cli, compare_finds_what_became_slower_beyond_noise) {
  const std::string before = save("before", scaled(report(), 1, 0.01));
  const auto compare = [&](double factor, double spread, Names more = {}) {
    Names arguments{"compare", before, save("after", scaled(report(), factor, spread))};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return toy(arguments);
  };
  EXPECT_EQ(compare(1, 0.01).status, 0);
  const Result slower = compare(1.2, 0.01);
  EXPECT_EQ(slower.status, 1);
  EXPECT_TRUE(has(slower.out, "1.200  SLOWER")) << slower.out;
  EXPECT_TRUE(has(slower.out, "8 slower, 0 faster, 0 the same"));
  EXPECT_EQ(compare(1.2, 0.3).status, 0) << "spreads overlap";
  EXPECT_EQ(compare(1.04, 0.001).status, 0) << "below the threshold";
  EXPECT_EQ(compare(1.04, 0.001, {"--threshold", "0.02"}).status, 1);
  const Result faster = compare(0.5, 0.01);
  EXPECT_EQ(faster.status, 0);
  EXPECT_TRUE(has(faster.out, "0 slower, 8 faster"));
}

TEST_F(Cli, compare_names_what_is_in_one_file_only) {
  Json less = report();
  less["results"].erase(0);
  const Result result = toy({"compare", save("a", report()), save("b", less)});
  EXPECT_EQ(result.status, 0);
  EXPECT_TRUE(has(result.out, "only before"));
  EXPECT_TRUE(has(result.out, "1 in one file only"));
}

TEST_F(Cli, compare_refuses_other_files) {
  const std::string good = save("good", report());
  Json other = report();
  other["schema"] = 99;
  Json fraction = report();
  fraction["schema"] = 1.5;
  Json wrong = report();
  wrong["results"][0].erase("seconds");
  Json nothing = report();
  nothing["results"] = nullptr;
  Json empty = report();
  empty["results"].clear();
  Json twice = report();
  twice["results"].push_back(twice["results"][0]);
  std::ofstream(path("text")) << "no json";
  std::ofstream(path("nothing at all"));
  std::ofstream(path("deep")) << R"({"schema":)" << std::string(1000000, '[')
                              << std::string(1000000, ']') << "}";
  for (const std::string& bad :
       {save("schema", other), save("fraction", fraction), save("wrong", wrong),
        save("nothing", nothing), save("empty", empty), save("twice", twice), save("list", {1, 2}),
        path("text"), path("nothing at all"), path("deep"), path("missing"), folder_.string()}) {
    const Result result = toy({"compare", good, bad});
    EXPECT_EQ(result.status, 2) << bad;
    EXPECT_TRUE(has(result.err, bad)) << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  }
}

TEST_F(Cli, demo_verifies_the_example_tensors) {
  const std::string ops = run(PULLBACK_TOOL, {"grad", "--help"}).out;
  for (const char* op : {"attention", "block_softmax", "entmax", "segment"}) {
    if (!has(ops, op)) GTEST_SKIP() << "this build has no " << op;
  }
  if (!std::filesystem::exists(EXAMPLE_DATA)) GTEST_SKIP() << "no " << EXAMPLE_DATA;
  const Result demo = run(PULLBACK_TOOL, {"demo", EXAMPLE_DATA, "--html", path("demo.html")});
  EXPECT_EQ(demo.status, 0) << demo.out << demo.err;
  EXPECT_TRUE(has(demo.out, "Every output and gradient agrees with the f64 reference."));
  EXPECT_TRUE(has(content(path("demo.html")), "block_softmax"));
}

}  // namespace
}  // namespace pullback::testing
