#include "driver/case.hpp"

#include <array>
#include <limits>

#include "core/check.hpp"

namespace pullback::driver {

HostTensor normal_tensor(DType dtype, std::span<const std::int64_t> shape, Random& random,
                         double sigma) {
  HostTensor tensor(TensorSpec::contiguous(dtype, shape));
  if (random.fills_nothing()) return tensor;
  for_stretches(tensor.numel(), [&, from = random](std::int64_t first, std::int64_t count) {
    Random numbers = from;
    numbers.skip(first * Random::kBitsOfNormal);
    std::array<double, kStretch> buffer;
    const std::span values(buffer.data(), static_cast<std::size_t>(count));
    for (double& value : values) value = sigma * numbers.normal();
    tensor.store(first, values);
  });
  random.skip(tensor.numel() * Random::kBitsOfNormal);
  return tensor;
}

HostTensor normal_tensor(DType dtype, std::initializer_list<std::int64_t> shape, Random& random,
                         double sigma) {
  return normal_tensor(dtype, std::span(shape.begin(), shape.size()), random, sigma);
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

double lowest_finite(DType dtype) {
  if (dtype == DType::f64) return std::numeric_limits<double>::lowest();
  if (dtype == DType::bf16) return -0x1.fep127;
  return dtype == DType::f16 ? -65504.0 : double{std::numeric_limits<float>::lowest()};
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
