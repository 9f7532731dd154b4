#include "driver/block_layout.hpp"

#include <fmt/format.h>

#include "core/check.hpp"
#include "driver/driver.hpp"

namespace pullback::driver {

std::shared_ptr<const BlockLayout> layout_of(std::string_view op, const TensorMap& inputs,
                                             std::int64_t* batches) {
  const TensorSpec spec = spec_of(inputs, "layout");
  const Checker check(op);
  check.given("layout", spec);
  check.dtype("layout", spec, {DType::i64, DType::i32, DType::u8, DType::boolean});
  if (batches != nullptr && spec.rank == 4) {
    *batches = spec.shape[0];
  } else {
    check.rank("layout", spec, 3);
  }
  const HostTensor& layout = inputs.find("layout")->second;
  std::vector<std::uint8_t> present(static_cast<std::size_t>(layout.numel()));
  for (std::int64_t i = 0; i < layout.numel(); ++i) {
    const double value = layout.get(i);
    check.that(value == 0 || value == 1, "layout", "0 or 1", fmt::format("{}", value));
    present[static_cast<std::size_t>(i)] = value != 0;
  }
  const std::int64_t heads = spec.rank == 4 ? spec.shape[0] * spec.shape[1] : spec.shape[0];
  return std::make_shared<const BlockLayout>(heads, spec.shape[spec.rank - 2],
                                             spec.shape[spec.rank - 1], present);
}

HostTensor layout_tensor(const BlockLayout& layout, DType dtype) {
  HostTensor tensor(
      TensorSpec::contiguous(dtype, {layout.heads(), layout.rows(), layout.columns()}));
  const std::vector<std::uint8_t> present = layout.to_bytes();
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.set(i, present[static_cast<std::size_t>(i)]);
  }
  return tensor;
}

}  // namespace pullback::driver
