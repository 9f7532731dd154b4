// Compiled kernels on disk: one file an entry, safe with many processes at once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace pullback::cuda {

// An entry is: magic, key length, payload length, checksum of both, key text, payload. Writers put
// it into a temporary file in the same folder, sync it and rename it, so that readers see all of it
// or nothing; the loser of a race replaces an equal file. Anything unexpected is a miss.
//
// Entries of a folder that is only read may share blocks of 16 bytes: instead of the payload they
// list the blocks of the folder's file "pool" that make it up (scripts/pool_kernels.py). The pool
// has the first two bytes of all its blocks, then the next two, and so on: a wheel packs that
// better.
class DiskCache {
 public:
  enum class Mode { read_write, read_only, off };
  enum class Readers { owner, all };  // of what is written

  // Folder from PULLBACK_CACHE_DIR, else XDG_CACHE_HOME/pullback, else HOME/.cache/pullback, else
  // none; mode from PULLBACK_CACHE=rw|ro|off, anything else is an Error. The folder is created, for
  // this user only, at the first write.
  static DiskCache from_environment();

  // What a package brings along: the folder "kernels" beside this library, never written to. None
  // with PULLBACK_CACHE=off.
  static DiskCache shipped();

  DiskCache(std::string folder, Mode mode, Readers readers = Readers::owner);

  const std::string& folder() const { return folder_; }  // empty: memory only
  Mode mode() const { return mode_; }
  // Whether the folder, or the one in which it would be created, lets this process write.
  bool writable() const;

  std::optional<std::vector<char>> read(const std::string& key_text) const;
  // False when nothing was written; `reason` then says why.
  bool write(const std::string& key_text, const std::vector<char>& payload,
             std::string& reason) const;

  struct Entry {
    std::string path;
    std::string key_text;  // empty: the entry is damaged
    std::uint64_t bytes = 0;
  };
  // Files with other names than entries have are not touched.
  std::vector<Entry> list() const;
  // Removes all entries, or only damaged ones and temporary files left by killed processes.
  // The number of files removed.
  int purge(bool damaged_only) const;

 private:
  std::string path_of(const std::string& key_text) const;
  std::string folder_;
  Mode mode_;
  Readers readers_;
};

}  // namespace pullback::cuda
