// Cases of packed sequences, whose offsets nobody vouches for.
#include <fmt/format.h>

#include "ops/attention/case_setup.hpp"

namespace pullback::driver::attention_setup {

void add_varlen(std::vector<Case>& cases) {
  const Setup plain{.query = 96, .key = 110, .cu_q = {0, 40, 41, 96}, .cu_k = {0, 33, 50, 110}};
  add(cases, "varlen", plain);
  for (const char* corner : {"top-left", "bottom-right"}) {
    add(cases, fmt::format("varlen causal {}", corner), plain, {{"causal", corner}});
  }
  Setup setup = plain;
  setup.index_dtype = DType::i32;
  add(cases, "varlen window, int32", setup,
      {{"window", "7,2"},
       {"corner", "bottom-right"},
       {"max-seqlen-q", "64"},
       {"max-seqlen-k", "61"}});
  setup = {.query = 90,
           .key = 80,
           .heads = 4,
           .cu_q = {0, 0, 33, 33, 70, 80},
           .cu_k = {0, 20, 20, 40, 71, 71},
           .d_lse = true};
  add(cases, "varlen with empty sequences and rows outside", setup, {{"causal", "bottom-right"}});
  setup.cu_q = {5, 9, 60};
  setup.cu_k = {7, 40, 64};
  add(cases, "varlen that begins later", setup, {{"dropout", "0.3"}, {"seed", "11"}});
  setup.value_dim = 9;
  add(cases, "varlen with softcap, Dv 9", setup, {{"softcap", "2"}});
  setup.cu_q = setup.cu_k = {0};
  add(cases, "varlen without sequences", setup);
  // Nobody vouches for offsets: an entry is at least the largest before it and at most the total.
  for (const std::int64_t head_dim : {16, 64, 128}) {
    const std::int64_t far = head_dim == 64 ? (1 << 30) : std::int64_t{1} << 50;
    Setup untrusted{.query = 200,
                    .key = 150,
                    .head_dim = head_dim,
                    .value_dim = head_dim,
                    .cu_q = {-far, 140, 30, 150, far},
                    .cu_k = {5, 120, 60, far, -far},
                    .index_dtype = head_dim == 64 ? DType::i32 : DType::i64,
                    .d_lse = true};
    const std::string of_dim = fmt::format(", D {}", head_dim);
    add(cases, "varlen, offsets out of order" + of_dim, untrusted,
        {{"causal", "bottom-right"}, {"check-indices", "false"}});
    untrusted.cu_q = {0, 150, 200};
    untrusted.cu_k = {0, 100, 150};
    add(cases, "varlen, sequences cut short" + of_dim, untrusted,
        {{"causal", "bottom-right"},
         {"max-seqlen-q", "90"},
         {"max-seqlen-k", "70"},
         {"check-indices", "false"}});
  }
  add(cases, "varlen without rows", {.query = 0, .key = 0, .cu_q = {0, 0, 0}, .cu_k = {0, 0, 0}});
}

}  // namespace pullback::driver::attention_setup
