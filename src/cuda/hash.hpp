// Content hashes (XXH3). Not cryptographic: whoever relies on equality compares the content too.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace pullback::cuda {

std::uint64_t hash64(std::string_view bytes, std::uint64_t seed = 0);
std::string hash_text(std::string_view bytes);  // 32 hex digits

}  // namespace pullback::cuda
