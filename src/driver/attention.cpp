// attention by name: tensors and options of the command line, the case lists and the benchmarks.
#include "pullback/attention.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "driver/block_layout.hpp"
#include "driver/driver.hpp"
#include "driver/session.hpp"
#include "ops/attention/problem.hpp"

namespace pullback::driver {
namespace {

// The band that --causal, --window and --corner describe together.
BandMask mask_of(OptionReader& options) {
  constexpr Corner kCorners[] = {Corner::top_left, Corner::bottom_right};
  const int causal = options.choice("causal", {"top-left", "bottom-right"});
  const int corner = options.choice("corner", {"top-left", "bottom-right"});
  const std::vector<std::int64_t> window = options.integers("window", 2);
  if (causal >= 0 && corner >= 0 && causal != corner) {
    fail(ErrorCode::invalid_argument, "attention", "--corner", "the corner of --causal",
         "the other", "leave --corner out: it places a window that is not causal");
  }
  BandMask mask;
  if (!window.empty()) mask = {window[0], window[1], Corner::top_left};
  // min(R, 0) with -1 standing for unbounded; what is below -1 stays, to be refused.
  if (causal >= 0 && mask.right >= BandMask::kUnbounded) mask.right = 0;
  if (causal >= 0) mask.corner = kCorners[causal];
  if (corner >= 0) mask.corner = kCorners[corner];
  return mask;
}

AttentionProblem problem_of(const Request& request) {
  OptionReader options("attention", request.options);
  AttentionProblem problem;
  problem.q = spec_of(request.inputs, "q");
  problem.k = spec_of(request.inputs, "k");
  problem.v = spec_of(request.inputs, "v");
  problem.bias = spec_of(request.inputs, "bias");
  problem.cu_seqlens_q = spec_of(request.inputs, "cu_seqlens_q");
  problem.cu_seqlens_k = spec_of(request.inputs, "cu_seqlens_k");
  problem.d_out = spec_of(request.inputs, "d_out");
  problem.d_lse = spec_of(request.inputs, "d_lse");
  problem.mask = mask_of(options);
  if (request.inputs.contains("layout")) {
    Checker("attention")
        .that(options.has("block"), "--block", "the side of the layout's blocks, 16 to 128",
              "none");
    problem.blocks.layout = layout_of("attention", request.inputs, &problem.blocks.batches);
  }
  if (options.has("block")) {
    Checker("attention")
        .that(problem.blocks.given(), "--block", "none without a layout",
              options.text("block", ""));
    problem.blocks.block = options.integer("block", 0);
  }
  if (options.has("scale")) problem.scale = options.number("scale", 1);
  problem.softcap = options.number("softcap", 0);
  problem.dropout = options.number("dropout", 0);
  problem.dropout_seed = options.seed("seed");
  problem.deterministic = options.boolean("deterministic", true);
  problem.max_seqlen_q = options.integer("max-seqlen-q", 0);
  problem.max_seqlen_k = options.integer("max-seqlen-k", 0);
  problem.check_indices = options.boolean("check-indices", true);
  options.finish();
  return complete(problem);
}

class AttentionSession final : public OpSession<AttentionProblem, AttentionTensors> {
 public:
  explicit AttentionSession(const Request& request) : OpSession(request) {
    AttentionProblem problem = problem_of(request);
    AttentionTensors host;
    host.cu_seqlens_q = data_of(request.inputs, "cu_seqlens_q");
    host.cu_seqlens_k = data_of(request.inputs, "cu_seqlens_k");
    // Here, as the op itself checks on the CPU alone.
    if (std::exchange(problem.check_indices, false)) attention::check_cu_seqlens(problem, host);
    tensors_.q = input("q");
    tensors_.k = input("k");
    tensors_.v = input("v");
    tensors_.bias = input("bias");
    tensors_.cu_seqlens_q = input("cu_seqlens_q");
    tensors_.cu_seqlens_k = input("cu_seqlens_k");
    tensors_.d_out = input("d_out");
    tensors_.d_lse = input("d_lse");
    tensors_.out = output("out", problem.out);
    tensors_.lse = output("lse", problem.lse);
    if (request.backward) {
      tensors_.d_q = output("d_q", problem.d_q);
      tensors_.d_k = output("d_k", problem.d_k);
      tensors_.d_v = output("d_v", problem.d_v);
      if (problem.bias.given()) tensors_.d_bias = output("d_bias", problem.d_bias);
    }
    make_plans(problem);
  }
};

// Pairs of query and key that see each other, over all sequences and heads.
double visible_pairs(const AttentionProblem& problem, const Request& request) {
  const attention::AttentionSizes sizes = attention::sizes_of(problem);
  AttentionTensors tensors;
  tensors.cu_seqlens_q = data_of(request.inputs, "cu_seqlens_q");
  tensors.cu_seqlens_k = data_of(request.inputs, "cu_seqlens_k");
  const WorkspaceBuffer scratch(attention::Sequences::workspace_bytes(sizes));
  const attention::Sequences sequences(problem, sizes, tensors, scratch.get().data);
  const attention::SeenBlocks blocks(problem);
  double pairs = 0;
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    const attention::Sequence sequence = sequences[b];
    for (std::int64_t i = 0; i < sequence.q_length; ++i) {
      const attention::Range keys = attention::visible_keys(problem.mask, sequence, i);
      if (!blocks.given()) {
        pairs += static_cast<double>(sizes.heads * (keys.end - keys.begin));
        continue;
      }
      for (std::int64_t h = 0; h < sizes.heads; ++h) {
        for (const auto& block : blocks.row(b, h, i)) {
          const std::int64_t begin = block.column * blocks.block();
          const std::int64_t first = std::max(keys.begin, begin);
          pairs += static_cast<double>(
              std::max<std::int64_t>(std::min(keys.end, begin + blocks.block()) - first, 0));
        }
      }
    }
  }
  return pairs;
}

Cost cost(const Request& request, Pass pass) {
  const AttentionProblem problem = problem_of(request);
  const attention::AttentionSizes sizes = attention::sizes_of(problem);
  // Two products forward; the backward pass is counted as 2.5 forwards, as everybody does.
  const double forward =
      2 * visible_pairs(problem, request) * static_cast<double>(sizes.head_dim + sizes.value_dim);
  const double inputs = compulsory_bytes({&problem.q, &problem.k, &problem.v, &problem.bias,
                                          &problem.cu_seqlens_q, &problem.cu_seqlens_k});
  const double results = compulsory_bytes({&problem.out, &problem.lse});
  if (pass == Pass::forward) return {forward, inputs + results};
  return {2.5 * forward, inputs + results +
                             compulsory_bytes({&problem.d_out, &problem.d_lse, &problem.d_q,
                                               &problem.d_k, &problem.d_v, &problem.d_bias})};
}

const OpDriver& driver();

std::unique_ptr<Session> prepare(const Request& request) {
  check_inputs(driver(), request);
  return std::make_unique<AttentionSession>(request);
}

// Of d_bias, the scores that share an element.
double summands(const Request& request, std::string_view gradient) {
  if (gradient != "d_bias") return 1;
  const auto numel = [&](std::string_view name) {
    return static_cast<double>(request.inputs.find(name)->second.numel());
  };
  const TensorSpec q = spec_of(request.inputs, "q"), k = spec_of(request.inputs, "k");
  const double scores = static_cast<double>(q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]);
  return std::max(1.0, scores / std::max(1.0, numel("bias")));
}

