#include "cuda/device_sources.hpp"

#include "cuda/hash.hpp"

namespace pullback::cuda {
namespace {

using namespace std::string_view_literals;

constexpr Header kSources[] = {
#include "device_sources.inc"
};

}  // namespace

std::span<const Header> device_sources() { return kSources; }

const std::string& device_sources_hash() {
  static const std::string hash = [] {
    std::string all;
    for (const Header& header : kSources) {
      all.append(header.name).push_back('\0');
      all.append(header.text).push_back('\0');
    }
    return hash_text(all);
  }();
  return hash;
}

}  // namespace pullback::cuda
