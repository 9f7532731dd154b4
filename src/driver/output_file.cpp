#include "driver/output_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <system_error>
#include <utility>

#include "driver/safetensors.hpp"
#include "pullback/error.hpp"

namespace pullback::driver {
namespace {

[[noreturn]] void refuse_output(const std::string& path, int error) {
  throw Error(ErrorCode::device, fmt::format("{}: cannot write: {}", printable(path, 400),
                                             std::generic_category().message(error)));
}

// A symbolic link stays one; the file that it names is replaced, or made if there is none.
std::filesystem::path resolved(const std::string& path) {
  std::filesystem::path target = path;
  std::error_code error;
  while (std::filesystem::is_symlink(target, error)) {
    target = target.parent_path() / std::filesystem::read_symlink(target, error);
  }
  return target;
}

constexpr int kEndingSignals[] = {SIGINT, SIGTERM, SIGHUP};

// What an ending signal removes: a name rather than an OutputFile, since its handler may run in any
// thread and at any time. Empty: nothing.
char half_written[PATH_MAX];

void remove_and_end(int signal) {
  ::unlink(half_written);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

// Signals that the program ignores, or has a handler for, are none of our business.
void replace_handlers(void (*from)(int), void (*to)(int)) {
  for (const int signal : kEndingSignals) {
    struct sigaction current {};
    if (::sigaction(signal, nullptr, &current) == 0 && current.sa_handler == from) {
      std::signal(signal, to);
    }
  }
}

}  // namespace

void check_output_file(const std::string& path) {
  if (path.empty()) {
    throw Error(ErrorCode::invalid_argument, "output file: expected a path, got an empty one");
  }
  struct stat status {};
  const bool exists = ::stat(path.c_str(), &status) == 0;
  if (!exists && errno != ENOENT) refuse_output(path, errno);
  if (exists && !S_ISREG(status.st_mode)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: cannot write: not a regular file", printable(path, 400)));
  }
  std::filesystem::path folder = resolved(path).parent_path();
  if (folder.empty()) folder = ".";
  if (::stat(folder.c_str(), &status) != 0) refuse_output(path, errno);
  if (!S_ISDIR(status.st_mode)) refuse_output(path, ENOTDIR);
  if (::access(folder.c_str(), W_OK | X_OK) != 0) refuse_output(path, errno);
}

OutputFile::OutputFile(const std::string& path) {
  check_output_file(path);
  target_ = resolved(path);
  struct stat status {};
  const bool replaces = ::stat(target_.c_str(), &status) == 0;
  const mode_t mode = replaces ? status.st_mode & 0777 : 0666;
  for (int attempt = 0; descriptor_ < 0 && attempt < 100; ++attempt) {
    temporary_ = target_.parent_path() / fmt::format(".pullback-{}-{}.tmp", ::getpid(), attempt);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (descriptor_ < 0 && errno != EEXIST) break;
  }
  if (descriptor_ < 0) refuse_output(target_, errno);
  half_written[temporary_.native().copy(half_written, sizeof(half_written) - 1)] = '\0';
  replace_handlers(SIG_DFL, remove_and_end);
  // What the umask took from it. A file system without modes has none to keep.
  if (replaces) ::fchmod(descriptor_, mode);
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  replace_handlers(remove_and_end, SIG_DFL);
}

void OutputFile::write(const void* data, std::size_t bytes) const {
  const auto* from = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, from, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refuse_output(target_, errno);
    from += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void OutputFile::commit() {
  // fsync, since some file systems report a full disk only then.
  if (::fsync(descriptor_) != 0) refuse_output(target_, errno);
  if (::close(std::exchange(descriptor_, -1)) != 0) refuse_output(target_, errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) refuse_output(target_, errno);
  temporary_.clear();
}

}  // namespace pullback::driver
