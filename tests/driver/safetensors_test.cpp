#include "driver/safetensors.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "driver/case.hpp"
#include "pullback/error.hpp"
#include "support/temporary_folder.hpp"

namespace pullback::driver {
namespace {

namespace fs = std::filesystem;

class SafetensorsFile : public ::testing::Test {
 protected:
  std::string path(const std::string& name = "t.safetensors") const {
    return (folder_ / name).string();
  }
  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  const TemporaryFolder temporary_;
  const fs::path& folder_ = temporary_.path();
};

std::string image(const std::string& header, const std::string& data = {}) {
  const std::uint64_t size = header.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &size, 8);
  return bytes + header + data;
}

// The tensors keep the bytes alive.
TensorMap parse(const std::string& bytes) {
  const auto owner = std::make_shared<const std::string>(bytes);
  return parse_safetensors(std::as_bytes(std::span(*owner)), "file", owner);
}

std::string message(const std::string& bytes) {
  try {
    parse(bytes);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos);
    return error.what();
  }
  return "accepted";
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"x":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

std::string four_floats() { return entry("F32", "[2,2]", "[0,16]"); }

TEST(parse_safetensors, reads_what_the_format_allows) {
  std::string data(16, '\0');
  const float value = 2.5f;
  std::memcpy(data.data() + 4, &value, 4);
  TensorMap tensors = parse(image(four_floats() + "   ", data));
  ASSERT_EQ(tensors.size(), 1u);
  EXPECT_EQ(tensors["x"].spec(), TensorSpec::contiguous(DType::f32, {2, 2}));
  EXPECT_EQ(tensors["x"].get(1), 2.5);

  EXPECT_TRUE(parse(image("{}")).empty());
  EXPECT_TRUE(parse(image(R"({"__metadata__":{"format":"pt","a":"b"}})")).empty());
  tensors = parse(image(entry("F64", "[3,0,4]", "[0,0]")));
  EXPECT_EQ(tensors["x"].numel(), 0);
  tensors = parse(image(entry("I64", "[]", "[0,8]"), std::string(8, '\1')));
  EXPECT_EQ(tensors["x"].spec().rank, 0);
  // Listed in another order than stored, keys in another order, names escaped.
  tensors = parse(image(R"({"\u00e9\n\"":{"data_offsets":[2,3],"shape":[1],"dtype":"U8"},)"
                        R"("":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
                        "\1\2\3"));
  EXPECT_EQ(tensors["é\n\""].get(0), 3);
  EXPECT_EQ(tensors[""].get(1), 2);
}

TEST(parse_safetensors, borrows_aligned_data_and_copies_the_rest) {
  const std::string header = entry("F32", "[1]", "[0,4]");  // no padding
  for (std::size_t shift = 0; shift < 4; ++shift) {
    std::string padded = header;
    while ((8 + padded.size()) % 4 != shift) padded += ' ';
    std::string bytes = image(padded, std::string("\0\0\x80\x3f", 4));
    std::vector<std::byte> memory(bytes.size() + 16);
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % 4, 0u);
    std::memcpy(memory.data(), bytes.data(), bytes.size());
    const TensorMap tensors = parse_safetensors(std::span(memory).first(bytes.size()), "file");
    const HostTensor& x = tensors.find("x")->second;
    EXPECT_EQ(x.get(0), 1);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(x.data()) % 4, 0u);
    const bool borrowed = x.data() >= memory.data() && x.data() < memory.data() + memory.size();
    EXPECT_EQ(borrowed, shift == 0);
  }
}

TEST(parse_safetensors, keeps_the_owner_alive) {
  auto bytes = std::make_shared<std::string>(
      image(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "\7"));
  TensorMap tensors = parse_safetensors(std::as_bytes(std::span(*bytes)), "file", bytes);
  const std::weak_ptr<std::string> watch = bytes;
  bytes.reset();
  EXPECT_EQ(tensors["x"].get(0), 7);
  tensors.clear();
  EXPECT_TRUE(watch.expired());
}

struct Hostile {
  std::string name, bytes, message;
};

class HostileFile : public ::testing::TestWithParam<Hostile> {};

TEST_P(HostileFile, is_refused_with_one_clear_line) {
  EXPECT_EQ(message(GetParam().bytes), GetParam().message);
}

std::string with_length(std::uint64_t length) {
  std::string bytes = image("{}");
  std::memcpy(bytes.data(), &length, 8);
  return bytes;
}

