// Ops by name, on named tensors, with options as text: what the command line, the case lists and
// the benchmarks share. The names are those of docs/command-line.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "driver/host_tensor.hpp"
#include "driver/tensor_memory.hpp"
#include "pullback/device.hpp"
#include "pullback/plan.hpp"

namespace pullback::driver {

using OptionMap = std::map<std::string, std::string, std::less<>>;

struct Request {
  std::string op;
  TensorMap inputs;   // integer tensors too; unknown names are refused
  OptionMap options;  // unknown names and bad values are refused
  Device device;
  std::string variant;            // empty: the best
  bool backward = true;           // false: outputs of the forward pass only
  std::uint64_t layout_seed = 0;  // not 0: outputs get random strides
  Placement placement = {};
};

// A request with its plans made and its outputs allocated. forward() then backward() compute; both
// may be repeated. On a GPU they only enqueue work, on stream(); fetch() waits for it and brings
// the results to `outputs`.
class Session {
 public:
  virtual ~Session() = default;
  virtual void forward() = 0;
  virtual void backward() = 0;
  virtual void fetch(Fetch) {}
  virtual Stream stream() const { return {}; }

  TensorMap outputs;
  std::string forward_description, backward_description;
  std::size_t forward_workspace_bytes = 0, backward_workspace_bytes = 0;
  double forward_plan_seconds = 0, backward_plan_seconds = 0;
};

// What a pass has to do at the least: its floors on a machine.
struct Cost {
  double flops = 0;  // of matrix products; 0 for the ops bound by memory
  double bytes = 0;  // compulsory traffic: every input read once, every output written once
};

struct TensorHelp {
  std::string_view name, shape;
  bool required;
};

struct OptionHelp {
  std::string_view name, value, help;
};

struct NamePair {
  std::string_view first, second;
};

struct OpDriver {
  std::string_view name, summary;
  std::vector<TensorHelp> inputs;
  std::string_view outputs;  // of the forward pass, for people
  std::vector<OptionHelp> options;
  std::vector<NamePair> cotangents;  // output, input that is its incoming gradient
  std::vector<NamePair> gradients;   // input, output that is its gradient
  // Of an output, whether one of its terms is a number up to 1, or it is the logarithm of a sum:
  // near 0, where the term cancels or the sum is near 1, its rounding remains. Null: of none.
  bool (*has_unit_term)(const Request& request, std::string_view output) = nullptr;
  // Inputs that the op rounds, or whose sums or products, before it takes powers of them: as if
  // each element had been moved by so many epsilons, times itself if relative.
  struct Rounded {
    std::string_view input;
    double epsilons;
    bool relative;
  };
  std::vector<Rounded> rounded = {};
  // How many products an element of this gradient is the sum of, where that is far more than the
  // input has elements; null: of few.
  double (*summands)(const Request& request, std::string_view gradient) = nullptr;
  // Whether GPUs make f32 of two f16 each: outputs are then held to the bound of gradients.
  bool splits_f32_on_cuda = false;
  std::unique_ptr<Session> (*prepare)(const Request& request);
  Cost (*cost)(const Request& request, Pass pass);
};

std::span<const OpDriver* const> all_drivers();
// Throws Error naming the known ops.
const OpDriver& find_driver(std::string_view op);

// Whether this output is the gradient of an input.
bool is_gradient(const OpDriver& driver, std::string_view output);

// Prepares, runs and fetches; the outputs.
TensorMap evaluate(const Request& request);

// --- For the drivers of the ops (driver/<op>.cpp) ---

// Reads options, and at the end refuses the ones nobody asked for.
class OptionReader {
 public:
  OptionReader(std::string_view op, const OptionMap& options) : op_(op), options_(options) {}

  bool has(std::string_view name) const { return options_.contains(name); }
  std::string text(std::string_view name, std::string_view fallback);
  double number(std::string_view name, double fallback);
  std::int64_t integer(std::string_view name, std::int64_t fallback);
  // A generator's seed, 0 when absent: an integer of 64 bits, with a sign or without.
  std::uint64_t seed(std::string_view name);
  bool boolean(std::string_view name, bool fallback);
  std::vector<std::int64_t> integers(std::string_view name, std::size_t count);  // "3,-1"
  // Index of the value in `choices`; -1 when the option is absent.
  int choice(std::string_view name, std::initializer_list<std::string_view> choices);
  void finish() const;

 private:
  const std::string* find(std::string_view name);
  std::string op_;
  const OptionMap& options_;
  std::vector<std::string> asked_;
};

// Refuses inputs that the op does not know and reports required ones that are missing.
void check_inputs(const OpDriver& driver, const Request& request);

// The tensor's spec, or one that is not given.
TensorSpec spec_of(const TensorMap& tensors, std::string_view name);
void* data_of(const TensorMap& tensors, std::string_view name);

// An output tensor with the spec's shape, laid out as the request asks. Writes its layout into
// spec.
HostTensor make_output(TensorSpec& spec, const Request& request, std::string_view name);

// Each tensor's bytes, once: stride-0 dimensions count 1.
double compulsory_bytes(std::initializer_list<const TensorSpec*> specs);

const OpDriver& attention_driver();
const OpDriver& block_softmax_driver();
const OpDriver& block_matmul_driver();
const OpDriver& entmax_driver();
const OpDriver& segment_driver();

}  // namespace pullback::driver
