// Loading kernels: whatever lies in the cache, and whatever else the process is doing.
#include "cuda/kernel.hpp"

#include "cuda/compiler.hpp"
#include "cuda/on_device.hpp"
#include "pullback/error.hpp"
#include "support/environment.hpp"
#include "support/temporary_folder.hpp"

namespace pullback::cuda {
namespace {

class KernelTest : public OnDeviceToolkit {
 protected:
  static KernelSource source(const std::string& name) {
    return op_kernel({.name = "test_" + name,
                      .file = "device/tensor_map.cuh",
                      .function = "[](const auto&) {}",
                      .parameters = "device::TensorMap",
                      .threads = 32},
                     compile_arch(device_info(0)), sizeof(device::TensorMap));
  }

  const TemporaryFolder folder_;
  const Environment cache_{"PULLBACK_CACHE_DIR", folder_.path().c_str()};
};

TEST_F(KernelTest, machine_code_that_does_not_load_is_replaced) {
  const KernelSource kernel = source("replaced");
  const DiskCache cache(folder_.path(), DiskCache::Mode::read_write);
  const std::vector<char> of_another_world(1000);
  std::string reason;
  ASSERT_TRUE(cache.write(key_text(kernel), of_another_world, reason)) << reason;
  EXPECT_NE(Kernel::load(kernel, device_info(0))->function(), nullptr);
  const auto now = cache.read(key_text(kernel));
  ASSERT_TRUE(now);
  EXPECT_NE(*now, of_another_world);
}

TEST_F(KernelTest, that_it_does_not_load_is_told_where_nothing_may_be_compiled) {
  const KernelSource kernel = source("not_replaced");
  std::string reason;
  ASSERT_TRUE(DiskCache(folder_.path(), DiskCache::Mode::read_write)
                  .write(key_text(kernel), std::vector<char>(1000), reason))
      << reason;
  const Environment no_compiler("PULLBACK_JIT", "off");
  try {
    Kernel::load(kernel, device_info(0));
    ADD_FAILURE() << "loaded";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("loading test_not_replaced for sm_"),
              std::string::npos)
        << error.what();
  }
}

TEST_F(KernelTest, loading_does_not_end_the_capture_of_a_stream) {
  const DeviceInfo& device = device_info(0);
  const DeviceGuard guard(device);
  const OwnStream stream(device);
  constexpr int kGlobal = 0;
  check(driver().cuStreamBeginCapture(stream.get(), kGlobal), "cuStreamBeginCapture");
  EXPECT_NE(Kernel::load(source("captured"), device)->function(), nullptr);
  const std::vector<std::byte> table(1000);
  EXPECT_NE(DeviceMemory(device, table).data(), nullptr);
  CUgraph graph = nullptr;
  check(driver().cuStreamEndCapture(stream.get(), &graph), "cuStreamEndCapture");
  ASSERT_NE(graph, nullptr);
  driver().cuGraphDestroy(graph);
}

}  // namespace
}  // namespace pullback::cuda
