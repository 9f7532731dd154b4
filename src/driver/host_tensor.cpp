#include "driver/host_tensor.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <numeric>
#include <vector>

#include "core/check.hpp"
#include "core/element.hpp"
#include "core/threads.hpp"

namespace pullback::driver {
namespace {

constexpr std::size_t kMargin = 512;

std::byte* allocate(std::size_t bytes) {
  return static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kWorkspaceAlignment}));
}

// With all cores: a benchmark's tensors have gigabytes, and the first touch of a page is slow.
void fill(std::byte* memory, std::uint8_t value, std::size_t bytes) {
  constexpr std::size_t kPiece = std::size_t{4} << 20;
  const auto pieces = static_cast<std::int64_t>((bytes + kPiece - 1) / kPiece);
  const auto fill_piece = [&](std::int64_t piece, int) {
    const std::size_t begin = static_cast<std::size_t>(piece) * kPiece;
    std::memset(memory + begin, value, std::min(kPiece, bytes - begin));
  };
  if (pieces == 1) return fill_piece(0, 0);
  Threads(0).parallel_for(pieces, fill_piece);
}

struct Free {
  void operator()(const void* memory) const {
    ::operator delete(const_cast<void*>(memory), std::align_val_t{kWorkspaceAlignment});
  }
};

// Element offset of a row-major position.
std::int64_t offset_of(const TensorSpec& spec, std::int64_t flat) {
  std::int64_t offset = 0;
  for (int dim = spec.rank - 1; dim >= 0; --dim) {
    offset += flat % spec.shape[dim] * spec.strides[dim];
    flat /= spec.shape[dim];
  }
  return offset;
}

}  // namespace

void for_stretches(std::int64_t numel,
                   const std::function<void(std::int64_t first, std::int64_t count)>& body) {
  const std::int64_t stretches = (numel + kStretch - 1) / kStretch;
  const auto stretch = [&](std::int64_t i, int) {
    body(i * kStretch, std::min(kStretch, numel - i * kStretch));
  };
  if (stretches <= 1) {
    if (stretches == 1) stretch(0, 0);
    return;
  }
  Threads(0).parallel_for(stretches, stretch, 16);
}

HostTensor::HostTensor(const TensorSpec& spec) : spec_(spec) {
  Checker("HostTensor").sane("spec", spec);
  const auto [low, high] = spec.offset_range();
  const std::size_t size = size_of(spec.dtype);
  storage_bytes_ = static_cast<std::size_t>(high - low + 1) * size + 2 * kMargin;
  storage_ = allocate(storage_bytes_);
  owner_ = std::shared_ptr<const void>(storage_, Free());
  fill(storage_, kGuard, storage_bytes_);
  data_ = storage_ + kMargin - low * static_cast<std::int64_t>(size);
}

HostTensor HostTensor::borrow(const TensorSpec& spec, const void* data,
                              std::shared_ptr<const void> owner) {
  HostTensor tensor;
  tensor.spec_ = spec;
  tensor.data_ = const_cast<void*>(data);
  tensor.owner_ = std::move(owner);
  return tensor;
}

std::span<std::byte> HostTensor::memory() const {
  if (owns_memory()) return {storage_, storage_bytes_};
  const auto [low, high] = spec_.offset_range();
  const auto size = static_cast<std::int64_t>(size_of(spec_.dtype));
  return {static_cast<std::byte*>(data_) + low * size,
          static_cast<std::size_t>((high - low + 1) * size)};
}

double HostTensor::get(std::int64_t flat) const {
  return load_element(spec_.dtype, data_, offset_of(spec_, flat));
}

void HostTensor::set(std::int64_t flat, double value) const {
  store_element(spec_.dtype, data_, offset_of(spec_, flat), value);
}

void HostTensor::load(std::int64_t flat, std::span<double> values) const {
  if (is_floating(spec_.dtype) && spec_.is_contiguous()) {
    dispatch_floating(spec_.dtype, [&]<class T>() {
      std::transform(static_cast<const T*>(data_) + flat,
                     static_cast<const T*>(data_) + flat + values.size(), values.begin(),
                     to_double<T>);
    });
    return;
  }
  for (double& value : values) value = get(flat++);
}

