#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "driver/output_file.hpp"
#include "driver/safetensors.hpp"

namespace pullback::driver {
namespace {

std::string header_of(const TensorMap& tensors, const std::vector<const std::string*>& order) {
  std::string header = "{";
  std::uint64_t offset = 0;
  for (const std::string* name : order) {
    const TensorSpec& spec = tensors.find(*name)->second.spec();
    const std::uint64_t bytes = static_cast<std::uint64_t>(spec.numel()) * size_of(spec.dtype);
    const std::vector<std::int64_t> shape(spec.shape.begin(), spec.shape.begin() + spec.rank);
    if (header.size() > 1) header += ",";
    header += fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}",
                          nlohmann::json(*name).dump(), safetensors_name(spec.dtype),
                          nlohmann::json(shape).dump(), offset, offset + bytes);
    offset += bytes;
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');  // aligns the data in the file
  return header;
}

}  // namespace

void write_safetensors(const std::string& path, const TensorMap& tensors) {
  check_output_file(path);  // before what takes long
  // Wide elements first: every tensor is then aligned for its dtype.
  std::vector<const std::string*> order;
  for (const auto& [name, tensor] : tensors) order.push_back(&name);
  std::stable_sort(order.begin(), order.end(), [&](const std::string* a, const std::string* b) {
    return size_of(tensors.find(*a)->second.spec().dtype) >
           size_of(tensors.find(*b)->second.spec().dtype);
  });
  const std::string header = header_of(tensors, order);
  const std::uint64_t header_bytes = header.size();

  OutputFile file(path);
  file.write(&header_bytes, sizeof(header_bytes));
  file.write(header.data(), header.size());
  for (const std::string* name : order) {
    const HostTensor& tensor = tensors.find(*name)->second;
    const HostTensor packed = tensor.spec().is_contiguous() ? tensor : contiguous_copy(tensor);
    file.write(packed.data(),
               static_cast<std::size_t>(packed.numel()) * size_of(packed.spec().dtype));
  }
  file.commit();
}

}  // namespace pullback::driver
