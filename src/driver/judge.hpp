// How far an output may be from its definition.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>

#include "driver/check.hpp"

namespace pullback::driver {

// Of a floating output: its largest errors by the sizes of what is expected, and its mean error.
struct Errors {
  std::array<double, std::size(kJudgedSizes)> largest{};
  double mean = 0;

  // Keeps the larger ones. Elements that are not finite in a third tensor do not count.
  void add(const HostTensor& got, const HostTensor& exact, const HostTensor* finite);
};
using AllErrors = std::map<std::string, Errors>;

// Outlives neither the request nor what is expected of it.
class Judge {
 public:
  Judge(const Request& request, const Expected& expected);
  // A floating output.
  void judge(const std::string& name, const HostTensor& value, CheckReport& report);

 private:
  // Computed where they matter, as they take long: how far the exact output moves by what the op
  // rounds off, and what a textbook computation gets wrong of inputs nearby.
  const Errors& moved(const std::string& name);
  const Errors& worst_textbook(const std::string& name);

  const Request& request_;
  const Expected& expected_;
  const OpDriver& driver_;
  std::optional<AllErrors> moved_, textbook_;
};

}  // namespace pullback::driver