std::vector<Hostile> hostile() {
  const std::string json = "file: header: expected JSON in UTF-8, got an error at byte ";
  const std::string data(16, '\0');
  const std::string x = "file: tensor 'x': ";
  const std::string shape = x + "shape: expected integers of 0 or more, got ";
  const std::string too_large = x + "shape: expected at most 2^50 bytes, got more";
  return {
      {"empty", "", "file: expected a safetensors file, got 0 bytes"},
      {"seven_bytes", "1234567", "file: expected a safetensors file, got 7 bytes"},
      {"header_beyond_file", with_length(3),
       "file: expected a header of 3 bytes, got 2; the file is cut short"},
      {"header_huge", with_length(100'000'001),
       "file: expected a header of at most 100000000 bytes, got 100000001; not a safetensors file"},
      {"header_wraps", with_length(~0ull - 7),
       "file: expected a header of at most 100000000 bytes, got 18446744073709551608; not a "
       "safetensors file"},
      {"header_empty", image(""),
       "file: expected a header that begins with '{'; not a safetensors file"},
      {"header_array", image("[]"),
       "file: expected a header that begins with '{'; not a safetensors file"},
      {"not_json", image("{abc"), json + "2"},
      {"unfinished", image(R"({"x":)"), json + "6"},
      {"two_documents", image("{}{}"), json + "3"},
      {"nul_padding", image(std::string("{}\0\0", 4)),
       "file: header: expected JSON in UTF-8, got a NUL byte"},
      {"not_utf8", image("{\"\xff\":1}"), json + "3"},
      {"lone_surrogate", image(R"({"\ud800":1})"), json + "9"},
      {"duplicate_name",
       image(R"({"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"x":{}})", "\1"),
       x + "expected unique names, got it twice"},
      {"duplicate_key", image(R"({"x":{"dtype":"U8","dtype":"U8"}})"),
       x + "expected unique keys, got 'dtype' twice"},
      {"unknown_key", image(R"({"x":{"dtype":"U8","stride":[1]}})"),
       x + "expected dtype, shape and data_offsets, got 'stride'"},
      {"missing_key", image(R"({"x":{"dtype":"U8","shape":[]}})"),
       x + "expected dtype, shape and data_offsets, got an incomplete entry"},
      {"deep", image("{\"x\":" + std::string(100000, '[')), x + "expected an object, got an array"},
      {"deep_objects", image(R"({"x":{"shape":{"a":{}}}})"),
       x + "shape: expected an array, got an object"},
      {"deep_shape", image(R"({"x":{"shape":[[1]]}})"), shape + "an array"},
      {"metadata_number", image(R"({"__metadata__":{"a":1}})"),
       "file: tensor '__metadata__': expected strings, got a number"},
      {"metadata_list", image(R"({"__metadata__":[]})"),
       "file: tensor '__metadata__': expected an object, got an array"},
      {"tensor_number", image(R"({"x":1})"), x + "expected an object, got a number"},
      {"tensor_null", image(R"({"x":null})"), x + "expected an object, got null"},
      {"dtype_number", image(R"({"x":{"dtype":1}})"), x + "dtype: expected a string, got a number"},
      {"dtype_unknown", image(entry("F8_E4M3", "[16]", "[0,16]"), data),
       x + "dtype: expected F64, F32, F16, BF16, I64, I32, U8 or BOOL, got 'F8_E4M3'"},
      {"shape_string", image(R"({"x":{"shape":"2"}})"),
       x + "shape: expected an array, got a string"},
      {"shape_negative", image(entry("F32", "[-4]", "[0,16]"), data), shape + "-4"},
      {"shape_fraction", image(entry("F32", "[4.0]", "[0,16]"), data), shape + "4.0"},
      {"shape_true", image(entry("F32", "[true]", "[0,16]"), data), shape + "true"},
      {"shape_beyond_64_bits", image(entry("F32", "[36893488147419103232]", "[0,16]"), data),
       shape + "36893488147419103232"},
      {"shape_overflow", image(entry("F32", "[4294967296,4294967296,4]", "[0,0]")), too_large},
      {"shape_overflow_with_zero", image(entry("F32", "[4611686018427387904,4,0]", "[0,0]")),
       too_large},
      {"rank_9", image(entry("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), "\1"),
       x + "shape: expected at most 8 dimensions, got more"},
      {"offsets_three", image(entry("F32", "[4]", "[0,16,16]"), data),
       x + "data_offsets: expected [begin, end], got more numbers"},
      {"offsets_one", image(entry("F32", "[4]", "[0]"), data),
       x + "data_offsets: expected [begin, end], got one number or none"},
      {"offsets_negative", image(entry("F32", "[4]", "[-16,0]"), data),
       x + "data_offsets: expected integers of 0 or more, got -16"},
      {"offsets_reversed", image(entry("F32", "[4]", "[16,0]"), data),
       x + "data_offsets: expected 16 bytes (dtype and shape), got [16, 0]"},
      {"size_mismatch", image(entry("F32", "[3]", "[0,16]"), data),
       x + "data_offsets: expected 12 bytes (dtype and shape), got [0, 16]"},
      {"truncated", image(four_floats(), data.substr(1)),
       x + "data_offsets: expected an end of at most 15, got 16; the file is cut short or damaged"},
      {"far_away", image(entry("F32", "[0]", "[18446744073709551615,18446744073709551615]")),
       x + "data_offsets: expected an end of at most 0, got 18446744073709551615; the file is cut "
           "short or damaged"},
      {"trailing_bytes", image(four_floats(), data + "!"),
       "file: expected 16 bytes of data, got 17; the file has bytes that belong to no tensor"},
      {"gap", image(entry("F32", "[2]", "[8,16]"), data),
       x + "data_offsets: expected a begin of 0, got 8; the data has a gap"},
      {"overlap",
       image(R"({"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
             R"("x":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
             "123456"),
       x + "data_offsets: expected a begin of 4, got 2; the data overlaps another tensor's"},
      {"bool_two", image(entry("BOOL", "[2]", "[0,2]"), "\1\2"),
       x + "expected BOOL values 0 or 1, got another"},
      {"name_with_newline", image(R"({"a\nb":1})"),
       "file: tensor 'a\\x0ab': expected an object, got a number"},
  };
}

INSTANTIATE_TEST_SUITE_P(all, HostileFile, ::testing::ValuesIn(hostile()),
                         [](const auto& parameter) { return parameter.param.name; });

TEST(parse_safetensors, every_cut_of_a_file_is_refused) {
  const std::string whole = image(four_floats(), std::string(16, '\1'));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(message(whole.substr(0, size)), "accepted") << size;
  }
  EXPECT_EQ(message(whole), "accepted");
}

