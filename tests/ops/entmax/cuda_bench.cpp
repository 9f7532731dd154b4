// Rows of the lengths that sparse attention, classifiers and vocabularies have, 0.5 to 1 GiB each.
#include <fmt/format.h>

#include "driver/case.hpp"

namespace pullback::driver {

std::vector<Case> entmax_cuda_bench() {
  struct Shape {
    std::int64_t rows, length;
  };
  std::vector<Case> cases;
  for (const Shape shape : {Shape{262144, 512}, {65536, 4096}, {8192, 32768}, {1024, 131072}}) {
    for (const double sigma : {1.0, 0.3}) {
      const std::string name = fmt::format("{}x{} sigma {}", shape.rows, shape.length, sigma);
      const auto add = [&](OptionMap options, std::string what) {
        Case test;
        test.op = "entmax";
        test.name = name + " " + what;
        test.options = std::move(options);
        test.dtypes = {DType::f32, DType::bf16};
        test.same_inputs = name;
        test.inputs = [=](DType dtype, Random& random) {
          return TensorMap{{"x", normal_tensor(dtype, {shape.rows, shape.length}, random, sigma)},
                           {"d_y", normal_tensor(dtype, {shape.rows, shape.length}, random)}};
        };
        test.full_only = sigma != 1;
        cases.push_back(std::move(test));
      };
      for (const char* alpha : {"2", "1.5", "1", "1.3"}) {
        add({{"alpha", alpha}}, fmt::format("alpha {}", alpha));
      }
      add({{"alpha", "2"}, {"saved", "support"}}, "alpha 2 from the mask");
    }
  }
  return cases;
}

}  // namespace pullback::driver
