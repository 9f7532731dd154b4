// libnvrtc.so.13 that compiles kernels for the host, with the compiler that the tests are built
// with: their own headers, but device/ where include/device has another for the host.
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

namespace {

namespace fs = std::filesystem;

constexpr int kCompilation = 6, kInternal = 11;

struct Program {
  std::string source, log, cubin;
  std::vector<std::string> headers, names;
};

void write(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}
std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Beside the kernel, what the driver calls.
std::string with_entry(const std::string& source) {
  static const std::regex kernel(
      R"(void (\w+)\(const __grid_constant__ (?:(\w+)::)?(\w+) parameters\))");
  std::smatch match;
  if (!std::regex_search(source, match, kernel)) return source + "\n#error no kernel\n";
  const std::string name = match[1], space = match[2], type = match[3];
  const std::string within = space.empty() ? "pullback" : "pullback::" + space;
  return source + "extern \"C\" const emulated::Kernel emulated_" + name +
         " = {\n"
         "    [](const emulated::Launch& launch) {\n"
         "      emulated::run(launch, [](void** parameters) {\n"
         "        pullback::" +
         name + "(*static_cast<const " + within + "::" + type +
         "*>(parameters[0]));\n"
         "      });\n    },\n    sizeof(" +
         within + "::" + type + ")};\n";
}

// Arrays of dynamic shared memory have no size, which C++ takes for globals of the kernel's own.
std::string with_shared(const std::string& header) {
  if (header.find("extern __shared__") == header.npos) return header;  // without the regex's time
  static const std::regex array(R"(extern __shared__ (?:__align__\(\w+\) )?([\w ]+) (\w+)\[\];)");
  return std::regex_replace(header, array,
                            "$1* const $2 = reinterpret_cast<$1*>(emulated::dynamic_shared());");
}

int compile(Program& program, const std::string& arch) {
  char name[] = "/tmp/emulated_nvrtc_XXXXXX";
  if (mkdtemp(name) == nullptr) return kInternal;
  const fs::path folder = name;
  for (std::size_t i = 0; i < program.headers.size(); ++i) {
    const fs::path header = program.names[i];
    if (!fs::exists(fs::path(EMULATED_INCLUDE) / header))
      write(folder / header, with_shared(program.headers[i]));
  }
  write(folder / "kernel.cpp", with_entry(program.source));
  const std::string command = std::string(EMULATED_COMPILER) + " " + EMULATED_FLAGS +
                              " -shared -D__CUDA_ARCH__=" + arch + "0 -I" + EMULATED_INCLUDE +
                              " -I" + name + " -include " + EMULATED_PRECOMPILED + " " + name +
                              "/kernel.cpp -o " + name + "/kernel.so > " + name + "/log 2>&1";
  const bool compiled = system(command.c_str()) == 0;
  program.log = read(folder / "log");
  if (compiled) {
    const std::string object = read(folder / "kernel.so");
    const std::uint64_t bytes = object.size();
    program.cubin.assign(reinterpret_cast<const char*>(&bytes), sizeof bytes);
    program.cubin += object;
  }
  fs::remove_all(folder);
  return compiled ? 0 : kCompilation;
}

}  // namespace

extern "C" {

const char* nvrtcGetErrorString(int) { return "an error of the emulated NVRTC"; }
int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
int nvrtcGetNumSupportedArchs(int* count) { return *count = 2, 0; }
int nvrtcGetSupportedArchs(int* archs) { return archs[0] = 80, archs[1] = 90, 0; }
int nvrtcCreateProgram(Program** program, const char* source, const char*, int count,
                       const char* const* headers, const char* const* names) {
  *program = new Program{source, {}, {}, {headers, headers + count}, {names, names + count}};
  return 0;
}
int nvrtcDestroyProgram(Program** program) { return delete *program, *program = nullptr, 0; }
int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  constexpr std::string_view kArch = "--gpu-architecture=sm_";
  for (int i = 0; i < count; ++i) {
    const std::string_view option = options[i];
    if (option.starts_with(kArch))
      return compile(*program, std::string(option.substr(kArch.size(), 2)));
  }
  return kInternal;
}
int nvrtcGetProgramLogSize(Program* program, std::size_t* size) {
  return *size = program->log.size() + 1, 0;
}
int nvrtcGetProgramLog(Program* program, char* log) { return strcpy(log, program->log.c_str()), 0; }
int nvrtcGetCUBINSize(Program* program, std::size_t* size) {
  return *size = program->cubin.size(), 0;
}
int nvrtcGetCUBIN(Program* program, char* cubin) {
  return memcpy(cubin, program->cubin.data(), program->cubin.size()), 0;
}
}
