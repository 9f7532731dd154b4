// The contract of `pullback grad` with the programs that call it, shown with the toy op.
#include <fmt/format.h>
#include <sys/stat.h>

#include "driver/case.hpp"
#include "driver/safetensors.hpp"
#include "tools/run_tool.hpp"

namespace pullback::testing {
namespace {

using driver::HostTensor;
using driver::TensorMap;
using Names = std::vector<std::string>;
namespace fs = std::filesystem;

class Grad : public ToolTest {
 protected:
  Grad() {
    driver::write_safetensors(input_, {{"x", driver::tensor_of(DType::f32, {3}, {1, -2, 4})},
                                       {"d_y", driver::tensor_of(DType::f32, {3}, {1, 1, 0.5})}});
  }

  Result grad(std::vector<std::string> arguments, rlim_t file_limit = 0) const {
    Names all{"grad", "toy", "--input", input_, "--output", output_};
    all.insert(all.end(), arguments.begin(), arguments.end());
    return run(TOY_TOOL, all, file_limit);
  }
  std::vector<double> result(const std::string& name) const {
    const TensorMap tensors = driver::read_safetensors(output_);
    std::vector<double> values;
    const HostTensor& tensor = tensors.at(name);
    for (std::int64_t i = 0; i < tensor.numel(); ++i) values.push_back(tensor.get(i));
    return values;
  }
  // Refused with that status and one line with `part`; nothing was left behind.
  void expect_refused(const Result& result, int status, const std::string& part) const {
    EXPECT_EQ(result.status, status) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
    EXPECT_TRUE(result.err.starts_with("pullback: ")) << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_TRUE(result.err.ends_with('\n'));
    EXPECT_EQ(files(), Names{"in.safetensors"});
  }

