#include "cuda/nvrtc.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>

#include "cuda/driver.hpp"
#include "cuda/environment.hpp"
#include "pullback/error.hpp"

namespace pullback::cuda {
namespace fs = std::filesystem;

using Program = struct NvrtcProgram*;

struct Nvrtc::Functions {
  const char* (*nvrtcGetErrorString)(int result);
  int (*nvrtcVersion)(int* major, int* minor);
  int (*nvrtcGetNumSupportedArchs)(int* count);
  int (*nvrtcGetSupportedArchs)(int* archs);
  int (*nvrtcCreateProgram)(Program* program, const char* source, const char* name,
                            int header_count, const char* const* headers, const char* const* names);
  int (*nvrtcDestroyProgram)(Program* program);
  int (*nvrtcCompileProgram)(Program program, int option_count, const char* const* options);
  int (*nvrtcGetProgramLogSize)(Program program, std::size_t* size);
  int (*nvrtcGetProgramLog)(Program program, char* log);
  int (*nvrtcGetCUBINSize)(Program program, std::size_t* size);
  int (*nvrtcGetCUBIN)(Program program, char* cubin);
};

namespace {

// Folders of NVRTC's Python wheels: nvidia/cu13/lib and, up to CUDA 12, nvidia/cuda_nvrtc/lib, in
// the site-packages folder that holds this library, if any.
std::vector<fs::path> wheel_folders() {
  std::vector<fs::path> folders;
  fs::path folder = own_folder();
  for (int level = 0; level < 4 && folder.has_relative_path(); ++level) {
    folders.push_back(folder / "nvidia/cu13/lib");
    folders.push_back(folder / "nvidia/cuda_nvrtc/lib");
    folder = folder.parent_path();
  }
  return folders;
}

// The newest first, but of an older driver that of its own release: it may not load machine code of
// a newer one.
std::array<const char*, 2> library_names() {
  std::array names = {"libnvrtc.so.13", "libnvrtc.so.12"};
  if (driver_problem().empty() && driver().version < 13000) std::swap(names[0], names[1]);
  return names;
}

std::vector<fs::path> libraries_in(const fs::path& folder) {
  std::vector<fs::path> found;
  for (const char* name : library_names()) {
    std::error_code ignored;
    if (fs::exists(folder / name, ignored)) found.push_back(folder / name);
  }
  return found;
}

std::vector<fs::path> candidates() {
  const std::string chosen = environment("PULLBACK_NVRTC");
  if (!chosen.empty()) {
    std::error_code ignored;
    return fs::is_directory(chosen, ignored) ? libraries_in(chosen) : std::vector<fs::path>{chosen};
  }
  const auto names = library_names();
  std::vector<fs::path> all(names.begin(), names.end());
  std::vector<fs::path> folders = wheel_folders();
  for (const std::string& root :
       {environment("CUDA_HOME"), environment("CUDA_PATH"), std::string("/usr/local/cuda")}) {
    if (!root.empty()) folders.push_back(fs::path(root) / "lib64");
  }
  for (const fs::path& folder : folders) {
    const auto libraries = libraries_in(folder);
    all.insert(all.end(), libraries.begin(), libraries.end());
  }
  return all;
}

// NVRTC opens its builtins library by name, which fails in folders that the loader does not know.
void preload_builtins(const fs::path& folder) {
  for (const fs::directory_entry& entry : files_in(folder)) {
    if (entry.path().filename().string().starts_with("libnvrtc-builtins.so")) {
      dlopen(entry.path().c_str(), RTLD_NOW | RTLD_GLOBAL);
    }
  }
}

}  // namespace

Nvrtc::Nvrtc() {
  std::string looked;
  void* library = nullptr;
  for (const fs::path& path : candidates()) {
    if (path.has_parent_path()) preload_builtins(path.parent_path());
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library) break;
    looked += (looked.empty() ? "" : ", ") + path.string();
    // Of what is there the loader tells why it will not do.
    std::error_code ignored;
    if (fs::exists(path, ignored)) looked += fmt::format(" ({})", dlerror());
  }
  if (!library) {
    throw Error(ErrorCode::device,
                fmt::format("CUDA: the compiler library NVRTC was not found (looked for: {}); "
                            "install the CUDA toolkit or the Python wheel nvidia-cuda-nvrtc, or "
                            "set PULLBACK_NVRTC to the library",
                            looked.empty() ? "nothing in PULLBACK_NVRTC's folder" : looked));
  }
  auto functions = std::make_unique<Functions>();
  const auto load = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (!function) throw Error(ErrorCode::device, fmt::format("CUDA: NVRTC has no {}", name));
  };
