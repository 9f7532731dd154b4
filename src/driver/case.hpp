// Cases: the problems that drive tests, `pullback check` and `pullback bench`.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "driver/driver.hpp"
#include "driver/random.hpp"

namespace pullback::driver {

struct Case {
  std::string op;
  std::string name;  // says what is special: "window bottom-right Sq != Sk"
  OptionMap options;
  // Fresh inputs, the incoming gradients among them.
  std::function<TensorMap(DType dtype, Random& random)> inputs;
  std::vector<DType> dtypes = {DType::f64, DType::f32, DType::bf16, DType::f16};
  bool full_only = false;  // too slow for --cases quick, and for the tests on CPUs
  // Small integers and powers of two, whose result has no rounding: must equal the reference.
  bool exact = false;
  // Off where the function has a kink at the inputs (ties), so that differences mean nothing.
  bool finite_differences = true;
  // Benchmarks next to each other with the same text here (and dtype) have the same inputs, which
  // are then made once. Empty: inputs of its own.
  std::string same_inputs = {};
};

// tests/ops/<op>/cases.cpp. Names are unique within an op.
std::vector<Case> attention_cases();
std::vector<Case> block_softmax_cases();
std::vector<Case> block_matmul_cases();
std::vector<Case> entmax_cases();
std::vector<Case> segment_cases();
// A random problem of the op: shapes, options, and strides of the inputs.
Case attention_fuzz(std::uint64_t seed);
Case block_softmax_fuzz(std::uint64_t seed);
Case block_matmul_fuzz(std::uint64_t seed);
Case entmax_fuzz(std::uint64_t seed);
Case segment_fuzz(std::uint64_t seed);

// Problems of real size, for bench: name, dtype and what a rate is quoted for.
std::vector<Case> attention_bench();
std::vector<Case> block_softmax_bench();
std::vector<Case> block_matmul_bench();
std::vector<Case> entmax_bench();
std::vector<Case> segment_bench();

// Problems of a size for GPUs: tests/ops/<op>/cuda_bench.cpp, for the ops that have one.
std::vector<Case> all_cuda_benches();

struct CaseLists {
  std::string_view op;
  std::vector<Case> (*cases)();
  Case (*fuzz)(std::uint64_t seed);
  std::vector<Case> (*bench)();
};
std::span<const CaseLists> all_case_lists();

// --- Fillers for Case::inputs ---

HostTensor normal_tensor(DType dtype, std::span<const std::int64_t> shape, Random& random,
                         double sigma = 1);
HostTensor normal_tensor(DType dtype, std::initializer_list<std::int64_t> shape, Random& random,
                         double sigma = 1);
// Integers in [-magnitude, magnitude].
HostTensor integer_tensor(DType dtype, std::initializer_list<std::int64_t> shape, Random& random,
                          std::int64_t magnitude);
HostTensor filled_tensor(DType dtype, std::initializer_list<std::int64_t> shape, double value);
HostTensor tensor_of(DType dtype, std::initializer_list<std::int64_t> shape,
                     std::initializer_list<double> values);
double lowest_finite(DType dtype);
// A view of `tensor` with stride 0 along every dimension of size 1 of `tensor`, grown to `shape`.
HostTensor broadcast(const HostTensor& tensor, std::initializer_list<std::int64_t> shape);

}  // namespace pullback::driver
