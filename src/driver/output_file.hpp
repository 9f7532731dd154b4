// Files that are written whole or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace pullback::driver {

// Fails as OutputFile would for reasons that can be known beforehand.
void check_output_file(const std::string& path);

// A temporary file in the folder of `path` that takes its name on commit(), or goes away. So `path`
// is never half written, and may be a file that is mapped. Throws Error(device) when the system
// refuses.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, std::size_t bytes) const;
  void commit();

 private:
  std::filesystem::path target_, temporary_;
  int descriptor_ = -1;
};

}  // namespace pullback::driver