const OpDriver& driver() {
  static const OpDriver instance = {
      .name = "attention",
      .summary = "softmax(scale q k^T + bias) v, with masks, dropout and packed sequences",
      .inputs = {{"q", "[B,Sq,H,D], or [total_q,H,D] with cu_seqlens", true},
                 {"k", "[B,Sk,Hkv,D], or [total_k,Hkv,D]; H a multiple of Hkv", true},
                 {"v", "[B,Sk,Hkv,Dv], or [total_k,Hkv,Dv]", true},
                 {"d_out", "[B,Sq,H,Dv], or [total_q,H,Dv]", true},
                 {"bias", "[B|1,H|1,Sq|1,Sk|1]; not with cu_seqlens", false},
                 {"layout",
                  "[H|1,R,C] or [B|1,H|1,R,C] of 0 and 1: the blocks seen; not with cu_seqlens",
                  false},
                 {"d_lse", "[B,H,Sq], or [H,total_q]; f32 (f64 for f64)", false},
                 {"cu_seqlens_q", "[B+1] i32 or i64: first rows of the sequences", false},
                 {"cu_seqlens_k", "[B+1] i32 or i64", false}},
      .outputs = "out, lse",
      .options =
          {{"causal", "top-left|bottom-right", "no query sees keys past its own, from a corner"},
           {"window", "L,R", "keys seen to the left and right; -1 = unbounded"},
           {"corner", "top-left|bottom-right", "where a window that is not causal is aligned"},
           {"block", "N", "queries and keys of a block of the layout"},
           {"scale", "X", "factor of q k^T; 1/sqrt(D) if absent"},
           {"softcap", "X", "s becomes X tanh(s / X) before the bias; 0 = off"},
           {"dropout", "P", "probability of dropping a softmax weight"},
           {"seed", "N", "seed of the dropout"},
           {"deterministic", "true|false", "false allows sums of no fixed order"},
           {"max-seqlen-q", "N", "bound on the lengths in cu_seqlens_q; 0 = unknown"},
           {"max-seqlen-k", "N", "bound on the lengths in cu_seqlens_k; 0 = unknown"},
           {"check-indices", "true|false", "false clamps bad cu_seqlens instead of refusing them"}},
      .cotangents = {{"out", "d_out"}, {"lse", "d_lse"}},
      .gradients = {{"q", "d_q"}, {"k", "d_k"}, {"v", "d_v"}, {"bias", "d_bias"}},
      // Large scores carry epsilons of themselves, as do products of d_out and v, which cancel.
      .rounded = {{"q", 2, true}, {"k", 2, true}, {"bias", 2, true}, {"v", 1, true}},
      .summands = summands,
      .splits_f32_on_cuda = true,
      .prepare = prepare,
      .cost = cost};
  return instance;
}

}  // namespace

const OpDriver& attention_driver() { return driver(); }

}  // namespace pullback::driver
