#include "cuda/compiler.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "cuda/device_sources.hpp"
#include "cuda/nvrtc.hpp"
#include "pullback/error.hpp"
#include "support/environment.hpp"
#include "support/message_of.hpp"
#include "support/temporary_folder.hpp"

namespace pullback::cuda {
namespace {

class CompilerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string problem = nvrtc_problem(); !problem.empty()) GTEST_SKIP() << problem;
  }

  static KernelSource kernel(const std::string& name, const std::string& body) {
    return {.name = name,
            .entry = "kernel",
            .source =
                "#include \"device/types.cuh\"\nextern \"C\" __global__ void kernel(uint32_t* to)"
                " {" +
                body + "}\n"};
  }

  const TemporaryFolder folder_;
  Environment cache_folder_{"PULLBACK_CACHE_DIR", folder_.path().c_str()};
  Environment jit_{"PULLBACK_JIT", nullptr};
};

TEST_F(CompilerTest, embedded_headers_are_found_and_the_assembler_reports) {
  const Report report = compile_with_report(kernel("fill", "to[threadIdx.x] = 1;"));
  EXPECT_GT(report.cubin->size(), 500u);
  EXPECT_GT(report.resources.registers, 0);
  EXPECT_EQ(report.resources.spill_store_bytes, 0);
}

TEST_F(CompilerTest, a_failure_says_everything_and_is_remembered) {
  const KernelSource broken = kernel("broken", "to = undefined_name;");
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      compiled(broken);
      FAIL() << "compiled";
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(error.code(), ErrorCode::device);
      for (const char* part :
           {"broken", "sm_90", "undefined_name", "NVRTC", "--gpu-architecture"}) {
        EXPECT_NE(message.find(part), std::string::npos) << part << " missing in: " << message;
      }
    }
  }
}

TEST_F(CompilerTest, what_the_caller_can_change_is_not_remembered) {
  const KernelSource source = kernel("later", "to[threadIdx.x] = 5;");
  jit_.set("off");
  EXPECT_THROW(compiled(source), Error);
  jit_.set(nullptr);
  EXPECT_GT(compiled(source)->size(), 500u);
}

TEST_F(CompilerTest, threads_share_one_compilation) {
  const KernelSource source = kernel("shared", "to[threadIdx.x] = 2;");
  std::vector<std::thread> threads;
  std::vector<std::shared_ptr<const Cubin>> cubins(8);
  for (std::size_t i = 0; i < cubins.size(); ++i) {
    threads.emplace_back([&, i] { cubins[i] = compiled(source); });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& cubin : cubins) EXPECT_EQ(cubin, cubins[0]);
}

TEST_F(CompilerTest, a_folder_filled_ahead_needs_no_compiler) {
  const KernelSource source = kernel("ahead", "to[threadIdx.x] = 4;");
  const DiskCache cache(folder_.path(), DiskCache::Mode::read_write);
  EXPECT_TRUE(precompile(source, cache));
  EXPECT_FALSE(precompile(source, cache));
  jit_.set("off");
  EXPECT_GT(compiled(source)->size(), 500u);
  const DiskCache other(folder_.path() / "other", DiskCache::Mode::read_write);
  EXPECT_FALSE(precompile(source, other));  // what the environment's cache has
  EXPECT_TRUE(other.read(key_text(source)));
}

TEST_F(CompilerTest, a_cache_that_cannot_be_written_is_no_hindrance) {
  cache_folder_.set("/proc/pullback");
  EXPECT_GT(compiled(kernel("uncached", "to[threadIdx.x] = 5;"))->size(), 500u);
}

TEST_F(CompilerTest, without_compiling_the_missing_kernel_is_named) {
  jit_.set("off");
  try {
    compiled(kernel("never_built", "to[threadIdx.x] = 3;"));
    FAIL() << "compiled";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("never_built"), std::string::npos) << error.what();
  }
  jit_.set("0");
  EXPECT_EQ(message_of([] { compiled(kernel("never_built_either", "to[threadIdx.x] = 4;")); }),
            "CUDA: PULLBACK_JIT: expected on or off, got '0'");
}

TEST(KernelKey, holds_what_matters_and_no_path) {
  KernelSource a{.name = "n", .entry = "e", .source = "s"};
  KernelSource b = a;
  b.arch_specific = true;
  EXPECT_NE(key_text(a), key_text(b));
  b = a;
  b.source.push_back('t');
  EXPECT_NE(key_text(a), key_text(b));
  EXPECT_EQ(key_text(a), key_text(KernelSource(a)));
  EXPECT_EQ(key_text(a).find(std::filesystem::current_path().string()), std::string::npos);
}

TEST(KernelKey, changes_with_what_the_kernel_includes_and_nothing_else) {
  const auto hash = [](std::string_view a, std::string_view b, std::string_view c) {
    const Header headers[] = {{"a", a}, {"b", b}, {"c", c}};
    return header_hash(headers, "a");
  };
  const std::string before = hash("#include \"b\"\nint x;", "#include \"a\"", "");
  EXPECT_EQ(before, hash("#include \"b\"\nint x;", "#include \"a\"", "int y;"));
  EXPECT_NE(before, hash("#include \"b\"\nint z;", "#include \"a\"", ""));
  EXPECT_NE(before, hash("#include \"b\"\nint x;", "#include \"a\" int y;", ""));

  const std::string types = "#include \"device/types.cuh\"\n",
                    warp = "#include \"device/warp.cuh\"\n";
  EXPECT_EQ(device_sources_hash(types), device_sources_hash("int a;\n" + types + "int b;\n"));
  EXPECT_NE(device_sources_hash(types), device_sources_hash(warp));
  EXPECT_NE(device_sources_hash(types), device_sources_hash(types + warp));
  EXPECT_NE(device_sources_hash(types), device_sources_hash(""));
}

}  // namespace
}  // namespace pullback::cuda
