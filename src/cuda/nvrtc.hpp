// NVRTC, opened at run time: CUDA C++ in memory to machine code. Needs no GPU and no toolkit.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pullback::cuda {

struct Header {
  std::string_view name, text;
};

struct Compilation {
  bool ok = false;
  std::vector<char> cubin;
  std::string log;
};

class Nvrtc {
 public:
  // PULLBACK_NVRTC, a library or a folder, alone if it is set. Else found in this order: the
  // loader's path, Python wheels beside this library, CUDA_HOME, CUDA_PATH and /usr/local/cuda.
  // Throws Error(device) listing where it looked.
  static const Nvrtc& instance();

  const std::string& path() const { return path_; }
  int version() const { return version_; }  // 13000 for 13.0
  bool supports(int arch) const;            // 90 for sm_90

  // One translation unit; `headers` are found by their names. Thread-safe.
  Compilation compile(const std::string& source, const char* program_name,
                      std::span<const Header> headers, std::span<const std::string> options) const;

 private:
  Nvrtc();

  struct Functions;
  const Functions* functions_ = nullptr;
  std::string path_;
  int version_ = 0;
  std::vector<int> archs_;
};

// Empty when Nvrtc::instance() works; else the reason.
std::string nvrtc_problem();

}  // namespace pullback::cuda
