// Environment variables that steer compiling and its cache, and folders.
#pragma once

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "core/check.hpp"

namespace pullback::cuda {

// Empty where it is not set.
inline std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// One of `known`, the first where it is not set. Throws Error(invalid_argument) for anything else:
// a variable that was misspelt must not do the opposite of what it was set for.
inline std::string_view environment_choice(const char* name,
                                           std::initializer_list<std::string_view> known) {
  const std::string value = environment(name);
  if (value.empty()) return *known.begin();
  const auto* found = std::find(known.begin(), known.end(), value);
  if (found == known.end()) {
    fail(ErrorCode::invalid_argument, "CUDA", name, fmt::format("{}", fmt::join(known, " or ")),
         fmt::format("'{}'", value));
  }
  return *found;
}

// Of this library, or of the program that it is linked into. Empty where the loader has a relative
// path: what that means depends on the working folder, from which nothing may be loaded.
inline std::filesystem::path own_folder() {
  Dl_info info{};
  link_map* map = nullptr;
  const auto* here = reinterpret_cast<const void*>(&own_folder);
  if (dladdr1(here, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0) return {};
  // The program itself has no name there, and argv[0] in `info`.
  std::error_code ignored;
  const std::filesystem::path path = *map->l_name == '\0'
                                         ? std::filesystem::read_symlink("/proc/self/exe", ignored)
                                         : std::filesystem::path(map->l_name);
  return path.is_absolute() ? path.parent_path() : std::filesystem::path();
}

// As many as can be read.
inline std::vector<std::filesystem::directory_entry> files_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::directory_entry> files;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    files.push_back(*it);
  }
  return files;
}

}  // namespace pullback::cuda
