#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "driver/safetensors.hpp"
#include "pullback/error.hpp"

namespace pullback::driver {
namespace {

[[noreturn]] void refuse_output(const std::string& path, int error) {
  throw Error(ErrorCode::device, fmt::format("{}: cannot write: {}", printable(path, 400),
                                             std::generic_category().message(error)));
}

// A symbolic link stays one; the file that it names is replaced.
std::filesystem::path resolved(const std::string& path) {
  std::error_code error;
  const auto target = std::filesystem::canonical(path, error);
  return error ? std::filesystem::path(path) : target;
}

std::string header_of(const TensorMap& tensors, const std::vector<const std::string*>& order) {
  std::string header = "{";
  std::uint64_t offset = 0;
  for (const std::string* name : order) {
    const TensorSpec& spec = tensors.find(*name)->second.spec();
    const std::uint64_t bytes = static_cast<std::uint64_t>(spec.numel()) * size_of(spec.dtype);
    const std::vector<std::int64_t> shape(spec.shape.begin(), spec.shape.begin() + spec.rank);
    if (header.size() > 1) header += ",";
    header += fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}",
                          nlohmann::json(*name).dump(), safetensors_name(spec.dtype),
                          nlohmann::json(shape).dump(), offset, offset + bytes);
    offset += bytes;
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');  // aligns the data in the file
  return header;
}

// A file beside `target` that takes its name on commit(), or goes away.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::filesystem::path& target) : target_(target) {
    for (int attempt = 0; descriptor_ < 0 && attempt < 100; ++attempt) {
      path_ = target.parent_path() / fmt::format(".pullback-{}-{}.tmp", ::getpid(), attempt);
      descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (descriptor_ < 0 && errno != EEXIST) break;
    }
    if (descriptor_ < 0) refuse_output(target_, errno);
  }
  ~TemporaryFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(const void* data, std::size_t bytes) const {
    const auto* from = static_cast<const std::byte*>(data);
    while (bytes > 0) {
      const ssize_t written = ::write(descriptor_, from, bytes);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) refuse_output(target_, errno);
      from += written;
      bytes -= static_cast<std::size_t>(written);
    }
  }
  void commit() {
    // fsync, since some file systems report a full disk only then.
    if (::fsync(descriptor_) != 0) refuse_output(target_, errno);
    if (::close(std::exchange(descriptor_, -1)) != 0) refuse_output(target_, errno);
    if (::rename(path_.c_str(), target_.c_str()) != 0) refuse_output(target_, errno);
    path_.clear();
  }

 private:
  std::filesystem::path target_, path_;
  int descriptor_ = -1;
};

}  // namespace

void check_output_file(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: cannot write: not a regular file", printable(path, 400)));
  }
  std::filesystem::path folder = resolved(path).parent_path();
  if (folder.empty()) folder = ".";
  if (::stat(folder.c_str(), &status) != 0) refuse_output(path, errno);
  if (!S_ISDIR(status.st_mode)) refuse_output(path, ENOTDIR);
  if (::access(folder.c_str(), W_OK | X_OK) != 0) refuse_output(path, errno);
}

void write_safetensors(const std::string& path, const TensorMap& tensors) {
  check_output_file(path);
  // Wide elements first: every tensor is then aligned for its dtype.
  std::vector<const std::string*> order;
  for (const auto& [name, tensor] : tensors) order.push_back(&name);
  std::stable_sort(order.begin(), order.end(), [&](const std::string* a, const std::string* b) {
    return size_of(tensors.find(*a)->second.spec().dtype) >
           size_of(tensors.find(*b)->second.spec().dtype);
  });
  const std::string header = header_of(tensors, order);
  const std::uint64_t header_bytes = header.size();

  TemporaryFile file(resolved(path));
  file.write(&header_bytes, sizeof(header_bytes));
  file.write(header.data(), header.size());
  for (const std::string* name : order) {
    const HostTensor& tensor = tensors.find(*name)->second;
    const HostTensor packed = tensor.spec().is_contiguous() ? tensor : contiguous_copy(tensor);
    file.write(packed.data(),
               static_cast<std::size_t>(packed.numel()) * size_of(packed.spec().dtype));
  }
  file.commit();
}

}  // namespace pullback::driver
