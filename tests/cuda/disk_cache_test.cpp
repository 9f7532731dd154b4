#include "cuda/disk_cache.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>

#include "support/environment.hpp"
#include "support/message_of.hpp"
#include "support/temporary_folder.hpp"

namespace pullback::cuda {
namespace {
namespace fs = std::filesystem;

class DiskCacheTest : public ::testing::Test {
 protected:
  DiskCache cache(DiskCache::Mode mode = DiskCache::Mode::read_write) const {
    return DiskCache(folder_, mode);
  }
  std::string only_file() const {
    std::string path;
    int count = 0;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      path = entry.path();
      ++count;
    }
    EXPECT_EQ(count, 1);
    return path;
  }

  const TemporaryFolder temporary_;
  const std::string root_ = temporary_.path(), folder_ = root_ + "/deep/er";
  std::string reason_;
  const std::vector<char> payload_ = std::vector<char>(100000, 'x');
};

TEST_F(DiskCacheTest, tells_whether_its_folder_can_be_written) {
  EXPECT_TRUE(cache().writable());  // it would be created
  EXPECT_FALSE(fs::exists(root_ + "/deep"));
  EXPECT_TRUE(DiskCache(root_, DiskCache::Mode::read_write).writable());
  EXPECT_EQ(DiskCache("no such folder", DiskCache::Mode::read_write).writable(),
            access(".", W_OK | X_OK) == 0);
  std::ofstream(root_ + "/file") << "no folder";
  EXPECT_FALSE(DiskCache(root_ + "/file/cache", DiskCache::Mode::read_write).writable());
}

TEST_F(DiskCacheTest, what_was_written_is_read) {
  EXPECT_FALSE(cache().read("key"));
  EXPECT_FALSE(fs::exists(folder_)) << "reading must not create the folder";
  ASSERT_TRUE(cache().write("key", payload_, reason_)) << reason_;
  EXPECT_EQ(cache().read("key"), payload_);
  EXPECT_FALSE(cache().read("other key"));
  EXPECT_FALSE(cache(DiskCache::Mode::off).read("key"));
  struct stat status {};
  ASSERT_EQ(stat(folder_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
}

TEST_F(DiskCacheTest, what_is_made_for_others_can_be_read_by_them) {
  const mode_t before = umask(022);
  const DiskCache shared(folder_, DiskCache::Mode::read_write, DiskCache::Readers::all);
  ASSERT_TRUE(shared.write("key", payload_, reason_)) << reason_;
  umask(before);
  EXPECT_EQ(fs::status(folder_).permissions(), fs::perms{0755});
  EXPECT_EQ(fs::status(only_file()).permissions(), fs::perms{0644});
}

TEST_F(DiskCacheTest, a_pipe_in_place_of_an_entry_is_a_miss) {
  ASSERT_TRUE(cache().write("key", payload_, reason_));
  const std::string path = only_file();
  fs::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_FALSE(cache().read("key"));
}

TEST_F(DiskCacheTest, shipped_kernels_are_read_and_left_alone) {
  const DiskCache shipped = DiskCache::shipped();
  EXPECT_TRUE(shipped.folder().ends_with("/kernels"));
  EXPECT_FALSE(shipped.write("key", payload_, reason_));
  const bool existed = fs::exists(shipped.folder());
  ASSERT_TRUE(DiskCache(shipped.folder(), DiskCache::Mode::read_write)
                  .write("a key of this test", payload_, reason_))
      << reason_;
  EXPECT_EQ(shipped.read("a key of this test"), payload_);
  {
    const Environment off("PULLBACK_CACHE", "off");
    EXPECT_FALSE(DiskCache::shipped().read("a key of this test"));
  }
  if (!existed) fs::remove_all(shipped.folder());
}

TEST_F(DiskCacheTest, a_damaged_entry_is_a_miss_and_can_be_replaced) {
  ASSERT_TRUE(cache().write("key", payload_, reason_));
  const std::string path = only_file();
  const auto size = fs::file_size(path);
  for (std::uintmax_t length :
       {std::uintmax_t{0}, std::uintmax_t{7}, std::uintmax_t{40}, size - 1}) {
    fs::resize_file(path, length);
    EXPECT_FALSE(cache().read("key")) << length;
    ASSERT_TRUE(cache().write("key", payload_, reason_));
  }
  for (std::uintmax_t at :
       {std::uintmax_t{0}, std::uintmax_t{9}, std::uintmax_t{30}, size / 2, size - 1}) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(at));
    file.put('!');
    file.close();
    EXPECT_FALSE(cache().read("key")) << at;
    ASSERT_TRUE(cache().write("key", payload_, reason_));
  }
  std::ofstream(path, std::ios::app) << "tail";
  EXPECT_FALSE(cache().read("key"));
  EXPECT_EQ(cache().list().at(0).key_text, "");
  EXPECT_EQ(cache().purge(true), 1);
}

// As scripts/pool_kernels.py makes them.
TEST_F(DiskCacheTest, a_pooled_entry_is_what_its_blocks_make_up) {
  // Blocks 1, 0 and a half of block 1 of a pool of two.
  std::string blocks[2], pool;
  for (char c = 'a'; c < 'q'; ++c) {
    blocks[0] += c;
    blocks[1] += static_cast<char>(c - 'a' + 'A');
  }
  for (std::size_t part = 0; part < 16; part += 2) {
    pool += blocks[0].substr(part, 2) + blocks[1].substr(part, 2);
  }
  const std::string all = blocks[1] + blocks[0] + blocks[1].substr(0, 8);
  const std::vector<char> payload(all.begin(), all.end());
  ASSERT_TRUE(cache().write("key", payload, reason_));
  const std::string path = only_file();
  std::string head(32 + 3, '\0');
  std::ifstream(path, std::ios::binary)
      .read(head.data(), static_cast<std::streamsize>(head.size()));
  head.replace(0, 8, "PBKPOOL2");
  const auto make = [&](std::vector<std::uint32_t> extents) {
    std::ofstream file(path, std::ios::binary);
    file << head;
    file.write(reinterpret_cast<const char*>(extents.data()),
               static_cast<std::streamsize>(extents.size() * sizeof extents[0]));
  };
  make({1, 1, 0, 1, 1, 1});
  EXPECT_FALSE(cache().read("key")) << "without a pool";
  std::ofstream(folder_ + "/pool") << pool;
  EXPECT_EQ(cache().read("key"), payload);
  for (const auto& extents : std::vector<std::vector<std::uint32_t>>{
           {}, {1, 1, 0, 1}, {1, 1, 0, 1, 2, 1}, {1, 1, 0, 1, 0, 1}, {1, 1, 0, 1, 1}, {0, ~0u}}) {
    make(extents);
    EXPECT_FALSE(cache().read("key")) << extents.size();
  }
}

TEST_F(DiskCacheTest, an_entry_under_a_wrong_name_is_a_miss) {
  ASSERT_TRUE(cache().write("one", payload_, reason_));
  const std::string one = only_file();
  fs::rename(one, root_ + "/saved");
  ASSERT_TRUE(cache().write("two", payload_, reason_));
  fs::rename(root_ + "/saved", only_file());
  EXPECT_FALSE(cache().read("two"));
}

TEST_F(DiskCacheTest, modes) {
  ASSERT_TRUE(cache().write("key", payload_, reason_));
  EXPECT_FALSE(cache(DiskCache::Mode::read_only).write("new", payload_, reason_));
  EXPECT_EQ(cache(DiskCache::Mode::read_only).read("key"), payload_);
  EXPECT_FALSE(cache(DiskCache::Mode::off).read("key"));
  EXPECT_FALSE(DiskCache("", DiskCache::Mode::read_write).write("key", payload_, reason_));
}

TEST_F(DiskCacheTest, an_unwritable_place_gives_a_reason) {
  std::ofstream(root_ + "/file") << "in the way";
  const DiskCache blocked(root_ + "/file/cache", DiskCache::Mode::read_write);
  EXPECT_FALSE(blocked.write("key", payload_, reason_));
  EXPECT_NE(reason_.find("cannot create"), std::string::npos) << reason_;
  EXPECT_FALSE(blocked.read("key"));
}

TEST_F(DiskCacheTest, a_folder_that_nobody_may_write_is_read_all_the_same) {
  const DiskCache nowhere("/proc/pullback", DiskCache::Mode::read_write);
  EXPECT_FALSE(nowhere.write("key", payload_, reason_));
  EXPECT_NE(reason_.find("/proc/pullback"), std::string::npos) << reason_;
  EXPECT_FALSE(nowhere.read("key"));
  EXPECT_TRUE(nowhere.list().empty());
}

TEST_F(DiskCacheTest, the_folder_is_the_users) {
  Environment folder("PULLBACK_CACHE_DIR", nullptr), caches("XDG_CACHE_HOME", nullptr),
      users("HOME", nullptr), mode("PULLBACK_CACHE", nullptr);
  EXPECT_EQ(DiskCache::from_environment().folder(), "");
  EXPECT_EQ(DiskCache::from_environment().mode(), DiskCache::Mode::off);
  users.set((root_ + "/missing").c_str());
  const DiskCache home = DiskCache::from_environment();
  EXPECT_EQ(home.folder(), root_ + "/missing/.cache/pullback");
  EXPECT_TRUE(home.write("key", payload_, reason_)) << reason_;
  EXPECT_EQ(DiskCache::from_environment().read("key"), payload_);
  caches.set("relative");  // which the specification says to ignore
  EXPECT_EQ(DiskCache::from_environment().folder(), home.folder());
  caches.set(root_.c_str());
  EXPECT_EQ(DiskCache::from_environment().folder(), root_ + "/pullback");
  folder.set(folder_.c_str());
  EXPECT_EQ(DiskCache::from_environment().folder(), folder_);
  mode.set("ro");
  EXPECT_EQ(DiskCache::from_environment().mode(), DiskCache::Mode::read_only);
  mode.set("none");
  EXPECT_EQ(message_of([] { DiskCache::from_environment(); }),
            "CUDA: PULLBACK_CACHE: expected rw or ro or off, got 'none'");
}

// Writers race on few keys while readers look: a reader sees a whole entry or none.
TEST_F(DiskCacheTest, processes_racing) {
  constexpr int kProcesses = 8;
  const auto payload_of = [](int key) {
    return std::vector<char>(static_cast<std::size_t>(50000 + 1000 * key),
                             static_cast<char>('a' + key));
  };
  for (int process = 0; process < kProcesses; ++process) {
    if (fork() == 0) {
      const DiskCache mine = cache();
      std::string reason;
      bool good = true;
      for (int round = 0; round < 60; ++round) {
        const int key = (round + process) % 4;
        const std::string name = "key" + std::to_string(key);
        if (const auto found = mine.read(name)) good &= *found == payload_of(key);
        good &= mine.write(name, payload_of(key), reason);
        const auto now = mine.read(name);
        good &= now && *now == payload_of(key);
      }
      _exit(good ? 0 : 1);
    }
  }
  for (int process = 0; process < kProcesses; ++process) {
    int status = 0;
    wait(&status);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(cache().list().size(), 4u);
  EXPECT_EQ(cache().purge(false), 4) << "no temporary file may be left";
}

}  // namespace
}  // namespace pullback::cuda
