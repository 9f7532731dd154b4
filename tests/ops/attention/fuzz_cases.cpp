// Random problems of attention.
#include <fmt/format.h>

#include <algorithm>

#include "ops/attention/case_setup.hpp"

namespace pullback::driver {
namespace {

using namespace attention_setup;

std::int64_t fuzzed_length(Random& random) {
  static constexpr std::int64_t kLengths[] = {0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 129};
  if (random.chance(0.4)) return random.integer(1, 100);
  return kLengths[random.integer(0, std::size(kLengths) - 1)];
}

// Sequence ends in [0, total], mostly in order; often some are empty, sometimes rows are left over.
// None has one row, for the reason below.
std::vector<std::int64_t> fuzzed_offsets(std::int64_t count, std::int64_t total, Random& random) {
  std::vector<std::int64_t> offsets;
  for (std::int64_t i = 0; i <= count; ++i) offsets.push_back(5 * random.integer(0, total / 5));
  if (random.chance(0.2)) {
    // As far out as may be; but beyond the total only where the last rows are not one.
    const std::int64_t most = total % 5 == 1 ? total / 5 : 1000;
    const auto which = static_cast<std::size_t>(random.integer(0, count));
    if (random.chance(0.5)) offsets[which] = 5 * random.integer(-1000, most);
    return offsets;
  }
  std::ranges::sort(offsets);
  if (random.chance(0.7)) offsets.front() = 0;
  if (random.chance(0.7) && total - offsets[offsets.size() - 2] != 1) offsets.back() = total;
  return offsets;
}

}  // namespace

Case attention_fuzz(std::uint64_t seed) {
  static constexpr std::int64_t kHeadDims[] = {1,  3,   8,   16,  20,  33, 64,
                                               72, 100, 128, 160, 192, 256};
  Random random(seed);
  const auto one_of = [&](const auto& list) {
    return list[random.integer(0, static_cast<std::int64_t>(std::size(list)) - 1)];
  };
  Setup setup;
  setup.batch = random.integer(1, 3);
  setup.query = fuzzed_length(random);
  // A row that sees one key has p = 1 and gradients of q and k that cancel to 0, in the textbook
  // computation even exactly: no measure for errors. The exact cases have such rows.
  setup.key = fuzzed_length(random);
  if (setup.key > 0 && setup.key < 8) setup.key += 8;
  setup.kv_heads = random.integer(1, 2);
  setup.heads = setup.kv_heads * random.integer(1, 3);
  setup.head_dim = one_of(kHeadDims);
  setup.value_dim = random.chance(0.5) ? setup.head_dim : one_of(kHeadDims);
  setup.relayout = random.chance(0.5);
  OptionMap options;
  const char* const corner = random.chance(0.5) ? "top-left" : "bottom-right";
  const bool rows = setup.query > 3;
  const bool causal = rows && random.chance(0.4), window = rows && random.chance(0.3);
  if (causal) options["causal"] = corner;
  if (window) {
    options["window"] = fmt::format("{},{}", random.integer(-1, 40), random.integer(-1, 40));
    options["corner"] = corner;
  }
  if (random.chance(0.2)) options["softcap"] = fmt::format("{}", 1 + 5 * random.uniform());
  if (random.chance(0.2)) options["scale"] = fmt::format("{}", random.uniform());
  if (random.chance(0.3)) {
    options["dropout"] = fmt::format("{}", 0.6 * random.uniform());
    options["seed"] = fmt::format("{}", random.integer(0, 1 << 30));
  }
  if (random.chance(0.25)) {
    setup.cu_q = fuzzed_offsets(setup.batch, setup.query, random);
    setup.cu_k = fuzzed_offsets(setup.batch, setup.key, random);
    if (random.chance(0.5)) setup.index_dtype = DType::i32;
    for (const char* most : {"max-seqlen-q", "max-seqlen-k"}) {
      if (random.chance(0.3)) options[most] = fmt::format("{}", random.integer(2, 100));
    }
    options["check-indices"] = "false";
  } else if (random.chance(0.4)) {
    for (std::int64_t size : {setup.batch, setup.heads, setup.query}) {
      setup.bias.push_back(random.chance(0.5) ? size : 1);
    }
    setup.bias.push_back(setup.key);  // the sum over keys cancels too
  }
  const bool blocks = setup.cu_q.empty() && random.chance(0.25);
  if (blocks) {
    const std::int64_t block = 16 * random.integer(1, 4);
    options["block"] = fmt::format("{}", block);
    setup = with_blocks(setup, {.block = block,
                                .batches = random.chance(0.5) ? 1 : setup.batch,
                                .heads = random.chance(0.5) ? 1 : setup.heads,
                                .density = random.uniform()});
  }
  // So it is for rows at the band's ends without d_lse, and where few blocks are seen.
  setup.d_lse = blocks || causal || window || !setup.cu_k.empty() || random.chance(0.3);
  return make_case(fmt::format("fuzz {}", seed), setup, options);
}

}  // namespace pullback::driver
