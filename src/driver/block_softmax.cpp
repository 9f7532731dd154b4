#include "pullback/block_sparse.hpp"

#include "core/check.hpp"
#include "core/element.hpp"
#include "driver/block_layout.hpp"
#include "driver/driver.hpp"
#include "driver/session.hpp"

namespace pullback::driver {
namespace {

constexpr std::string_view kOp = "block_softmax";

BlockSoftmaxProblem problem_of(const Request& request, bool& mask_gradients) {
  OptionReader options(kOp, request.options);
  BlockSoftmaxProblem p;
  p.scale = options.number("scale", 1);
  if (options.choice("key-padding-mode", {"add", "keep"}) == 1) p.key_padding_mode = MaskMode::keep;
  if (options.choice("attn-mask-mode", {"add", "keep"}) == 0) p.attn_mask_mode = MaskMode::add;
  mask_gradients = options.boolean("mask-gradients", false);
  options.finish();

  p.layout = layout_of(kOp, request.inputs);
  p.x = spec_of(request.inputs, "x");
  p.rpe = spec_of(request.inputs, "rpe");
  p.key_padding_mask = spec_of(request.inputs, "key_padding_mask");
  p.attn_mask = spec_of(request.inputs, "attn_mask");
  p.d_y = spec_of(request.inputs, "d_y");
  Checker(kOp).rank("x", p.x, 4);
  p.block = p.x.shape[2];
  return p;
}

class BlockSoftmaxSession final : public OpSession<BlockSoftmaxProblem, BlockSoftmaxTensors> {
 public:
  explicit BlockSoftmaxSession(const Request& request) : OpSession(request) {
    bool mask_gradients = false;
    BlockSoftmaxProblem p = complete(problem_of(request, mask_gradients));
    tensors_.x = input("x");
    tensors_.rpe = input("rpe");
    tensors_.key_padding_mask = input("key_padding_mask");
    tensors_.attn_mask = input("attn_mask");
    tensors_.d_y = input("d_y");
    tensors_.y = output("y", p.y);
    if (request.backward) {
      tensors_.d_x = output("d_x", p.d_x);
      if (p.d_rpe.given()) tensors_.d_rpe = output("d_rpe", p.d_rpe);
      if (mask_gradients && p.d_key_padding_mask.given()) {
        tensors_.d_key_padding_mask = output("d_key_padding_mask", p.d_key_padding_mask);
      }
      if (mask_gradients && p.d_attn_mask.given()) {
        tensors_.d_attn_mask = output("d_attn_mask", p.d_attn_mask);
      }
    }
    make_plans(p);
  }
};

std::unique_ptr<Session> prepare(const Request& request) {
  check_inputs(block_softmax_driver(), request);
  return std::make_unique<BlockSoftmaxSession>(request);
}

// Bytes of an added term that blocks reach, at most: elements where no block is need not be read.
double seen_bytes(const TensorSpec& term, double blocks, std::int64_t b) {
  if (!term.given()) return 0;
  const double most =
      blocks * static_cast<double>(b * b) * static_cast<double>(size_of(term.dtype));
  return std::min(most, compulsory_bytes({&term}));
}

Cost cost(const Request& request, Pass pass) {
  bool mask_gradients = false;
  const BlockSoftmaxProblem p = complete(problem_of(request, mask_gradients));
  Cost cost;
  if (pass == Pass::forward) {
    const double blocks = static_cast<double>(p.x.shape[0]) * static_cast<double>(p.x.shape[1]);
    cost.bytes = compulsory_bytes({&p.x, &p.y, &p.key_padding_mask}) +
                 seen_bytes(p.rpe, blocks, p.block) + seen_bytes(p.attn_mask, blocks, p.block);
  } else {
    cost.bytes = compulsory_bytes({&p.y, &p.d_y, &p.d_x, &p.d_rpe});
    if (mask_gradients) cost.bytes += compulsory_bytes({&p.d_key_padding_mask, &p.d_attn_mask});
  }
  return cost;
}

}  // namespace

const OpDriver& block_softmax_driver() {
  static const OpDriver driver{
      .name = kOp,
      .summary = "softmax over the blocks of each row of a block-sparse score matrix",
      .inputs = {{"x", "[Z,nnz,b,b]", true},
                 {"layout", "[H,R,C] of 0 and 1", true},
                 {"rpe", "[Z|1,H|1,R*b,C*b]", false},
                 {"key_padding_mask", "[Z,C*b]", false},
                 {"attn_mask", "[R*b,C*b]", false},
                 {"d_y", "[Z,nnz,b,b]", true}},
      .outputs = "y",
      .options = {{"scale", "X", "factor of x (default 1)"},
                  {"key-padding-mode", "add|keep", "add to the scores (default), or 0 hides"},
                  {"attn-mask-mode", "add|keep", "add to the scores, or 0 hides (default)"},
                  {"mask-gradients", "true|false",
                   "also d_key_padding_mask and d_attn_mask, of masks in add mode"}},
      .cotangents = {{"y", "d_y"}},
      .gradients = {{"x", "d_x"},
                    {"rpe", "d_rpe"},
                    {"key_padding_mask", "d_key_padding_mask"},
                    {"attn_mask", "d_attn_mask"}},
      .prepare = prepare,
      .cost = cost};
  return driver;
}

}  // namespace pullback::driver
