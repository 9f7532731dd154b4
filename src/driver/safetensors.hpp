// safetensors files: named tensors with a JSON header (format: github.com/huggingface/safetensors).
//
// The reader trusts nothing: whatever a file holds, the result is tensors inside the mapping or an
// Error(invalid_argument) that names file and tensor. The writer makes a whole file or none.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "driver/host_tensor.hpp"

namespace pullback::driver {

// The tensors of a file image. They borrow `bytes`, which `owner` keeps alive, except where the
// image misaligns them: those are copied. `origin` names the image in messages.
TensorMap parse_safetensors(std::span<const std::byte> bytes, std::string_view origin,
                            std::shared_ptr<const void> owner = nullptr);

// Maps the file; the mapping lives as long as a tensor of it. The file may be replaced by another
// (renamed over) meanwhile, but must not be cut short in place.
TensorMap read_safetensors(const std::string& path);

// To an OutputFile (driver/output_file.hpp): `path` may be the file whose tensors are mapped.
void write_safetensors(const std::string& path, const TensorMap& tensors);

// "F64", "BF16", "BOOL", …
std::string_view safetensors_name(DType dtype);

// Text for a one-line message: control characters escaped, and the end cut off when it is long.
std::string printable(std::string_view text, std::size_t limit = 64);

}  // namespace pullback::driver
