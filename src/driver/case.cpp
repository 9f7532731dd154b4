#include "driver/case.hpp"

#include <algorithm>
#include <cmath>

#include "core/check.hpp"
#include "core/element.hpp"
#include "core/threads.hpp"

namespace pullback::driver {

HostTensor normal_tensor(DType dtype, std::initializer_list<std::int64_t> shape, Random& random,
                         double sigma) {
  HostTensor tensor(TensorSpec::contiguous(dtype, shape));
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, sigma * random.normal());
  return tensor;
}

namespace {

// Box and Muller's pairs, from generators that are a chunk's own.
template <class T>
void fill_normal(T* to, std::int64_t count, std::uint64_t seed, float sigma) {
  constexpr std::int64_t kChunk = 1 << 16;
  Threads(0).parallel_for((count + kChunk - 1) / kChunk, [&](std::int64_t chunk, int) {
    Random random(seed + static_cast<std::uint64_t>(chunk) * 0xd1342543de82ef95u);
    const std::int64_t end = std::min(count, (chunk + 1) * kChunk);
    for (std::int64_t i = chunk * kChunk; i < end; i += 2) {
      const std::uint64_t bits = random.bits();
      const float uniform = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
      const float angle = static_cast<float>(bits & 0xffffff) * (0x1p-23f * 3.14159265f);
      const float radius = sigma * std::sqrt(-2 * std::log(uniform));
      to[i] = static_cast<T>(radius * std::cos(angle));
      if (i + 1 < end) to[i + 1] = static_cast<T>(radius * std::sin(angle));
    }
  });
}

}  // namespace

HostTensor large_normal_tensor(DType dtype, std::initializer_list<std::int64_t> shape,
                               Random& random, double sigma) {
  HostTensor tensor(TensorSpec::contiguous(dtype, shape));
  const std::uint64_t seed = random.bits();
  const auto fill = [&](auto* data) {
    fill_normal(data, tensor.numel(), seed, static_cast<float>(sigma));
  };
  switch (dtype) {
    case DType::f64:
      fill(static_cast<double*>(tensor.data()));
      break;
    case DType::f32:
      fill(static_cast<float*>(tensor.data()));
      break;
    case DType::bf16:
      fill(static_cast<bfloat16*>(tensor.data()));
      break;
    case DType::f16:
      fill(static_cast<float16*>(tensor.data()));
      break;
    default:
      throw Error(ErrorCode::internal, "large_normal_tensor: not a floating dtype");
  }
  return tensor;
}

HostTensor integer_tensor(DType dtype, std::initializer_list<std::int64_t> shape, Random& random,
                          std::int64_t magnitude) {
  HostTensor tensor(TensorSpec::contiguous(dtype, shape));
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.set(i, static_cast<double>(random.integer(-magnitude, magnitude)));
  }
  return tensor;
}

HostTensor filled_tensor(DType dtype, std::initializer_list<std::int64_t> shape, double value) {
  HostTensor tensor(TensorSpec::contiguous(dtype, shape));
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, value);
  return tensor;
}

HostTensor tensor_of(DType dtype, std::initializer_list<std::int64_t> shape,
                     std::initializer_list<double> values) {
  HostTensor tensor(TensorSpec::contiguous(dtype, shape));
  if (tensor.numel() != static_cast<std::int64_t>(values.size())) {
    throw Error(ErrorCode::internal, "tensor_of: values do not fill the shape");
  }
  std::int64_t i = 0;
  for (double value : values) tensor.set(i++, value);
  return tensor;
}

HostTensor broadcast(const HostTensor& tensor, std::initializer_list<std::int64_t> shape) {
  TensorSpec spec = tensor.spec();
  int dim = 0;
  for (std::int64_t size : shape) {
    if (spec.shape[dim] == 1) spec.strides[dim] = 0;
    spec.shape[dim++] = size;
  }
  return HostTensor::borrow(spec, tensor.data(), std::make_shared<HostTensor>(tensor));
}

}  // namespace pullback::driver
