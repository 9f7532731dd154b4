// Any bytes given to the safetensors reader are tensors inside of them or an invalid_argument.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "driver/safetensors.hpp"
#include "pullback/error.hpp"

using namespace pullback;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // At two alignments: the reader copies what an image misaligns.
  for (const std::size_t shift : {0, 1}) {
    const auto image = std::make_shared<std::vector<std::byte>>(shift + size);
    std::copy_n(reinterpret_cast<const std::byte*>(data), size, image->begin() + shift);
    try {
      const driver::TensorMap tensors =
          driver::parse_safetensors(std::span(*image).subspan(shift), "fuzz", image);
      double sum = 0;
      for (const auto& [name, tensor] : tensors) {
        for (std::int64_t i = 0; i < tensor.numel(); ++i) sum += tensor.get(i);
      }
      const volatile double keep = sum;
      static_cast<void>(keep);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::invalid_argument) throw;
    }
  }
  return 0;
}