#define PULLBACK_LOAD(name) load(functions->name, #name)
  PULLBACK_LOAD(nvrtcGetErrorString);
  PULLBACK_LOAD(nvrtcVersion);
  PULLBACK_LOAD(nvrtcGetNumSupportedArchs);
  PULLBACK_LOAD(nvrtcGetSupportedArchs);
  PULLBACK_LOAD(nvrtcCreateProgram);
  PULLBACK_LOAD(nvrtcDestroyProgram);
  PULLBACK_LOAD(nvrtcCompileProgram);
  PULLBACK_LOAD(nvrtcGetProgramLogSize);
  PULLBACK_LOAD(nvrtcGetProgramLog);
  PULLBACK_LOAD(nvrtcGetCUBINSize);
  PULLBACK_LOAD(nvrtcGetCUBIN);
#undef PULLBACK_LOAD
  int major = 0, minor = 0, count = 0;
  functions->nvrtcVersion(&major, &minor);
  version_ = major * 1000 + minor * 10;
  functions->nvrtcGetNumSupportedArchs(&count);
  archs_.resize(static_cast<std::size_t>(count));
  functions->nvrtcGetSupportedArchs(archs_.data());
  Dl_info info{};
  dladdr(reinterpret_cast<const void*>(functions->nvrtcVersion), &info);
  path_ = info.dli_fname ? info.dli_fname : "?";
  functions_ = functions.release();  // lives as long as the process, like the library itself
}

const Nvrtc& Nvrtc::instance() {
  // Never destroyed; a constructor that throws is tried again at the next call.
  static const Nvrtc& nvrtc = *new Nvrtc();
  return nvrtc;
}

std::string nvrtc_problem() {
  try {
    Nvrtc::instance();
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

bool Nvrtc::supports(int arch) const {
  return std::find(archs_.begin(), archs_.end(), arch) != archs_.end();
}

Compilation Nvrtc::compile(const std::string& source, const char* program_name,
                           std::span<const Header> headers,
                           std::span<const std::string> options) const {
  std::vector<std::string> storage;  // NVRTC wants terminated strings
  storage.reserve(2 * headers.size());
  std::vector<const char*> texts, names, flags;
  for (const Header& header : headers) {
    texts.push_back(storage.emplace_back(header.text).c_str());
    names.push_back(storage.emplace_back(header.name).c_str());
  }
  for (const std::string& option : options) flags.push_back(option.c_str());

  Compilation result;
  Program program = nullptr;
  const Functions& f = *functions_;
  int status = f.nvrtcCreateProgram(&program, source.c_str(), program_name,
                                    static_cast<int>(headers.size()), texts.data(), names.data());
  if (status != 0) {
    result.log = f.nvrtcGetErrorString(status);
    return result;
  }
  status = f.nvrtcCompileProgram(program, static_cast<int>(flags.size()), flags.data());
  std::size_t size = 0;
  if (f.nvrtcGetProgramLogSize(program, &size) == 0 && size > 1) {
    result.log.resize(size);
    f.nvrtcGetProgramLog(program, result.log.data());
    result.log.resize(size - 1);
  }
  if (status == 0) status = f.nvrtcGetCUBINSize(program, &size);
  if (status == 0) {
    result.cubin.resize(size);
    status = f.nvrtcGetCUBIN(program, result.cubin.data());
  }
  result.ok = status == 0;
  if (!result.ok && result.log.empty()) result.log = f.nvrtcGetErrorString(status);
  f.nvrtcDestroyProgram(&program);
  return result;
}

}  // namespace pullback::cuda