TEST(parse_safetensors, survives_every_changed_byte) {
  const std::string whole = image(four_floats(), std::string(16, '\1'));
  for (std::size_t at = 0; at < 8 + four_floats().size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      std::string changed = whole;
      changed[at] = static_cast<char>(value);
      try {
        const TensorMap tensors = parse(changed);
        for (const auto& [name, tensor] : tensors) {
          for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.get(i);
        }
      } catch (const Error&) {
      }
    }
  }
}

TEST_F(SafetensorsFile, round_trip_of_all_dtypes_shapes_and_names) {
  Random random(3);
  TensorMap tensors;
  const DType dtypes[] = {DType::f64, DType::f32, DType::f16, DType::bf16,
                          DType::i64, DType::i32, DType::u8,  DType::boolean};
  for (DType dtype : dtypes) {
    const std::string name(name_of(dtype));
    HostTensor full(TensorSpec::contiguous(dtype, {3, 1, 5}));
    HostTensor scalar(TensorSpec::contiguous(dtype, std::initializer_list<std::int64_t>{}));
    for (std::int64_t i = 0; i < full.numel(); ++i) {
      full.set(i, static_cast<double>(random.integer(0, 1)));
    }
    scalar.set(0, 1);
    tensors[name + " é\"\\\n\x01 名"] = full;
    tensors[name + "/scalar"] = scalar;
    tensors[name + "/empty"] = HostTensor(TensorSpec::contiguous(dtype, {2, 0, 7}));
  }
  tensors[""] = normal_tensor(DType::f32, {2, 2}, random);
  write_safetensors(path(), tensors);
  const TensorMap again = read_safetensors(path());
  ASSERT_EQ(again.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    ASSERT_TRUE(again.contains(name)) << name;
    EXPECT_TRUE(same_bits(again.find(name)->second, tensor)) << name;
    EXPECT_EQ(again.find(name)->second.spec().rank, tensor.spec().rank);
  }
  EXPECT_EQ(files(), 1u);
}

TEST_F(SafetensorsFile, strided_tensors_are_written_row_major) {
  Random random(5);
  const HostTensor tensor = normal_tensor(DType::f32, {3, 4}, random);
  const HostTensor strided = relaid(tensor, random_layout(tensor.spec(), random));
  write_safetensors(path(), {{"x", strided}});
  EXPECT_TRUE(same_bits(read_safetensors(path())["x"], tensor));
}

