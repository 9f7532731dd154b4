#include "pullback/tensor.hpp"

#include <fmt/format.h>

#include "core/check.hpp"

namespace pullback {

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "f64";
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::i64:
      return "i64";
    case DType::i32:
      return "i32";
    case DType::u8:
      return "u8";
    case DType::boolean:
      return "bool";
  }
  return "?";
}

TensorSpec TensorSpec::contiguous(DType dtype, std::span<const std::int64_t> shape) {
  if (shape.size() > kMaxRank) {
    fail(ErrorCode::invalid_argument, "TensorSpec", "shape",
         fmt::format("at most {} dimensions", kMaxRank), fmt::format("{}", shape.size()));
  }
  TensorSpec spec;
  spec.dtype = dtype;
  spec.rank = static_cast<int>(shape.size());
  // Unsigned, so that absurd sizes wrap instead of overflowing; Checker::sane refuses them.
  std::uint64_t stride = 1;
  for (int dim = spec.rank - 1; dim >= 0; --dim) {
    spec.shape[dim] = shape[dim];
    spec.strides[dim] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(shape[dim] > 0 ? shape[dim] : 1);
  }
  return spec;
}

TensorSpec TensorSpec::contiguous(DType dtype, std::initializer_list<std::int64_t> shape) {
  return contiguous(dtype, std::span<const std::int64_t>(shape.begin(), shape.size()));
}

std::int64_t TensorSpec::numel() const {
  std::int64_t count = 1;
  for (int dim = 0; dim < rank; ++dim) count *= shape[dim];
  return count;
}

bool TensorSpec::is_contiguous() const {
  std::uint64_t expected = 1;  // unsigned as above: this also describes sizes that are refused
  for (int dim = rank - 1; dim >= 0; --dim) {
    if (shape[dim] == 0) return true;
    if (shape[dim] != 1 && strides[dim] != static_cast<std::int64_t>(expected)) return false;
    expected *= static_cast<std::uint64_t>(shape[dim]);
  }
  return true;
}

std::array<std::int64_t, 2> TensorSpec::offset_range() const {
  std::array<std::int64_t, 2> range{0, 0};
  for (int dim = 0; dim < rank; ++dim) {
    if (shape[dim] == 0) return {0, -1};
    range[strides[dim] > 0 ? 1 : 0] += strides[dim] * (shape[dim] - 1);
  }
  return range;
}

std::string TensorSpec::to_string() const {
  if (!given()) return "none";
  const std::span<const std::int64_t> sizes = shape_of(*this);
  std::string text = fmt::format("{} {}", name_of(dtype), shape_text(sizes));
  if (!is_contiguous()) text += " strides " + shape_text({strides.data(), sizes.size()});
  return text;
}

}  // namespace pullback
