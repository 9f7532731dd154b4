#include "pullback/segment.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/check.hpp"
#include "core/element.hpp"
#include "driver/driver.hpp"
#include "driver/session.hpp"
#include "ops/segment/index.hpp"
#include "ops/segment/problem.hpp"

namespace pullback::driver {
namespace {

constexpr std::string_view kOp = "segment";

enum class Saved { arg, mask, none };

struct Options {
  SegmentReduce reduce = SegmentReduce::sum;
  Ties ties = Ties::first;
  EmptySegment empty = EmptySegment::identity;
  Saved saved = Saved::arg;
  DType arg_dtype = DType::i64;
  bool arg = true;  // whether it is an output
  std::int64_t num_segments = -1;
  bool check_indices = false;
  bool keep_ids = true;
};

Options read_options(const Request& request) {
  OptionReader reader(kOp, request.options);
  Options options;
  const auto pick = [&](std::string_view name, std::initializer_list<std::string_view> names,
                        auto& option) {
    const int index = reader.choice(name, names);
    if (index >= 0) option = static_cast<std::decay_t<decltype(option)>>(index);
  };
  pick("reduce", {"sum", "mean", "max", "min", "prod", "logsumexp", "softmax"}, options.reduce);
  pick("ties", {"first", "last", "even"}, options.ties);
  pick("empty", {"identity", "zero", "nan"}, options.empty);
  pick("saved", {"arg", "mask", "none"}, options.saved);
  const int arg = reader.choice("arg-dtype", {"i64", "i32", "u8", "none"});
  if (arg >= 0) options.arg_dtype = arg == 1 ? DType::i32 : arg == 2 ? DType::u8 : DType::i64;
  options.arg = arg != 3;
  if (!options.arg && options.saved == Saved::arg && is_extreme(options.reduce)) {
    fail(ErrorCode::invalid_argument, kOp, "--arg-dtype", "a dtype, or --saved mask or none",
         "none");
  }
  options.num_segments = reader.integer("num-segments", -1);
  if (options.num_segments < 0 && reader.has("num-segments")) {
    fail(ErrorCode::invalid_argument, kOp, "--num-segments", "0 or more",
         std::to_string(options.num_segments));
  }
  options.check_indices = reader.boolean("check-indices", false);
  options.keep_ids = reader.boolean("keep-ids", true);
  reader.finish();
  return options;
}

// ids in any order are sorted first; whoever calls the op itself plans the permutation once and
// keeps it, and so does a session.
bool ascending(const TensorSpec& spec, const void* ids) {
  for (std::int64_t n = 1; n < spec.shape[0]; ++n) {
    if (load_index(spec.dtype, ids, n * spec.strides[0]) <
        load_index(spec.dtype, ids, (n - 1) * spec.strides[0])) {
      return false;
    }
  }
  return true;
}

// Their order is no matter: they are sorted, which drops what is out of range.
void check_ids(const SegmentProblem& problem, const void* ids) {
  for (std::int64_t n = 0; n < problem.ids.shape[0]; ++n) {
    const std::int64_t id = load_index(problem.ids.dtype, ids, n * problem.ids.strides[0]);
    if (id < 0 || id >= problem.num_segments) {
      fail(ErrorCode::invalid_argument, kOp, fmt::format("ids[{}]", n),
           expected_ids(problem.num_segments), fmt::format("{}", id),
           "raise --num-segments, or leave --check-indices off to drop the row");
    }
  }
}

std::int64_t count_segments(const Request& request, const Options& options) {
  if (options.num_segments >= 0) return options.num_segments;
  const TensorSpec d_out = spec_of(request.inputs, "d_out");
  if (d_out.given() && d_out.rank > 0 && options.reduce != SegmentReduce::softmax) {
    return d_out.shape[0];
  }
  const TensorSpec ids = spec_of(request.inputs, "ids");
  std::int64_t largest = -1;
  for (std::int64_t n = 0; n < ids.shape[0]; ++n) {
    largest = std::max(largest,
                       load_index(ids.dtype, data_of(request.inputs, "ids"), n * ids.strides[0]));
  }
  // One stray id is not to ask for the memory of as many segments.
  const std::int64_t most = std::max<std::int64_t>(1 << 24, 16 * ids.shape[0]);
  if (largest >= most) {
    fail(ErrorCode::invalid_argument, kOp, "ids",
         fmt::format("less than {} where --num-segments is not given", most),
         fmt::format("{}", largest), "pass --num-segments");
  }
  return largest + 1;
}

// Whether its elements may be looked at before complete() has refused what is not an index.
bool is_index(const TensorSpec& spec) {
  return spec.rank == 1 && (spec.dtype == DType::i32 || spec.dtype == DType::i64);
}

// The problem as far as the request says it, before ids are sorted.
SegmentProblem problem_of(const Request& request, const Options& options) {
  SegmentProblem problem;
  problem.x = spec_of(request.inputs, "x");
  problem.offsets = spec_of(request.inputs, "offsets");
  problem.ids = spec_of(request.inputs, "ids");
  problem.reduce = options.reduce;
  problem.ties = options.ties;
  problem.empty = options.empty;
  problem.check_indices = options.check_indices;
  problem.d_out = spec_of(request.inputs, "d_out");
  if (problem.offsets.given()) {
    // To the op 0 is as good as nothing.
    if (options.num_segments == 0 && problem.offsets.numel() > 1) {
      fail(ErrorCode::invalid_argument, kOp, "--num-segments",
           fmt::format("{}, as offsets have it", problem.offsets.numel() - 1), "0",
           "leave --num-segments out");
    }
    problem.num_segments = std::max<std::int64_t>(options.num_segments, 0);
  } else if (is_index(problem.ids)) {
    problem.num_segments = count_segments(request, options);
  }
  return problem;
}

bool saves_lse(const SegmentProblem& problem, const Options& options) {
  return problem.reduce == SegmentReduce::logsumexp && size_of(problem.x.dtype) == 2 &&
         options.saved != Saved::none;
}
TensorSpec lse_spec(const SegmentProblem& problem) {
  return TensorSpec::contiguous(DType::f32, {problem.num_segments, problem.x.shape[1]});
}

class SegmentSession final : public OpSession<SegmentProblem, SegmentTensors> {
 public:
  explicit SegmentSession(const Request& request) : OpSession(request) {
    const Options options = read_options(request);
    SegmentProblem problem = complete(problem_of(request, options));
    tensors_.x = input("x");
    tensors_.offsets = input("offsets");
    tensors_.ids = input("ids");
    tensors_.d_out = input("d_out");
    // Here, as a plan for a GPU checks none.
    const SegmentTensors host{.offsets = data_of(request.inputs, "offsets"),
                              .ids = data_of(request.inputs, "ids")};
    if (problem.check_indices && problem.ids.given()) check_ids(problem, host.ids);
    if (problem.check_indices && problem.offsets.given()) {
      pullback::check_indices(problem, host, nullptr);
    }
    problem.check_indices = false;
    if (problem.ids.given() && !ascending(problem.ids, host.ids)) {
      sort_ids(problem, options.keep_ids);
    }

    tensors_.out = output("out", problem.out);
    if (is_extreme(options.reduce)) {
      const std::int64_t rows = problem.x.shape[0], columns = problem.x.shape[1];
      if (options.arg) {
        problem.arg = TensorSpec::contiguous(options.arg_dtype, {problem.num_segments, columns});
        tensors_.arg = output("arg", problem.arg);
      }
      if (options.saved == Saved::mask) {
        problem.arg_mask = TensorSpec::contiguous(DType::u8, {rows, (columns + 7) / 8});
        tensors_.arg_mask = memory_.output(make_output(problem.arg_mask, request, "arg_mask"));
      }
    }
    if (saves_lse(problem, options)) {
      problem.lse = lse_spec(problem);
      tensors_.lse = memory_.output(make_output(problem.lse, request, "lse"));
    }
    if (request.backward) tensors_.d_x = output("d_x", problem.d_x);
    make_plans(problem);
    if (options.saved != Saved::arg) backward_tensors_.arg = nullptr;
  }

