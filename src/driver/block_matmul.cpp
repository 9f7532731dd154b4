#include "pullback/block_sparse.hpp"

#include "core/check.hpp"
#include "driver/block_layout.hpp"
#include "driver/driver.hpp"
#include "driver/session.hpp"

namespace pullback::driver {
namespace {

constexpr std::string_view kOp = "block_matmul";

// The side of a sparse input's blocks; for sdd what the dense matrices leave to each block, and 16
// when there is none.
std::int64_t block_of(const BlockMatmulProblem& p) {
  if (p.mode == BlockMatmulMode::dsd) return p.a.shape[2];
  if (p.mode == BlockMatmulMode::dds) return p.b.shape[2];
  if (p.layout->rows() > 0) return p.a.shape[p.transpose_a ? 3 : 2] / p.layout->rows();
  if (p.layout->columns() > 0) return p.b.shape[p.transpose_b ? 2 : 3] / p.layout->columns();
  return 16;
}

BlockMatmulProblem problem_of(const Request& request) {
  OptionReader options(kOp, request.options);
  BlockMatmulProblem p;
  const int mode = options.choice("mode", {"sdd", "dsd", "dds"});
  if (mode < 0) fail(ErrorCode::invalid_argument, kOp, "--mode", "sdd or dsd or dds", "none");
  p.mode = static_cast<BlockMatmulMode>(mode);
  p.transpose_a = options.boolean("transpose-a", false);
  p.transpose_b = options.boolean("transpose-b", false);
  p.transpose_c = options.boolean("transpose-c", false);
  options.finish();

  p.layout = layout_of(kOp, request.inputs);
  p.a = spec_of(request.inputs, "a");
  p.b = spec_of(request.inputs, "b");
  p.d_c = spec_of(request.inputs, "d_c");
  const Checker check(kOp);
  check.rank("a", p.a, 4);
  check.rank("b", p.b, 4);
  p.block = block_of(p);
  return p;
}

class BlockMatmulSession final : public OpSession<BlockMatmulProblem, BlockMatmulTensors> {
 public:
  explicit BlockMatmulSession(const Request& request) : OpSession(request) {
    BlockMatmulProblem p = complete(problem_of(request));
    tensors_.a = input("a");
    tensors_.b = input("b");
    tensors_.d_c = input("d_c");
    tensors_.c = output("c", p.c);
    if (request.backward) {
      tensors_.d_a = output("d_a", p.d_a);
      tensors_.d_b = output("d_b", p.d_b);
    }
    make_plans(p);
  }
};

std::unique_ptr<Session> prepare(const Request& request) {
  check_inputs(block_matmul_driver(), request);
  return std::make_unique<BlockMatmulSession>(request);
}

Cost cost(const Request& request, Pass pass) {
  const BlockMatmulProblem p = complete(problem_of(request));
  // Every element of a block meets the dense matrices along one dense dimension.
  const TensorSpec& dense = p.mode == BlockMatmulMode::dds ? p.a : p.b;
  const bool transposed = p.mode == BlockMatmulMode::dds ? p.transpose_a : p.transpose_b;
  const bool along_rows = (p.mode == BlockMatmulMode::dsd) == transposed;
  const std::int64_t length = dense.shape[along_rows ? 2 : 3];
  const double block_elements =
      static_cast<double>(p.a.shape[0]) * static_cast<double>(p.layout->nnz() * p.block * p.block);
  Cost cost;
  cost.flops = 2 * block_elements * static_cast<double>(length);
  if (pass == Pass::forward) {
    cost.bytes = compulsory_bytes({&p.a, &p.b, &p.c});
  } else {
    cost.flops *= 2;
    cost.bytes = compulsory_bytes({&p.a, &p.b, &p.d_c, &p.d_a, &p.d_b});
  }
  return cost;
}

}  // namespace

const OpDriver& block_matmul_driver() {
  static const OpDriver driver{
      .name = kOp,
      .summary = "matrix products with one block-sparse matrix: c = op(a) op(b)",
      .inputs = {{"a", "[Z,H,M,K], [Z,H,K,M], or for dsd [Z,nnz,b,b]", true},
                 {"b", "[Z,H,K,N], [Z,H,N,K], or for dds [Z,nnz,b,b]", true},
                 {"layout", "[H,R,C] of 0 and 1", true},
                 {"d_c", "like c", true}},
      .outputs = "c",
      .options = {{"mode", "sdd|dsd|dds", "which of c, a, b is sparse"},
                  {"transpose-a", "true|false", "a is stored transposed"},
                  {"transpose-b", "true|false", "b is stored transposed"},
                  {"transpose-c", "true|false", "c is stored transposed"}},
      .cotangents = {{"c", "d_c"}},
      .gradients = {{"a", "d_a"}, {"b", "d_b"}},
      .prepare = prepare,
      .cost = cost};
  return driver;
}

}  // namespace pullback::driver
