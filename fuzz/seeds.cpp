// fuzz_seeds FOLDER: writes FOLDER/safetensors and FOLDER/capi, the corpora that fuzzing starts
// from.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "driver/case.hpp"
#include "driver/safetensors.hpp"

namespace {

using namespace pullback;
using driver::Random;

void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// A header of the given text with `data_bytes` bytes behind it, whether or not the two agree.
std::string image(const std::string& header, std::size_t data_bytes) {
  std::string bytes;
  for (int byte = 0; byte < 8; ++byte) {
    bytes += static_cast<char>(header.size() >> (8 * byte) & 0xff);
  }
  return bytes + header + std::string(data_bytes, '\x3f');
}

void safetensors_seeds(const std::filesystem::path& folder) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32,
                      DType::u8, DType::boolean}) {
    driver::TensorMap tensors;
    tensors["x"] = driver::filled_tensor(dtype, {2, 3}, 1);
    tensors["empty"] = driver::filled_tensor(dtype, {0, 3}, 1);
    tensors["scalar"] = driver::filled_tensor(DType::f32, {}, 1);
    driver::write_safetensors(folder / std::string(name_of(dtype)), tensors);
  }
  const std::string entry = R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  write_file(folder / "metadata", image(R"({"__metadata__":{"a":"b"},"x":)" + entry + "}", 8));
  write_file(folder / "overlap", image(R"({"x":)" + entry + R"(,"y":)" + entry + "}", 8));
  write_file(folder / "truncated", image(R"({"x":)" + entry + "}", 7));
  write_file(folder / "no_tensors", image("{}", 0));
}

// Random bytes of a length that fills a problem, an op in each.
void capi_seeds(const std::filesystem::path& folder) {
  Random random(2);
  for (int seed = 0; seed < 256; ++seed) {
    std::string bytes(256 + 8 * static_cast<std::size_t>(seed), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random.bits());
    write_file(folder / std::to_string(seed), bytes);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: fuzz_seeds FOLDER\n");
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  std::filesystem::create_directories(folder / "safetensors");
  std::filesystem::create_directories(folder / "capi");
  safetensors_seeds(folder / "safetensors");
  capi_seeds(folder / "capi");
}
