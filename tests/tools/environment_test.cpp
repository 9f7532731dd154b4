// What the command line makes of environment variables and of the compiler it finds, with a driver
// and a compiler that compute nothing (fake_cuda.c).
#include <algorithm>

#include "tools/run_tool.hpp"

#ifdef FAKE_CUDA

namespace pullback::testing {
namespace {

namespace fs = std::filesystem;

class ToolEnvironment : public ToolTest {
 protected:
  static bool has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }
  // The folder, with the compiler in it.
  std::string with_compiler(const std::string& name) const {
    fs::create_directories(path(name));
    fs::create_symlink(FAKE_CUDA "/libnvrtc.so.13", path(name + "/libnvrtc.so.13"));
    return path(name);
  }
  Result compile(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"compile", "--arch", "sm_90", "--match",
                                          "^segment_starts"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(PULLBACK_TOOL, arguments);
  }
  Result grad() const {
    return run("/bin/sh", {"-c", "LD_LIBRARY_PATH=" FAKE_CUDA " exec " PULLBACK_TOOL
                                 " grad segment --device cuda --reduce sum --input " EXAMPLE_DATA
                                 "/segment.safetensors --output " +
                                     path("out.safetensors")});
  }
};

TEST_F(ToolEnvironment, the_compiler_is_found_in_toolkits) {
  const Environment chosen("PULLBACK_NVRTC", "");
  if (!has(run(TOY_TOOL, {"doctor"}).out, "NVRTC             none")) {
    GTEST_SKIP() << "this machine has one that comes first";
  }
  const std::string folder = with_compiler("toolkit/lib64");
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    const Environment toolkit(variable, path("toolkit").c_str());
    const Result doctor = run(TOY_TOOL, {"doctor"});
    EXPECT_TRUE(has(doctor.out, folder)) << variable << "\n" << doctor.out;
  }
}

TEST_F(ToolEnvironment, the_compiler_is_found_in_wheels_beside_the_program) {
  const Environment chosen("PULLBACK_NVRTC", "");
  if (!has(run(TOY_TOOL, {"doctor"}).out, "NVRTC             none")) {
    GTEST_SKIP() << "this machine has one that comes first";
  }
  fs::create_directories(path("site/pullback/bin"));
  const std::string tool = path("site/pullback/bin/tool");
  fs::copy_file(TOY_TOOL, tool);
  for (const char* wheel : {"site/nvidia/cuda_nvrtc/lib", "site/nvidia/cu13/lib"}) {
    const std::string folder = with_compiler(wheel);
    const Result doctor = run(tool, {"doctor"});
    EXPECT_TRUE(has(doctor.out, folder)) << doctor.out;
  }
}

TEST_F(ToolEnvironment, what_is_compiled_can_be_looked_at) {
  const Environment compiler("PULLBACK_NVRTC", FAKE_CUDA);
  fs::create_directories(path("dump"));
  {
    const Environment dump("PULLBACK_JIT_DUMP", path("dump").c_str());
    const Result done = compile({"--output", path("kernels")});
    EXPECT_EQ(done.status, 0);
    EXPECT_EQ(done.err, "");
  }
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(path("dump"))) {
    names.push_back(entry.path().filename().string());
    EXPECT_GT(fs::file_size(entry), 0U) << entry.path();
  }
  const auto ends = [&](std::string_view end) {
    return std::ranges::count_if(names, [&](const auto& name) { return name.ends_with(end); });
  };
  EXPECT_GT(ends(".sm_90.cu"), 0);
  EXPECT_EQ(ends(".sm_90.cu"), ends(".sm_90.cubin"));

  const Environment dump("PULLBACK_JIT_DUMP", path("missing").c_str());
  const Result warned = compile({"--output", path("more kernels")});
  EXPECT_EQ(warned.status, 0);
  EXPECT_TRUE(has(warned.err, "pullback: warning: CUDA: PULLBACK_JIT_DUMP: cannot write"))
      << warned.err;
}

TEST_F(ToolEnvironment, a_cache_that_cannot_be_written_is_told) {
  const Environment compiler("PULLBACK_NVRTC", FAKE_CUDA);
  // Not even root can make a folder there.
  const Environment cache("PULLBACK_CACHE_DIR", "/proc/pullback");
  const Result done = grad();
  EXPECT_EQ(done.status, 0) << done.err;
  EXPECT_TRUE(has(done.err, "pullback: warning: CUDA: kernel cache: cannot create /proc/pullback"))
      << done.err;
}

TEST_F(ToolEnvironment, a_misspelt_choice_is_refused_even_where_nothing_hangs_on_it) {
  const Environment compiler("PULLBACK_NVRTC", FAKE_CUDA);
  const Environment cache("PULLBACK_CACHE_DIR", path("cache").c_str());
  ASSERT_EQ(grad().status, 0);  // its kernels are in the cache now
  const Environment choice("PULLBACK_JIT", "no");
  const Result refused = grad();
  EXPECT_EQ(refused.status, 2);
  EXPECT_EQ(refused.err, "pullback: CUDA: PULLBACK_JIT: expected on or off, got 'no'\n");
}

}  // namespace
}  // namespace pullback::testing

#endif
