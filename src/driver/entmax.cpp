// entmax by name: tensors x, d_y, alpha, mask, offsets; see docs/command-line.md.
#include "pullback/entmax.hpp"

#include <string>

#include "core/check.hpp"
#include "driver/driver.hpp"
#include "driver/session.hpp"

namespace pullback::driver {
namespace {

constexpr std::string_view kOp = "entmax";

struct Options {
  double alpha;
  int axis;
  bool from_support, d_alpha, check_indices;
};

Options read_options(const Request& request) {
  OptionReader reader(kOp, request.options);
  Options options{};
  const bool per_row = request.inputs.contains("alpha");
  options.alpha = reader.number("alpha", 2);
  if (per_row && reader.has("alpha")) {
    fail(ErrorCode::invalid_argument, kOp, "--alpha", "no option beside the tensor alpha",
         request.options.find("alpha")->second, "pass one of the two");
  }
  const std::int64_t axis = reader.integer("axis", -1);
  if (axis < -kMaxRank || axis >= kMaxRank) {
    fail(ErrorCode::invalid_argument, kOp, "--axis", "the number of an axis of x",
         std::to_string(axis));
  }
  options.axis = static_cast<int>(axis);
  options.from_support = reader.choice("saved", {"y", "support"}) == 1;
  options.d_alpha = reader.boolean("d-alpha", per_row);
  options.check_indices = reader.boolean("check-indices", false);
  reader.finish();
  if (options.from_support && options.d_alpha) {
    fail(ErrorCode::invalid_argument, kOp, "--saved", "y, which d_alpha is computed from",
         "support", "leave out --saved or --d-alpha");
  }
  if (options.from_support && request.inputs.contains("offsets")) {
    fail(ErrorCode::invalid_argument, kOp, "--saved", "y with offsets", "support",
         "leave out --saved");
  }
  if (options.from_support && (per_row || options.alpha != 2)) {
    fail(ErrorCode::invalid_argument, kOp, "--saved", "y where alpha is not 2", "support");
  }
  return options;
}

EntmaxProblem problem_of(const Request& request, const Options& options) {
  EntmaxProblem problem;
  problem.x = spec_of(request.inputs, "x");
  problem.axis = options.axis;
  problem.alpha = options.alpha;
  problem.alpha_per_row = spec_of(request.inputs, "alpha");
  problem.mask = spec_of(request.inputs, "mask");
  problem.offsets = spec_of(request.inputs, "offsets");
  problem.check_indices = options.check_indices;
  problem.d_y = spec_of(request.inputs, "d_y");
  try {
    return complete(problem);
  } catch (const Error& error) {
    // The tensor is called alpha here.
    constexpr std::string_view kName = "alpha_per_row";
    std::string message = error.what();
    const std::size_t at = message.find(kName);
    if (at == std::string::npos) throw;
    throw Error(error.code(), message.replace(at, kName.size(), "alpha"));
  }
}

class EntmaxSession final : public OpSession<EntmaxProblem, EntmaxTensors> {
 public:
  explicit EntmaxSession(const Request& request) : OpSession(request) {
    const Options options = read_options(request);
    EntmaxProblem problem = problem_of(request, options);
    tensors_.x = input("x");
    tensors_.alpha_per_row = input("alpha");
    tensors_.mask = input("mask");
    tensors_.offsets = input("offsets");
    tensors_.d_y = input("d_y");
    tensors_.y = output("y", problem.y);
    tensors_.tau = output("tau", problem.tau);
    if (options.from_support) {
      tensors_.support = output("support", problem.support);
      tensors_.support_size = output("support_size", problem.support_size);
    }
    if (request.backward) {
      tensors_.d_x = output("d_x", problem.d_x);
      if (options.d_alpha) tensors_.d_alpha = output("d_alpha", problem.d_alpha);
    }
    make_plans(problem);
    if (options.from_support) backward_tensors_.y = nullptr;
  }
};

const OpDriver& driver();

std::unique_ptr<Session> prepare(const Request& request) {
  check_inputs(driver(), request);
  return std::make_unique<EntmaxSession>(request);
}

// From the support mask, d_y moves only where the mask has a bit: it is not counted.
Cost cost(const Request& request, Pass pass) {
  const Options options = read_options(request);
  const EntmaxProblem p = problem_of(request, options);
  Cost cost;
  if (pass == Pass::forward) {
    cost.bytes = compulsory_bytes({&p.x, &p.alpha_per_row, &p.mask, &p.offsets, &p.y, &p.tau});
    if (options.from_support) cost.bytes += compulsory_bytes({&p.support, &p.support_size});
  } else if (options.from_support) {
    cost.bytes = compulsory_bytes({&p.support, &p.support_size, &p.d_x});
  } else {
    cost.bytes = compulsory_bytes({&p.y, &p.alpha_per_row, &p.offsets, &p.d_y, &p.d_x});
    if (options.d_alpha) cost.bytes += compulsory_bytes({&p.d_alpha});
  }
  return cost;
}

const OpDriver& driver() {
  static const OpDriver driver{
      .name = kOp,
      .summary = "sparse softmax family: alpha 1 softmax, 1.5, 2 sparsemax, any alpha >= 1",
      .inputs = {{"x", "of rank 1 to 8", true},
                 {"d_y", "like x", true},
                 {"alpha", "one per row, f32 (f64 for f64)", false},
                 {"mask", "like x, u8 or bool, 0 hides", false},
                 {"offsets", "[G+1], ragged rows along the axis", false}},
      .outputs = "y, tau; support and support_size, with --saved support",
      .options = {{"alpha", "A", "1 softmax, 1.5, 2 sparsemax (default), any A >= 1"},
                  {"axis", "K", "the axis of the rows (default -1)"},
                  {"saved", "y|support", "what the backward reads (default y)"},
                  {"d-alpha", "true|false", "the gradient of alpha (default: if a tensor)"},
                  {"check-indices", "true|false", "refuse bad offsets (default false)"}},
      .cotangents = {{"y", "d_y"}},
      .gradients = {{"x", "d_x"}, {"alpha", "d_alpha"}},
      .has_unit_term = [](const Request&, std::string_view output) { return output == "tau"; },
      // b (x - max) - theta: in the support both terms lie in [-1, 0]. Three roundings of at most
      // half an epsilon, and theta's own.
      .rounded = {{"x", 2, false}},
      .prepare = prepare,
      .cost = cost,
  };
  return driver;
}

}  // namespace

const OpDriver& entmax_driver() { return driver(); }

}  // namespace pullback::driver
