// What a plan keeps on the device, in one piece.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "cuda/memory.hpp"

namespace pullback::cuda {

// Tables that travel to the device together. Until upload() a pointer from add() holds an offset.
class DeviceTables {
 public:
  template <class T>
  const T* add(std::span<const T> table) {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::size_t begin = (bytes_.size() + 15) / 16 * 16;
    bytes_.resize(begin + table.size_bytes());
    if (!table.empty()) std::memcpy(bytes_.data() + begin, table.data(), table.size_bytes());
    return reinterpret_cast<const T*>(begin);
  }
  void upload(const DeviceInfo& device) {
    memory_ = DeviceMemory(device, bytes_);
    bytes_ = {};
  }
  template <class T>
  void resolve(const T*& pointer) const {
    pointer = reinterpret_cast<const T*>(memory_.data() + reinterpret_cast<std::size_t>(pointer));
  }

 private:
  std::vector<std::byte> bytes_;
  DeviceMemory memory_;
};

}  // namespace pullback::cuda
