#include "driver/safetensors.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <vector>

#include "pullback/error.hpp"

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

namespace pullback::driver {
namespace {

struct DTypeName {
  std::string_view name;
  DType dtype;
};
constexpr DTypeName kDTypes[] = {
    {"F64", DType::f64}, {"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16},
    {"I64", DType::i64}, {"I32", DType::i32}, {"U8", DType::u8},   {"BOOL", DType::boolean}};

constexpr std::size_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the official reader's limit

struct Entry {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape, offsets;
  TensorSpec spec = {};
};

// Accepts exactly the header's grammar, event by event: no document is built, and nesting deeper
// than the format's own is refused where it begins.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(std::string_view origin) : origin_(origin) {}

  std::vector<Entry> entries;

  bool start_object(std::size_t) override {
    if (state_ == State::start) {
      state_ = State::names;
    } else if (state_ == State::name_value) {
      state_ = name_ == "__metadata__" ? State::metadata : State::fields;
      fields_.clear();
      if (state_ == State::fields) entries.emplace_back().name = name_;
    } else {
      unexpected("an object");
    }
    return true;
  }
  bool end_object() override {
    if (state_ == State::fields && fields_.size() != 3) {
      refuse("expected dtype, shape and data_offsets, got an incomplete entry");
    }
    state_ = state_ == State::names ? State::done : State::names;
    return true;
  }
  bool key(string_t& key) override {
    if (state_ == State::names) {
      name_ = key;
      if (!names_.insert(key).second) refuse("expected unique names, got it twice");
      state_ = State::name_value;
      return true;
    }
    if (!fields_.insert(key).second) {
      refuse(fmt::format("expected unique keys, got '{}' twice", printable(key)));
    }
    if (state_ == State::metadata) {
      state_ = State::metadata_value;
    } else if (key == "dtype") {
      state_ = State::dtype;
    } else if (key == "shape") {
      state_ = State::shape;
    } else if (key == "data_offsets") {
      state_ = State::offsets;
    } else {
      refuse(fmt::format("expected dtype, shape and data_offsets, got '{}'", printable(key)));
    }
    return true;
  }
  bool string(string_t& value) override {
    if (state_ == State::metadata_value) {
      state_ = State::metadata;
    } else if (state_ == State::dtype) {
      entries.back().dtype = value;
      state_ = State::fields;
    } else {
      unexpected("a string");
    }
    return true;
  }
  bool start_array(std::size_t) override {
    if (state_ == State::shape) {
      state_ = State::shape_items;
    } else if (state_ == State::offsets) {
      state_ = State::offsets_items;
    } else {
      unexpected("an array");
    }
    return true;
  }
  bool end_array() override {
    if (state_ == State::offsets_items && entries.back().offsets.size() != 2) {
      refuse("data_offsets: expected [begin, end], got one number or none");
    }
    state_ = State::fields;
    return true;
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (state_ == State::shape_items) {
      if (entries.back().shape.size() == kMaxRank) {
        refuse(fmt::format("shape: expected at most {} dimensions, got more", kMaxRank));
      }
      entries.back().shape.push_back(value);
    } else if (state_ == State::offsets_items) {
      if (entries.back().offsets.size() == 2) {
        refuse("data_offsets: expected [begin, end], got more numbers");
      }
      entries.back().offsets.push_back(value);
    } else {
      unexpected("a number");
    }
    return true;
  }
  bool number_integer(number_integer_t value) override {
    unexpected(fmt::format("{}", value));
    return true;
  }
  bool number_float(number_float_t, const string_t& text) override {
    unexpected(printable(text));
    return true;
  }
  bool null() override {
    unexpected("null");
    return true;
  }
  bool boolean(bool value) override {
    unexpected(value ? "true" : "false");
    return true;
  }
  bool binary(binary_t&) override { return false; }  // JSON text has none
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception&) override {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: header: expected JSON in UTF-8, got an error at byte {}", origin_,
                            position));
  }

 private:
  enum class State {
    start,  // before the header's {
    names,  // between tensors
    name_value,
    fields,  // between the keys of one tensor
    dtype,
    shape,
    shape_items,
    offsets,
    offsets_items,
    metadata,
    metadata_value,
    done
  };

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: tensor '{}': {}", origin_, printable(name_), what));
  }
  [[noreturn]] void unexpected(std::string_view got) const {
    switch (state_) {
      case State::name_value:
        refuse(fmt::format("expected an object, got {}", got));
      case State::dtype:
        refuse(fmt::format("dtype: expected a string, got {}", got));
      case State::shape:
        refuse(fmt::format("shape: expected an array, got {}", got));
      case State::shape_items:
        refuse(fmt::format("shape: expected integers of 0 or more, got {}", got));
      case State::offsets:
        refuse(fmt::format("data_offsets: expected an array, got {}", got));
      case State::offsets_items:
        refuse(fmt::format("data_offsets: expected integers of 0 or more, got {}", got));
      case State::metadata_value:
        refuse(fmt::format("expected strings, got {}", got));
      default:
        throw Error(ErrorCode::invalid_argument,
                    fmt::format("{}: header: expected a JSON object, got {}", origin_, got));
    }
  }

  std::string origin_;
  State state_ = State::start;
  std::string name_;
  std::set<std::string> names_, fields_;
};

