#include "cuda/hash.hpp"

#include <fmt/format.h>

// Plain C: the vector paths of the inlined library trip a false warning in gcc 12's AVX-512
// headers.
#define XXH_VECTOR XXH_SCALAR
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace pullback::cuda {

std::uint64_t hash64(std::string_view bytes, std::uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

std::string hash_text(std::string_view bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace pullback::cuda
