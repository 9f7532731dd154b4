// The "layout" input of the block-sparse ops, to and from BlockLayout.
#pragma once

#include <memory>
#include <string_view>

#include "driver/host_tensor.hpp"
#include "pullback/block_layout.hpp"

namespace pullback::driver {

// Reads the tensor "layout", [H,R,C] of 0 and 1 in any integer dtype; with `batches` not null also
// [B,H,R,C], whose planes become the layout's heads.
std::shared_ptr<const BlockLayout> layout_of(std::string_view op, const TensorMap& inputs,
                                             std::int64_t* batches = nullptr);

HostTensor layout_tensor(const BlockLayout& layout, DType dtype = DType::i32);

}  // namespace pullback::driver