[[noreturn]] void refuse(std::string_view origin, std::string_view name, std::string_view what) {
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: tensor '{}': {}", origin, printable(name), what));
}

TensorSpec spec_of_entry(const Entry& entry, std::string_view origin) {
  const auto* dtype =
      std::find_if(std::begin(kDTypes), std::end(kDTypes),
                   [&](const DTypeName& known) { return known.name == entry.dtype; });
  if (dtype == std::end(kDTypes)) {
    refuse(origin, entry.name,
           fmt::format("dtype: expected F64, F32, F16, BF16, I64, I32, U8 or BOOL, got '{}'",
                       printable(entry.dtype)));
  }
  std::array<std::int64_t, kMaxRank> shape{};
  std::uint64_t bytes = size_of(dtype->dtype);
  std::uint64_t reach = bytes;  // of the non-zero sizes: bounds the strides too
  for (std::size_t dim = 0; dim < entry.shape.size(); ++dim) {
    const std::uint64_t size = entry.shape[dim];
    if (__builtin_mul_overflow(reach, std::max<std::uint64_t>(size, 1), &reach) ||
        reach > std::uint64_t{kMaxTensorBytes}) {
      refuse(origin, entry.name, "shape: expected at most 2^50 bytes, got more");
    }
    bytes *= size;
    shape[dim] = static_cast<std::int64_t>(size);
  }
  const std::uint64_t begin = entry.offsets[0], end = entry.offsets[1];
  if (begin > end || end - begin != bytes) {
    refuse(origin, entry.name,
           fmt::format("data_offsets: expected {} bytes (dtype and shape), got [{}, {}]", bytes,
                       begin, end));
  }
  return TensorSpec::contiguous(dtype->dtype, std::span(shape).first(entry.shape.size()));
}

// The data must be covered without gaps or overlaps, in whatever order the header lists it.
void check_coverage(std::vector<Entry>& entries, std::uint64_t data_bytes,
                    std::string_view origin) {
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.offsets < b.offsets; });
  std::uint64_t covered = 0;
  for (const Entry& entry : entries) {
    if (entry.offsets[1] > data_bytes) {
      refuse(origin, entry.name,
             fmt::format("data_offsets: expected an end of at most {}, got {}; the file is cut "
                         "short or damaged",
                         data_bytes, entry.offsets[1]));
    }
    if (entry.offsets[0] != covered) {
      refuse(origin, entry.name,
             fmt::format("data_offsets: expected a begin of {}, got {}; the data {}", covered,
                         entry.offsets[0],
                         entry.offsets[0] < covered ? "overlaps another tensor's" : "has a gap"));
    }
    covered = entry.offsets[1];
  }
  if (covered != data_bytes) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: expected {} bytes of data, got {}; the file has bytes that belong "
                            "to no tensor",
                            origin, covered, data_bytes));
  }
}

