#include "cuda/disk_cache.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <random>

#include "cuda/environment.hpp"
#include "cuda/hash.hpp"

namespace pullback::cuda {
namespace fs = std::filesystem;
namespace {

constexpr char kMagic[8] = {'P', 'B', 'K', 'C', 'A', 'C', 'H', '1'};
constexpr char kPooledMagic[8] = {'P', 'B', 'K', 'P', 'O', 'O', 'L', '2'};
// Bytes of a pool's block, an instruction, and of the part of it that lies in a plane.
constexpr std::size_t kBlock = 16, kPart = 2;
constexpr std::string_view kPool = "pool";
constexpr std::string_view kSuffix = ".pbk";
constexpr std::string_view kTemporary = ".tmp-";
constexpr std::uint64_t kLargestEntry = std::uint64_t{1} << 30;

struct FileHeader {
  char magic[8];
  std::uint64_t key_bytes, payload_bytes, checksum;
};

// Blocks of the pool that follow each other in the payload.
struct Extent {
  std::uint32_t first, count;
};

std::uint64_t checksum_of(std::string_view key, std::string_view payload) {
  return hash64(payload, hash64(key));
}

class File {
 public:
  // To read: a pipe that somebody left there must not hang.
  explicit File(const std::string& path)
      : descriptor_(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {}
  File(const std::string& path, mode_t created_as)
      : descriptor_(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, created_as)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  explicit operator bool() const { return descriptor_ >= 0; }
  int get() const { return descriptor_; }

  bool read(void* to, std::size_t bytes) {
    return transfer(bytes, [&](std::size_t done) {
      return ::read(descriptor_, static_cast<char*>(to) + done, bytes - done);
    });
  }
  bool read_at(std::uint64_t offset, void* to, std::size_t bytes) {
    return transfer(bytes, [&](std::size_t done) {
      return pread(descriptor_, static_cast<char*>(to) + done, bytes - done,
                   static_cast<off_t>(offset + done));
    });
  }
  bool write(const void* from, std::size_t bytes) {
    return transfer(bytes, [&](std::size_t done) {
      return ::write(descriptor_, static_cast<const char*>(from) + done, bytes - done);
    });
  }

 private:
  // some(done): what is done next, after so many bytes.
  template <class Some>
  static bool transfer(std::size_t bytes, const Some& some) {
    for (std::size_t done = 0; done < bytes;) {
      const ssize_t now = some(done);
      if (now < 0 && errno == EINTR) continue;
      if (now <= 0) return false;
      done += static_cast<std::size_t>(now);
    }
    return true;
  }

  int descriptor_;
};

struct Content {
  std::string key;
  std::vector<char> payload;
};

// What is left of an entry's file, `bytes` long, are extents; empty: the payload is not theirs.
std::vector<char> load_pooled(File& file, std::uint64_t bytes, std::uint64_t payload_bytes,
                              const std::string& pool_path) {
  if (bytes % sizeof(Extent) != 0) return {};
  std::vector<Extent> extents(bytes / sizeof(Extent));
  if (!file.read(extents.data(), bytes)) return {};
  std::uint64_t blocks = 0;
  for (const Extent& extent : extents) blocks += extent.count;
  if (blocks != (payload_bytes + kBlock - 1) / kBlock) return {};

  File pool(pool_path);
  struct stat status {};
  if (!pool || fstat(pool.get(), &status) != 0) return {};
  const std::uint64_t pool_blocks = static_cast<std::uint64_t>(status.st_size) / kBlock;
  std::vector<char> payload(blocks * kBlock), parts;
  char* to = payload.data();
  for (const Extent& extent : extents) {
    const std::uint64_t count = extent.count;
    if (extent.first + count > pool_blocks) return {};
    parts.resize(count * kPart);
    for (std::size_t plane = 0; plane < kBlock / kPart; ++plane) {
      const std::uint64_t offset = (plane * pool_blocks + extent.first) * kPart;
      if (!pool.read_at(offset, parts.data(), parts.size())) return {};
      for (std::uint64_t i = 0; i < count; ++i) {
        std::memcpy(to + i * kBlock + plane * kPart, &parts[i * kPart], kPart);
      }
    }
    to += count * kBlock;
  }
  payload.resize(payload_bytes);
  return payload;
}

// An entry up to its payload, or what that is made from.
struct Begin {
  FileHeader header{};
  std::string key;
  std::uint64_t rest = 0;  // bytes behind the key
  bool is_pooled() const {
    return std::memcmp(header.magic, kPooledMagic, sizeof kPooledMagic) == 0;
  }
};

std::optional<Begin> read_begin(File& file) {
  Begin begin;
  FileHeader& header = begin.header;
  struct stat status {};
  if (!file || fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) ||
      !file.read(&header, sizeof header) || header.key_bytes > kLargestEntry ||
      header.payload_bytes > kLargestEntry ||
      sizeof header + header.key_bytes > static_cast<std::uint64_t>(status.st_size)) {
    return std::nullopt;
  }
  begin.rest = static_cast<std::uint64_t>(status.st_size) - sizeof header - header.key_bytes;
  begin.key.resize(header.key_bytes);
  if (!file.read(begin.key.data(), begin.key.size())) return std::nullopt;
  const bool own = std::memcmp(header.magic, kMagic, sizeof kMagic) == 0;
  const bool whole = begin.is_pooled() || (own && begin.rest == header.payload_bytes);
  return whole ? std::optional(std::move(begin)) : std::nullopt;
}

std::optional<Content> load(const std::string& path) {
  File file(path);
  std::optional<Begin> begin = read_begin(file);
  if (!begin) return std::nullopt;
  const FileHeader& header = begin->header;
  Content content;
  content.key = std::move(begin->key);
  if (begin->is_pooled()) {
    const fs::path pool = fs::path(path).parent_path() / kPool;
    content.payload = load_pooled(file, begin->rest, header.payload_bytes, pool);
  } else {
    content.payload.resize(begin->rest);
    if (!file.read(content.payload.data(), begin->rest)) return std::nullopt;
  }
  if (content.payload.size() != header.payload_bytes ||
      checksum_of(content.key, {content.payload.data(), content.payload.size()}) !=
          header.checksum) {
    return std::nullopt;
  }
  return content;
}

// The same process id can be in use on two hosts that share a folder, hence the random part.
std::string temporary_path(const std::string& path) {
  std::random_device random;
  return fmt::format("{}{}{}-{:08x}{:08x}", path, kTemporary, getpid(), random(), random());
}

// Whether it is an entry, or one that is being written. The folder may be any, and have more.
bool is_ours(const fs::directory_entry& file, bool temporary) {
  std::error_code ignored;
  const std::string name = file.path().filename();
  const std::size_t hash = hash_text("").size();
  if (name.find_first_not_of("0123456789abcdef") != hash || !file.is_regular_file(ignored)) {
    return false;
  }
  const std::string_view rest = std::string_view(name).substr(hash);
  return temporary ? rest.starts_with(fmt::format("{}{}", kSuffix, kTemporary)) : rest == kSuffix;
}

std::string default_folder() {
  if (const std::string chosen = environment("PULLBACK_CACHE_DIR"); !chosen.empty()) return chosen;
  if (const std::string xdg = environment("XDG_CACHE_HOME"); xdg.starts_with('/')) {
    return xdg + "/pullback";
  }
  if (const std::string home = environment("HOME"); home.starts_with('/')) {
    return home + "/.cache/pullback";
  }
  return {};
}

}  // namespace

DiskCache::DiskCache(std::string folder, Mode mode, Readers readers)
    : folder_(std::move(folder)), mode_(folder_.empty() ? Mode::off : mode), readers_(readers) {}

DiskCache DiskCache::from_environment() {
  const std::string_view mode = environment_choice("PULLBACK_CACHE", {"rw", "ro", "off"});
  return DiskCache(default_folder(), mode == "off"  ? Mode::off
                                     : mode == "ro" ? Mode::read_only
                                                    : Mode::read_write);
}

DiskCache DiskCache::shipped() {
  const fs::path own = own_folder();
  const bool off = own.empty() || from_environment().mode() == Mode::off;
  return DiskCache(own / "kernels", off ? Mode::off : Mode::read_only);
}

bool DiskCache::writable() const {
  std::error_code error;
  fs::path existing = fs::absolute(folder_, error) / "";
  do {
    existing = existing.parent_path();
  } while (!fs::exists(existing, error) && existing.has_relative_path());
  return access(existing.c_str(), W_OK | X_OK) == 0;
}

std::string DiskCache::path_of(const std::string& key_text) const {
  return folder_ + "/" + hash_text(key_text) + std::string(kSuffix);
}

std::optional<std::vector<char>> DiskCache::read(const std::string& key_text) const {
  if (mode_ == Mode::off) return std::nullopt;
  std::optional<Content> content = load(path_of(key_text));
  if (!content || content->key != key_text) return std::nullopt;
  return std::move(content->payload);
}

bool DiskCache::write(const std::string& key_text, const std::vector<char>& payload,
                      std::string& reason) const {
  if (mode_ != Mode::read_write) {
    reason = "the cache is not writable by configuration";
    return false;
  }
  std::error_code error;
  // What is above it, whether or not its name ends with a slash.
  fs::create_directories((fs::path(folder_) / "").parent_path().parent_path(), error);
  const bool all = readers_ == Readers::all;
  if (mkdir(folder_.c_str(), all ? 0755 : 0700) != 0 && errno != EEXIST) {
    reason = fmt::format("cannot create {}: {}", folder_, std::strerror(errno));
    return false;
  }
  const std::string path = path_of(key_text);
  const std::string temporary = temporary_path(path);
  FileHeader header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.key_bytes = key_text.size();
  header.payload_bytes = payload.size();
  header.checksum = checksum_of(key_text, {payload.data(), payload.size()});
  {
    File file(temporary, all ? 0644 : 0600);
    if (!file || !file.write(&header, sizeof header) ||
        !file.write(key_text.data(), key_text.size()) ||
        !file.write(payload.data(), payload.size()) || fsync(file.get()) != 0) {
      reason = fmt::format("cannot write {}: {}", temporary, std::strerror(errno));
      unlink(temporary.c_str());
      return false;
    }
  }
  if (std::rename(temporary.c_str(), path.c_str()) != 0) {
    reason = fmt::format("cannot rename to {}: {}", path, std::strerror(errno));
    unlink(temporary.c_str());
    return false;
  }
  return true;
}

std::vector<DiskCache::Entry> DiskCache::list() const {
  std::vector<Entry> entries;
  for (const fs::directory_entry& file : files_in(folder_)) {
    if (!is_ours(file, false)) continue;
    std::optional<Content> content = load(file.path());
    std::error_code ignored;
    const auto bytes = file.file_size(ignored);
    entries.push_back({file.path(), content ? content->key : std::string(), ignored ? 0 : bytes});
  }
  return entries;
}

int DiskCache::purge(bool damaged_only) const {
  int removed = 0;
  std::error_code error;
  for (const Entry& entry : list()) {
    if (damaged_only && !entry.key_text.empty()) continue;
    removed += fs::remove(entry.path, error) ? 1 : 0;
  }
  // A writer needs milliseconds; an hour-old temporary file has no owner any more.
  const auto stale = fs::file_time_type::clock::now() - std::chrono::hours(1);
  for (const fs::directory_entry& file : files_in(folder_)) {
    if (!is_ours(file, true)) continue;
    std::error_code ignored;
    if (!damaged_only || file.last_write_time(ignored) < stale) {
      removed += fs::remove(file.path(), ignored) ? 1 : 0;
    }
  }
  return removed;
}

}  // namespace pullback::cuda
