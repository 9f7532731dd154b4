#include "driver/driver.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>

#include "core/check.hpp"
#include "driver/safetensors.hpp"

namespace pullback::driver {

const OpDriver& find_driver(std::string_view op) {
  std::string known;
  for (const OpDriver* driver : all_drivers()) {
    if (driver->name == op) return *driver;
    known += (known.empty() ? "" : ", ") + std::string(driver->name);
  }
  fail(ErrorCode::invalid_argument, "pullback", "op", known.empty() ? "none in this build" : known,
       fmt::format("'{}'", op));
}

bool is_gradient(const OpDriver& driver, std::string_view output) {
  return std::ranges::count(driver.gradients, output, &NamePair::second) > 0;
}

TensorMap evaluate(const Request& request) {
  const auto session = find_driver(request.op).prepare(request);
  session->forward();
  if (request.backward) session->backward();
  session->fetch(Fetch::all);
  return session->outputs;
}

const std::string* OptionReader::find(std::string_view name) {
  asked_.emplace_back(name);
  const auto it = options_.find(name);
  return it == options_.end() ? nullptr : &it->second;
}

std::string OptionReader::text(std::string_view name, std::string_view fallback) {
  const std::string* value = find(name);
  return value ? *value : std::string(fallback);
}

namespace {

template <class T>
bool parse(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

double OptionReader::number(std::string_view name, double fallback) {
  const std::string* text = find(name);
  double value = fallback;
  if (text && !(parse(*text, value) && std::isfinite(value))) {
    fail(ErrorCode::invalid_argument, op_, fmt::format("--{}", name), "a finite number",
         fmt::format("'{}'", *text));
  }
  return value;
}

std::int64_t OptionReader::integer(std::string_view name, std::int64_t fallback) {
  const std::string* text = find(name);
  std::int64_t value = fallback;
  if (text && !parse(*text, value)) {
    fail(ErrorCode::invalid_argument, op_, fmt::format("--{}", name), "an integer",
         fmt::format("'{}'", *text));
  }
  return value;
}

std::uint64_t OptionReader::seed(std::string_view name) {
  const std::string* text = find(name);
  std::uint64_t value = 0;
  if (!text || parse(*text, value)) return value;
  return static_cast<std::uint64_t>(integer(name, 0));
}

bool OptionReader::boolean(std::string_view name, bool fallback) {
  const int index = choice(name, {"false", "true"});
  return index < 0 ? fallback : index == 1;
}

std::vector<std::int64_t> OptionReader::integers(std::string_view name, std::size_t count) {
  const std::string* text = find(name);
  if (!text) return {};
  std::vector<std::int64_t> values;
  bool ok = true;
  for (std::size_t begin = 0; ok && begin <= text->size();) {
    const std::size_t end = std::min(text->find(',', begin), text->size());
    ok = parse(std::string_view(*text).substr(begin, end - begin), values.emplace_back());
    begin = end + 1;
  }
  if (!ok || values.size() != count) {
    fail(ErrorCode::invalid_argument, op_, fmt::format("--{}", name),
         fmt::format("{} integers with commas between", count), fmt::format("'{}'", *text));
  }
  return values;
}

int OptionReader::choice(std::string_view name, std::initializer_list<std::string_view> choices) {
  const std::string* text = find(name);
  if (!text) return -1;
  const auto it = std::find(choices.begin(), choices.end(), *text);
  if (it == choices.end()) {
    std::string known;
    for (auto choice : choices) known += (known.empty() ? "" : " or ") + std::string(choice);
    fail(ErrorCode::invalid_argument, op_, fmt::format("--{}", name), known,
         fmt::format("'{}'", *text));
  }
  return static_cast<int>(it - choices.begin());
}

void OptionReader::finish() const {
  for (const auto& [name, value] : options_) {
    if (std::find(asked_.begin(), asked_.end(), name) == asked_.end()) {
      std::string known;
      for (const auto& asked : asked_) known += (known.empty() ? "--" : ", --") + asked;
      fail(ErrorCode::invalid_argument, op_, "options", known, "--" + name);
    }
  }
}

void check_inputs(const OpDriver& driver, const Request& request) {
  std::string known;
  for (const TensorHelp& input : driver.inputs) {
    known += (known.empty() ? "" : ", ") + std::string(input.name);
    const bool cotangent =
        std::any_of(driver.cotangents.begin(), driver.cotangents.end(),
                    [&](const NamePair& pair) { return pair.second == input.name; });
    const bool required = input.required && (request.backward || !cotangent);
    if (required && !request.inputs.contains(input.name)) {
      fail(ErrorCode::invalid_argument, driver.name, input.name,
           fmt::format("a tensor {}", input.shape), "none");
    }
  }
  for (const auto& [name, tensor] : request.inputs) {
    const bool is_known = std::any_of(driver.inputs.begin(), driver.inputs.end(),
                                      [&](const TensorHelp& input) { return input.name == name; });
    if (!is_known) {
      fail(ErrorCode::invalid_argument, driver.name, "inputs", known,
           fmt::format("'{}'", printable(name, 400)));
    }
  }
}

TensorSpec spec_of(const TensorMap& tensors, std::string_view name) {
  const auto it = tensors.find(name);
  return it == tensors.end() ? TensorSpec{} : it->second.spec();
}

void* data_of(const TensorMap& tensors, std::string_view name) {
  const auto it = tensors.find(name);
  return it == tensors.end() ? nullptr : it->second.data();
}

HostTensor make_output(TensorSpec& spec, const Request& request, std::string_view name) {
  if (request.layout_seed != 0) {
    Random random(request.layout_seed ^ std::hash<std::string_view>()(name));
    spec = random_layout(spec, random);
  }
  return HostTensor(spec);
}

double compulsory_bytes(std::initializer_list<const TensorSpec*> specs) {
  double bytes = 0;
  for (const TensorSpec* spec : specs) {
    if (!spec->given()) continue;
    double count = 1;
    for (int dim = 0; dim < spec->rank; ++dim) {
      if (spec->strides[dim] != 0 || spec->shape[dim] == 0) {
        count *= static_cast<double>(spec->shape[dim]);
      }
    }
    bytes += count * static_cast<double>(size_of(spec->dtype));
  }
  return bytes;
}

}  // namespace pullback::driver