HostTensor tensor_at(const TensorSpec& spec, std::span<const std::byte> data,
                     std::shared_ptr<const void> owner) {
  if (reinterpret_cast<std::uintptr_t>(data.data()) % size_of(spec.dtype) == 0) {
    return HostTensor::borrow(spec, data.data(), std::move(owner));
  }
  HostTensor copy(spec);
  if (!data.empty()) std::memcpy(copy.data(), data.data(), data.size());
  return copy;
}

std::string text_of(int error) { return std::generic_category().message(error); }
std::string text_of(std::string_view why) { return std::string(why); }

}  // namespace

std::string_view safetensors_name(DType dtype) {
  const auto* known = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                   [&](const DTypeName& entry) { return entry.dtype == dtype; });
  return known->name;
}

std::string printable(std::string_view text, std::size_t limit) {
  std::string result;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool goes_on = (byte & 0xc0) == 0x80;  // with a letter of UTF-8
    if (result.size() >= limit && !goes_on) return result + "…";
    if (byte < 0x20 || byte == 0x7f) {
      result += fmt::format("\\x{:02x}", byte);
    } else {
      result += c;
    }
  }
  return result;
}

TensorMap parse_safetensors(std::span<const std::byte> bytes, std::string_view origin,
                            std::shared_ptr<const void> owner) {
  const auto refuse_file = [&](const std::string& what) {
    throw Error(ErrorCode::invalid_argument, fmt::format("{}: {}", origin, what));
  };
  if (bytes.size() < kLengthBytes) {
    refuse_file(fmt::format("expected a safetensors file, got {} bytes", bytes.size()));
  }
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), kLengthBytes);
  if (header_bytes > kMaxHeaderBytes) {
    refuse_file(fmt::format("expected a header of at most {} bytes, got {}; not a safetensors file",
                            kMaxHeaderBytes, header_bytes));
  }
  if (header_bytes > bytes.size() - kLengthBytes) {
    refuse_file(fmt::format("expected a header of {} bytes, got {}; the file is cut short",
                            header_bytes, bytes.size() - kLengthBytes));
  }
  const auto* header = reinterpret_cast<const char*>(bytes.data()) + kLengthBytes;
  if (header_bytes == 0 || *header != '{') {
    refuse_file("expected a header that begins with '{'; not a safetensors file");
  }
  // The JSON parser would take a NUL for the end and ignore what follows.
  if (std::memchr(header, 0, header_bytes) != nullptr) {
    refuse_file("header: expected JSON in UTF-8, got a NUL byte");
  }
  HeaderReader reader(origin);
  nlohmann::json::sax_parse(header, header + header_bytes, &reader);

  const auto data = bytes.subspan(kLengthBytes + header_bytes);
  for (Entry& entry : reader.entries) entry.spec = spec_of_entry(entry, origin);
  check_coverage(reader.entries, data.size(), origin);
  TensorMap tensors;
  for (const Entry& entry : reader.entries) {
    const auto part = data.subspan(entry.offsets[0], entry.offsets[1] - entry.offsets[0]);
    if (entry.spec.dtype == DType::boolean &&
        std::any_of(part.begin(), part.end(), [](std::byte b) { return b > std::byte{1}; })) {
      refuse(origin, entry.name, "expected BOOL values 0 or 1, got another");
    }
    tensors[entry.name] = tensor_at(entry.spec, part, owner);
  }
  return tensors;
}

TensorMap read_safetensors(const std::string& path) {
  const std::string origin = printable(path, 400);
  const auto refuse_file = [&](const auto& why) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: cannot read: {}", origin, text_of(why)));
  };
  // Without O_NONBLOCK, opening a FIFO would wait for a writer.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) refuse_file(errno);
  struct stat status {};
  const bool regular = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  const auto size = regular ? static_cast<std::size_t>(status.st_size) : 0;
  void* memory = size ? ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
  const int error = errno;
  ::close(file);
  if (!regular) refuse_file("not a regular file");
  if (size == 0) refuse_file("the file is empty");
  if (memory == MAP_FAILED) refuse_file(error);
  const std::shared_ptr<const void> mapping(
      memory, [size](const void* mapped) { ::munmap(const_cast<void*>(mapped), size); });
  return parse_safetensors({static_cast<const std::byte*>(memory), size}, origin, mapping);
}

}  // namespace pullback::driver
