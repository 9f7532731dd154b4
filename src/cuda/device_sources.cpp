#include "cuda/device_sources.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "cuda/hash.hpp"

namespace pullback::cuda {
namespace {

using namespace std::string_view_literals;

constexpr Header kSources[] = {
#include "device_sources.inc"
};

std::vector<std::string_view> includes(std::string_view text) {
  constexpr std::string_view kInclude = "#include \"";
  std::vector<std::string_view> names;
  for (std::size_t at = text.find(kInclude); at != text.npos; at = text.find(kInclude, at)) {
    at += kInclude.size();
    names.push_back(text.substr(at, text.find('"', at) - at));
  }
  return names;
}

}  // namespace

std::string header_hash(std::span<const Header> headers, std::string_view name) {
  std::map<std::string_view, std::string_view> texts;
  std::vector<std::string_view> left{name};
  while (!left.empty()) {
    const std::string_view next = left.back();
    left.pop_back();
    const auto header = std::find_if(headers.begin(), headers.end(),
                                     [&](const Header& each) { return each.name == next; });
    const std::string_view text = header == headers.end() ? ""sv : header->text;
    if (!texts.emplace(next, text).second) continue;
    for (std::string_view include : includes(text)) left.push_back(include);
  }
  std::string all;
  for (const auto& [each, text] : texts) {
    all.append(each).push_back('\0');
    all.append(text).push_back('\0');
  }
  return hash_text(all);
}

std::span<const Header> device_sources() { return kSources; }

std::string device_sources_hash(std::string_view source) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::string, std::string, std::less<>>();  // never destroyed
  const std::lock_guard lock(mutex);
  std::string all;
  for (std::string_view name : includes(source)) {
    auto it = known.find(name);
    if (it == known.end()) it = known.emplace(name, header_hash(kSources, name)).first;
    all += it->second;
  }
  return hash_text(all);
}

}  // namespace pullback::cuda