  const std::string input_ = path("in.safetensors"), output_ = path("out.safetensors");
};

TEST_F(Grad, writes_outputs_and_gradients_in_silence) {
  const Result done = grad({});
  EXPECT_EQ(done.status, 0);
  EXPECT_EQ(done.out + done.err, "");
  EXPECT_EQ(result("y"), (std::vector<double>{1, 4, 16}));
  EXPECT_EQ(result("d_x"), (std::vector<double>{2, -4, 4}));
  EXPECT_EQ(files(), (Names{"in.safetensors", "out.safetensors"}));
}

TEST_F(Grad, options_take_negative_values_in_both_ways_of_writing) {
  for (const Names& options : {Names{"--scale", "-3", "--window", "-1,0"},
                               Names{"--scale=-3", "--window=-1,0"}, Names{"--scale", "-.3e1"}}) {
    EXPECT_EQ(grad(options).status, 0);
    EXPECT_EQ(result("y"), (std::vector<double>{-3, -12, -48}));
  }
}

TEST_F(Grad, threads_device_and_variant_are_taken) {
  EXPECT_EQ(grad({"--threads", "2", "--device", "cpu", "--variant", "reference"}).status, 0);
}

TEST_F(Grad, input_may_be_the_output) {
  const Result done = run(TOY_TOOL, {"grad", "toy", "--input", input_, "--output", input_});
  EXPECT_EQ(done.status, 0) << done.err;
  EXPECT_EQ(driver::read_safetensors(input_).size(), 2u);
  EXPECT_EQ(driver::read_safetensors(input_)["y"].get(2), 16);
  EXPECT_EQ(files(), Names{"in.safetensors"});
}

TEST_F(Grad, verify_says_how_close_and_passes) {
  const Result done = grad({"--verify"});
  EXPECT_EQ(done.status, 0);
  EXPECT_EQ(done.err, "");
  EXPECT_NE(done.out.find("toy: all 2 outputs agree with the f64 reference"), std::string::npos);
  EXPECT_TRUE(fs::exists(output_));
}

TEST_F(Grad, a_failed_verification_names_the_tensor_and_writes_nothing) {
  std::ofstream(output_) << "kept";
  const Result failed = grad({"--verify", "--fault", "wrong-gradient"});
  EXPECT_EQ(failed.status, 1);
  EXPECT_NE(failed.err.find("pullback: toy: d_x: error"), std::string::npos) << failed.err;
  EXPECT_NE(failed.err.find("not written"), std::string::npos);
  EXPECT_EQ(content(output_), "kept");
  EXPECT_EQ(files(), (Names{"in.safetensors", "out.safetensors"}));
}

// What plain arithmetic of the dtype cannot do excuses that element, not its tensor.
TEST_F(Grad, verify_looks_at_what_lies_beside_an_overflow) {
  driver::write_safetensors(input_, {{"x", driver::tensor_of(DType::f16, {3}, {1, 300, 4})},
                                     {"d_y", driver::tensor_of(DType::f16, {3}, {1, 1, 0.5})}});
  EXPECT_EQ(grad({"--verify"}).status, 0);
  const Result failed = grad({"--verify", "--fault", "wrong-output"});
  EXPECT_EQ(failed.status, 1);
  EXPECT_NE(failed.err.find("pullback: toy: y: error"), std::string::npos) << failed.err;
}

TEST_F(Grad, an_old_output_survives_a_lost_report) {
  std::ofstream(output_) << "kept";
  const std::string command =
      fmt::format("exec {} grad toy --input {} --output {} --verify", TOY_TOOL, input_, output_);
  EXPECT_EQ(run("/bin/sh", {"-c", command + " >/dev/full"}).status, 3);
  EXPECT_EQ(content(output_), "kept");
}

TEST_F(Grad, bad_usage_is_one_line_and_status_2) {
  const auto refused = [&](Names arguments, const std::string& part) {
    expect_refused(run(TOY_TOOL, arguments), 2, part);
  };
  refused({}, "expected a command: ");
  refused({"frobnicate"}, "frobnicate");
  refused({"grad"}, "OP is required");
  refused({"grad", "no_op", "--input", input_, "--output", output_}, "expected toy, got 'no_op'");
  refused({"grad", "toy", "--input", input_}, "--output is required");
  refused({"grad", "toy", "--output", output_}, "--input is required");
  expect_refused(grad({"--frobnicate", "1"}), 2, "--frobnicate");
  expect_refused(grad({"stray"}), 2, "stray");
  expect_refused(grad({"--scale"}), 2, "--scale");
  expect_refused(grad({"--scale", "1", "--scale", "2"}), 2, "--scale");
  expect_refused(grad({"--scale", "abc"}), 2, "toy: --scale: expected a finite number, got 'abc'");
  expect_refused(grad({"--scale", ""}), 2, "--scale: expected a finite number, got ''");
  expect_refused(grad({"--scale", "nan"}), 2, "expected a finite number");
  expect_refused(grad({"--window", "-1"}), 2, "expected 2 integers with commas between, got '-1'");
  expect_refused(grad({"--threads", "0"}), 2, "--threads");
  expect_refused(grad({"--threads", "many"}), 2, "--threads");
  expect_refused(grad({"--device", "tpu"}), 2, "expected cpu, cuda or cuda:N, got 'tpu'");
  expect_refused(grad({"--device", "cuda:x"}), 2, "expected cpu, cuda or cuda:N");
  expect_refused(grad({"--variant", "x\ny"}), 2, "expected cpu, reference, textbook, got x; y");
  expect_refused(grad({"--fault", "refused"}), 2, "no variant serves; cpu: never");
}

TEST_F(Grad, system_failures_are_one_line_and_status_3) {
  {
    const Environment hidden("CUDA_VISIBLE_DEVICES", "");
    expect_refused(grad({"--device", "cuda"}), 3, "no CUDA device: ");
  }
  expect_refused(grad({"--device", "cuda:999"}), 3, "no CUDA device: ");
  expect_refused(grad({"--fault", "system"}), 3, "no such device");
  expect_refused(run(TOY_TOOL, {"grad", "toy", "--input", input_, "--output", path("no/out")}), 3,
                 "cannot write: No such file or directory");
  expect_refused(run(TOY_TOOL, {"grad", "toy", "--input", input_, "--output", input_ + "/out"}), 3,
                 "cannot write: Not a directory");
  // As when the disk is full.
  expect_refused(grad({}, 100), 3, "cannot write: File too large");
}

TEST_F(Grad, an_old_output_survives_a_failed_write) {
  std::ofstream(output_) << "kept";
  EXPECT_EQ(grad({}, 100).status, 3);
  EXPECT_EQ(content(output_), "kept");
  EXPECT_EQ(files(), (Names{"in.safetensors", "out.safetensors"}));
}

TEST_F(Grad, an_old_output_keeps_its_mode) {
  std::ofstream(output_) << "old";
  for (const fs::perms mode : {fs::perms{0600}, fs::perms{0666}}) {
    fs::permissions(output_, mode);
    EXPECT_EQ(grad({}).status, 0);
    EXPECT_EQ(fs::status(output_).permissions(), mode);
  }
}

TEST_F(Grad, links_are_followed_to_what_they_name) {
  fs::create_symlink("later.safetensors", path("link"));
  fs::create_symlink("link", output_);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(grad({}).status, 0);
    EXPECT_TRUE(fs::is_symlink(output_) && fs::is_symlink(path("link")));
    EXPECT_TRUE(fs::is_regular_file(path("later.safetensors")));
  }
  fs::remove(path("link"));
  fs::create_symlink("out.safetensors", path("link"));
  EXPECT_EQ(grad({}).status, 3) << "a circle";
}

TEST_F(Grad, outputs_that_are_not_files_are_refused) {
  expect_refused(run(TOY_TOOL, {"grad", "toy", "--input", input_, "--output", ""}), 2,
                 "expected a path, got an empty one");
  expect_refused(run(TOY_TOOL, {"grad", "toy", "--input", input_, "--output", folder_}), 2,
                 "not a regular file");
  expect_refused(run(TOY_TOOL, {"grad", "toy", "--input", input_, "--output", "/dev/null"}), 2,
                 "not a regular file");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST_F(Grad, inputs_that_cannot_be_read_are_refused) {
  const auto refused = [&](const std::string& input, const std::string& part) {
    const Result result = run(TOY_TOOL, {"grad", "toy", "--input", input, "--output", output_});
    expect_refused(result, 2, part);
  };
  refused(path("missing"), "missing: cannot read: No such file or directory");
  refused(folder_, "cannot read: not a regular file");
  refused("/dev/zero", "cannot read: not a regular file");
  const std::string whole = content(input_);
  for (const std::size_t size : {std::size_t{0}, std::size_t{7}, whole.size() - 1}) {
    std::ofstream(input_, std::ios::binary) << whole.substr(0, size);
    refused(input_, input_ + ": ");
  }
  std::ofstream(input_, std::ios::binary) << std::string(64, '\xff');
  refused(input_, "not a safetensors file");
  fs::remove(input_);
  ASSERT_EQ(::mkfifo(input_.c_str(), 0600), 0);
  refused(input_, "cannot read: not a regular file");
}

TEST_F(Grad, wrong_tensors_are_refused) {
  const HostTensor floats = driver::filled_tensor(DType::f32, {3}, 1);
  const auto refused = [&](const TensorMap& tensors, const std::string& part) {
    driver::write_safetensors(input_, tensors);
    expect_refused(grad({}), 2, part);
  };
  refused({}, "toy: x: expected a tensor […], got none");
  refused({{"x", floats}}, "toy: d_y: expected a tensor like x, got none");
  refused({{"x", floats}, {"d_y", floats}, {"a\nb", floats}},
          "toy: inputs: expected x, d_y, got 'a");
  refused({{"x", floats}, {"d_y", driver::filled_tensor(DType::f32, {4}, 1)}},
          "toy: d_y: expected shape [3], got [4]");
  const HostTensor integers = driver::filled_tensor(DType::i32, {3}, 1);
  refused({{"x", integers}, {"d_y", floats}}, "toy: x: expected dtype");
}

TEST_F(Grad, tensors_without_elements_or_dimensions_pass_through) {
  for (const auto& shape : {std::vector<std::int64_t>{}, {0}, {2, 0, 3}}) {
    const HostTensor tensor(TensorSpec::contiguous(DType::f16, shape));
    for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, 3);
    driver::write_safetensors(input_, {{"x", tensor}, {"d_y", tensor}});
    EXPECT_EQ(grad({"--verify"}).status, 0);
    EXPECT_EQ(result("y"), std::vector<double>(static_cast<std::size_t>(tensor.numel()), 9));
  }
}

}  // namespace
TEST_F(Grad, ids_in_any_order_are_checked_before_they_are_sorted) {
  driver::write_safetensors(input_, {{"x", driver::filled_tensor(DType::f32, {3, 1}, 1)},
                                     {"ids", driver::tensor_of(DType::i32, {3}, {1, 0, 5})},
                                     {"d_out", driver::filled_tensor(DType::f32, {2, 1}, 1)}});
  const Names command{"grad", "segment", "--input", input_, "--output", output_};
  Names checked = command;
  checked.insert(checked.end(), {"--check-indices", "true"});
  expect_refused(run(PULLBACK_TOOL, checked), 2, "segment: ids[2]: expected 0 to 1, got 5; raise");
  EXPECT_EQ(run(PULLBACK_TOOL, command).status, 0);
}

TEST_F(Grad, rows_without_columns_take_no_time) {
  const std::int64_t rows = std::int64_t{1} << 40;
  driver::write_safetensors(input_,
                            {{"x", HostTensor(TensorSpec::contiguous(DType::f32, {rows, 0}))},
                             {"offsets", driver::tensor_of(DType::i32, {4}, {0, 0, 0, 0})},
                             {"d_out", HostTensor(TensorSpec::contiguous(DType::f32, {3, 0}))}});
  const Names command{"grad", "segment", "--input", input_, "--output", output_};
  EXPECT_EQ(run(PULLBACK_TOOL, command).status, 0);
}

}  // namespace pullback::testing