TEST_F(SafetensorsFile, may_replace_the_file_that_is_mapped) {
  Random random(6);
  write_safetensors(path(), {{"x", normal_tensor(DType::f32, {1000}, random)}});
  const TensorMap mapped = read_safetensors(path());
  const HostTensor before = contiguous_copy(mapped.find("x")->second);
  write_safetensors(path(), {{"x", filled_tensor(DType::f32, {5}, 1)}});
  EXPECT_TRUE(same_bits(mapped.find("x")->second, before));
  EXPECT_EQ(read_safetensors(path())["x"].numel(), 5);
}

TEST_F(SafetensorsFile, a_symbolic_link_stays_one) {
  write_safetensors(path("real"), {});
  fs::create_symlink("real", path("link"));
  write_safetensors(path("link"), {{"x", filled_tensor(DType::u8, {1}, 1)}});
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(read_safetensors(path("real")).size(), 1u);
}

std::string read_message(const std::string& path) {
  try {
    read_safetensors(path);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "accepted";
}

TEST_F(SafetensorsFile, unreadable_inputs_are_named) {
  EXPECT_EQ(read_message(path()), path() + ": cannot read: No such file or directory");
  EXPECT_EQ(read_message(folder_), folder_.string() + ": cannot read: not a regular file");
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  EXPECT_EQ(read_message(path("fifo")), path("fifo") + ": cannot read: not a regular file");
  std::ofstream(path("empty")).close();
  EXPECT_EQ(read_message(path("empty")), path("empty") + ": cannot read: the file is empty");
  if (::geteuid() != 0) {
    write_safetensors(path("secret"), {});
    ASSERT_EQ(::chmod(path("secret").c_str(), 0), 0);
    EXPECT_EQ(read_message(path("secret")), path("secret") + ": cannot read: Permission denied");
  }
}

TEST_F(SafetensorsFile, outputs_that_cannot_be_are_refused_and_leave_nothing) {
  const auto write_code = [](const std::string& target) {
    try {
      write_safetensors(target, {{"x", filled_tensor(DType::u8, {1}, 1)}});
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode{};
  };
  EXPECT_EQ(write_code(folder_), ErrorCode::invalid_argument);
  EXPECT_EQ(write_code("/dev/null"), ErrorCode::invalid_argument);
  EXPECT_EQ(write_code(path("no/such/folder/t")), ErrorCode::device);
  std::ofstream(path("file")).close();
  EXPECT_EQ(write_code(path("file/t")), ErrorCode::device);
  EXPECT_EQ(files(), 1u);
}

// The official package is the judge of our files, and we read its files, where it is installed.
TEST_F(SafetensorsFile, agrees_with_the_official_package) {
  if (std::system("python3 -c 'import safetensors.numpy' 2>/dev/null") != 0) {
    GTEST_SKIP() << "the Python package safetensors is not installed";
  }
  write_safetensors(path("ours"), {{"a é", tensor_of(DType::f32, {2, 2}, {1, 2, 3, 4})},
                                   {"b", tensor_of(DType::boolean, {3}, {1, 0, 1})},
                                   {"h", tensor_of(DType::f16, {1}, {0.5})},
                                   {"none", HostTensor(TensorSpec::contiguous(DType::i64, {0}))}});
  std::ofstream(path("judge.py")) << R"(
import sys
import numpy as np
from safetensors.numpy import load_file, save_file
t = load_file(sys.argv[1])
assert (t["a é"] == np.array([[1, 2], [3, 4]], np.float32)).all()
assert t["b"].dtype == bool and t["b"].tolist() == [True, False, True]
assert t["h"].dtype == np.float16 and t["h"][0] == 0.5
assert t["none"].dtype == np.int64 and t["none"].size == 0
save_file({"x": np.arange(6, dtype=np.int32).reshape(2, 3), "s": np.array(2.5)}, sys.argv[2],
          metadata={"format": "np"})
)";
  const std::string command =
      "python3 " + path("judge.py") + " " + path("ours") + " " + path("theirs");
  ASSERT_EQ(std::system(command.c_str()), 0);
  TensorMap theirs = read_safetensors(path("theirs"));
  EXPECT_EQ(theirs["x"].spec(), TensorSpec::contiguous(DType::i32, {2, 3}));
  EXPECT_EQ(theirs["x"].get(5), 5);
  EXPECT_EQ(theirs["s"].spec().rank, 0);
  EXPECT_EQ(theirs["s"].get(0), 2.5);
}

}  // namespace
}  // namespace pullback::driver