void HostTensor::store(std::int64_t flat, std::span<const double> values) const {
  if (is_floating(spec_.dtype) && spec_.is_contiguous()) {
    dispatch_floating(spec_.dtype, [&]<class T>() {
      std::ranges::transform(values, static_cast<T*>(data_) + flat, from_double<T>);
    });
    return;
  }
  for (double value : values) set(flat++, value);
}

bool HostTensor::guards_intact() const {
  if (storage_ == nullptr) return true;
  std::vector<bool> element(storage_bytes_, false);
  const std::size_t size = size_of(spec_.dtype);
  const auto base = static_cast<std::byte*>(data_) - storage_;
  for (std::int64_t i = 0; i < numel(); ++i) {
    const auto begin = base + offset_of(spec_, i) * static_cast<std::int64_t>(size);
    for (std::size_t byte = 0; byte < size; ++byte) {
      element[static_cast<std::size_t>(begin) + byte] = true;
    }
  }
  for (std::size_t i = 0; i < storage_bytes_; ++i) {
    if (!element[i] && storage_[i] != std::byte{kGuard}) return false;
  }
  return true;
}

HostTensor contiguous_copy(const HostTensor& tensor) {
  return relaid(tensor, TensorSpec::contiguous(tensor.spec().dtype, shape_of(tensor.spec())));
}

namespace {

HostTensor in_double(const HostTensor& tensor) {
  HostTensor copy(TensorSpec::contiguous(DType::f64, shape_of(tensor.spec())));
  for_stretches(tensor.numel(), [&](std::int64_t first, std::int64_t count) {
    std::array<double, kStretch> buffer;
    const std::span values(buffer.data(), static_cast<std::size_t>(count));
    tensor.load(first, values);
    copy.store(first, values);
  });
  return copy;
}

}  // namespace

TensorMap in_double(const TensorMap& tensors) {
  TensorMap result;
  for (const auto& [name, tensor] : tensors) {
    result[name] = is_floating(tensor.spec().dtype) ? in_double(tensor) : tensor;
  }
  return result;
}

TensorSpec random_layout(const TensorSpec& spec, Random& random) {
  TensorSpec layout = spec;
  std::vector<int> order(static_cast<std::size_t>(spec.rank));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1],
              order[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(i) - 1))]);
  }
  std::int64_t stride = random.integer(1, 2);
  for (int dim : order) {
    layout.strides[dim] = random.chance(0.25) ? -stride : stride;
    stride = stride * std::max<std::int64_t>(spec.shape[dim], 1) + random.integer(0, 3);
  }
  return layout;
}

HostTensor relaid(const HostTensor& tensor, const TensorSpec& layout) {
  HostTensor copy(layout);
  const std::size_t size = size_of(layout.dtype);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    std::memcpy(static_cast<std::byte*>(copy.data()) +
                    offset_of(layout, i) * static_cast<std::int64_t>(size),
                static_cast<const std::byte*>(tensor.data()) +
                    offset_of(tensor.spec(), i) * static_cast<std::int64_t>(size),
                size);
  }
  return copy;
}

bool same_bits(const HostTensor& a, const HostTensor& b) {
  if (a.spec().dtype != b.spec().dtype || a.spec().shape != b.spec().shape) return false;
  const std::size_t size = size_of(a.spec().dtype);
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const auto x = static_cast<const std::byte*>(a.data()) +
                   offset_of(a.spec(), i) * static_cast<std::int64_t>(size);
    const auto y = static_cast<const std::byte*>(b.data()) +
                   offset_of(b.spec(), i) * static_cast<std::int64_t>(size);
    if (std::memcmp(x, y, size) != 0) return false;
  }
  return true;
}

WorkspaceBuffer::WorkspaceBuffer(std::size_t bytes) : bytes_(bytes) {
  if (bytes > 0) data_ = std::shared_ptr<std::byte>(allocate(bytes), Free());
}

}  // namespace pullback::driver