 private:
  void sort_ids(SegmentProblem& problem, bool keep_ids) {
    const SegmentPermutationProblem sort =
        complete(SegmentPermutationProblem{.ids = problem.ids,
                                           .num_segments = problem.num_segments,
                                           .permutation = {},
                                           .offsets = {}});
    void* permutation = memory_.output(HostTensor(sort.permutation));
    void* offsets = memory_.output(HostTensor(sort.offsets));
    const auto plan = plan_permutation(request_.device, sort);
    memory_.reserve_workspace(plan.workspace_bytes());
    plan.run(stream(), {tensors_.ids, permutation, offsets}, memory_.workspace());
    problem.offsets = sort.offsets;
    problem.permutation = sort.permutation;
    if (!keep_ids) {
      problem.ids = {};
      tensors_.ids = nullptr;
    }
    tensors_.offsets = offsets;
    tensors_.permutation = permutation;
  }
};

std::unique_ptr<Session> prepare(const Request& request);
Cost cost(const Request& request, Pass pass);

const OpDriver kDriver{
    .name = kOp,
    .summary = "reductions and softmax over groups of rows, and their gradients",
    .inputs = {{"x", "[N,D]", true},
               {"d_out", "[S,D], for softmax [N,D]", true},
               {"offsets", "i32 or i64 [S+1], or ids", false},
               {"ids", "i32 or i64 [N], any order, in place of offsets", false}},
    .outputs = "out; arg, of max and min",
    .options =
        {{"reduce", "sum|mean|max|min|prod|logsumexp|softmax", "what is computed (sum)"},
         {"ties", "first|last|even", "who gets the gradient of max and min (first)"},
         {"empty", "identity|zero|nan", "value of a segment without rows (identity)"},
         {"num-segments", "S", "with ids; default: rows of d_out, else largest id + 1"},
         {"saved", "arg|mask|none",
          "what backward of max and min uses (arg); none: nor lse of 16-bit x, unrounded"},
         {"arg-dtype", "i64|i32|u8|none",
          "dtype of arg; u8 is the place in a short segment; none: it is not computed (i64)"},
         {"check-indices", "true|false", "report the first bad offset or id (false)"},
         {"keep-ids", "true|false", "give the op ids in any order beside what sorts them (true)"}},
    .cotangents = {{"out", "d_out"}},
    .gradients = {{"x", "d_x"}},
    .has_unit_term =
        [](const Request& request, std::string_view output) {
          return output == "out" && read_options(request).reduce == SegmentReduce::logsumexp;
        },
    .prepare = prepare,
    .cost = cost,
};

std::unique_ptr<Session> prepare(const Request& request) {
  check_inputs(kDriver, request);
  return std::make_unique<SegmentSession>(request);
}

Cost cost(const Request& request, Pass pass) {
  const Options options = read_options(request);
  const SegmentProblem problem = complete(problem_of(request, options));
  double bytes = compulsory_bytes({&problem.offsets, &problem.ids});
  const bool extreme = is_extreme(options.reduce);
  const double rows = static_cast<double>(problem.x.shape[0]);
  const double columns = static_cast<double>(problem.x.shape[1]);
  const double arg_bytes = extreme && options.arg
                               ? static_cast<double>(problem.num_segments) * columns *
                                     static_cast<double>(size_of(options.arg_dtype))
                               : 0;
  TensorSpec lse;  // what logsumexp reads beside x
  if (options.reduce == SegmentReduce::logsumexp) {
    lse = saves_lse(problem, options)     ? lse_spec(problem)
          : size_of(problem.x.dtype) == 2 ? TensorSpec{}
                                          : problem.out;
  }
  const double mask_bytes = rows * static_cast<double>((problem.x.shape[1] + 7) / 8);
  if (pass == Pass::forward) {
    bytes += compulsory_bytes({&problem.x, &problem.out}) + arg_bytes;
    if (extreme && options.saved == Saved::mask) bytes += mask_bytes;
    if (saves_lse(problem, options)) bytes += compulsory_bytes({&lse});
    return {.flops = 0, .bytes = bytes};
  }
  bytes += compulsory_bytes({&problem.d_out, &problem.d_x});
  const bool arg_suffices = options.saved == Saved::arg && options.ties != Ties::even;
  if (extreme && arg_suffices) bytes += arg_bytes;
  if (extreme && options.saved == Saved::mask) bytes += mask_bytes;
  const bool recompute = extreme && !arg_suffices && options.saved != Saved::mask;
  if (recompute || options.reduce == SegmentReduce::prod ||
      options.reduce == SegmentReduce::logsumexp) {
    bytes += compulsory_bytes({&problem.x});
  }
  if (recompute || options.reduce == SegmentReduce::softmax) {
    bytes += compulsory_bytes({&problem.out});
  }
  bytes += compulsory_bytes({&lse});
  return {.flops = 0, .bytes = bytes};
}

}  // namespace

const OpDriver& segment_driver() { return kDriver; }

}  // namespace pullback::driver
