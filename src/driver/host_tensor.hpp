// HostTensor: a tensor with its memory, of any dtype, shape and strides. For tools and tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "driver/random.hpp"
#include "pullback/device.hpp"
#include "pullback/tensor.hpp"

namespace pullback::driver {

// Copies share their memory. Owned memory has guard margins before and after it, and every byte
// that is not an element (margins, stride gaps) holds kGuard, which reads as NaN or -1; so do the
// elements until they are written.
class HostTensor {
 public:
  static constexpr std::uint8_t kGuard = 0xff;

  HostTensor() = default;
  explicit HostTensor(const TensorSpec& spec);
  // Memory that `owner` keeps alive, a mapped file for example.
  static HostTensor borrow(const TensorSpec& spec, const void* data,
                           std::shared_ptr<const void> owner);

  const TensorSpec& spec() const { return spec_; }
  void* data() const { return data_; }
  std::int64_t numel() const { return spec_.numel(); }
  // Margins and gaps too; of borrowed memory the stretch that elements lie in.
  std::span<std::byte> memory() const;
  bool owns_memory() const { return storage_ != nullptr; }

  // `flat` counts elements in row-major order of the shape, whatever the strides.
  double get(std::int64_t flat) const;
  void set(std::int64_t flat, double value) const;
  // Elements from `flat` on: much faster, for long tensors.
  void load(std::int64_t flat, std::span<double> values) const;
  void store(std::int64_t flat, std::span<const double> values) const;

  // False when a byte that is not an element has changed. Always true for borrowed memory.
  bool guards_intact() const;

 private:
  TensorSpec spec_;
  void* data_ = nullptr;
  std::shared_ptr<const void> owner_;
  std::byte* storage_ = nullptr;  // null when borrowed
  std::size_t storage_bytes_ = 0;
};

using TensorMap = std::map<std::string, HostTensor, std::less<>>;

// Calls body(first, count) for stretches that cover [0, numel), none longer than kStretch, on all
// cores.
inline constexpr std::int64_t kStretch = 4096;
void for_stretches(std::int64_t numel,
                   const std::function<void(std::int64_t first, std::int64_t count)>& body);

// A row-major copy.
HostTensor contiguous_copy(const HostTensor& tensor);
// All floating tensors as f64: what the reference is given.
TensorMap in_double(const TensorMap& tensors);

// A spec of the same shape with permuted, padded and partly reversed dimensions.
TensorSpec random_layout(const TensorSpec& spec, Random& random);
HostTensor relaid(const HostTensor& tensor, const TensorSpec& layout);

// Same dtype, shape and bits of every element (strides may differ).
bool same_bits(const HostTensor& a, const HostTensor& b);

// Scratch memory for plan.run().
class WorkspaceBuffer {
 public:
  explicit WorkspaceBuffer(std::size_t bytes = 0);
  Workspace get() const { return {data_.get(), bytes_}; }

 private:
  std::shared_ptr<std::byte> data_;
  std::size_t bytes_;
};

}  // namespace pullback::driver
