// Untrusted cu_seqlens, the band's ranges, the dropout generator, and offsets past 32 bits.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "ops/attention/dropout.cuh"
#include "ops/attention/problem.hpp"
#include "ops/attention/run_attention.hpp"

namespace pullback::testing {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
constexpr double kInf = std::numeric_limits<double>::infinity();

HostTensor indices(DType dtype, std::initializer_list<std::int64_t> values) {
  HostTensor tensor(TensorSpec::contiguous(dtype, {static_cast<std::int64_t>(values.size())}));
  std::int64_t i = 0;
  for (std::int64_t value : values) {  // not HostTensor::set: a double cannot hold kMax
    if (dtype == DType::i64) {
      static_cast<std::int64_t*>(tensor.data())[i++] = value;
    } else {
      static_cast<std::int32_t*>(tensor.data())[i++] = static_cast<std::int32_t>(value);
    }
  }
  return tensor;
}

AttentionRun varlen_run(DType dtype, const HostTensor& cu_q, const HostTensor& cu_k) {
  driver::Random random(1);
  AttentionRun run;
  run.inputs["q"] = driver::normal_tensor(dtype, {70, 2, 16}, random);
  run.inputs["k"] = driver::normal_tensor(dtype, {50, 1, 16}, random);
  run.inputs["v"] = driver::normal_tensor(dtype, {50, 1, 12}, random);
  run.inputs["d_out"] = driver::normal_tensor(dtype, {70, 2, 12}, random);
  run.inputs["cu_seqlens_q"] = cu_q;
  run.inputs["cu_seqlens_k"] = cu_k;
  return run;
}

TEST(attention_sequences, hostile_cu_seqlens_stay_in_bounds_and_write_every_row) {
  const std::initializer_list<std::int64_t> hostile[] = {
      {0, 70, 70, 70},       {-5, -1, 20, 30},    {60, 40, 20, 0},
      {0, 1000, 2000, 3000}, {kMin, kMax, 0, 40}, {kMax, kMin, 3, 9},
      {kMin, kMin, 5, kMax}, {0, 50, 10, 60},     {kMax, kMax, kMax, kMax}};
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (DType index : {DType::i64, DType::i32}) {
      for (const auto& cu_q : hostile) {
        for (const auto& cu_k : hostile) {
          AttentionRun run = varlen_run(dtype, indices(index, cu_q), indices(index, cu_k));
          run.options.mask = BandMask::causal(Corner::bottom_right);
          for (const auto& [name, tensor] : run()) {
            EXPECT_TRUE(tensor.guards_intact()) << name;
            for (std::int64_t i = 0; i < tensor.numel(); ++i) {
              ASSERT_FALSE(std::isnan(tensor.get(i))) << name << " element " << i;
            }
          }
        }
      }
    }
  }
}

TEST(attention_sequences, clamping_is_as_documented) {
  // Entries: at least the largest before, at most the total; lengths: at most max_seqlen.
  AttentionRun hostile = varlen_run(DType::f64, indices(DType::i64, {-9, 50, 30, 1000}),
                                    indices(DType::i64, {5, 45, 20, kMax}));
  AttentionRun tame = varlen_run(DType::f64, indices(DType::i64, {0, 50, 50, 70}),
                                 indices(DType::i64, {5, 45, 45, 50}));
  const TensorMap from_hostile = hostile();
  for (const auto& [name, tensor] : tame()) {
    EXPECT_TRUE(driver::same_bits(from_hostile.at(name), tensor)) << name;
  }
  AttentionRun cut =
      varlen_run(DType::f64, indices(DType::i64, {0, 70}), indices(DType::i64, {0, 50}));
  cut.options.max_seqlen_q = 40;
  cut.options.max_seqlen_k = 30;
  AttentionRun shorter =
      varlen_run(DType::f64, indices(DType::i64, {0, 40}), indices(DType::i64, {0, 30}));
  const TensorMap from_cut = cut();
  for (const auto& [name, tensor] : shorter()) {
    EXPECT_TRUE(driver::same_bits(from_cut.at(name), tensor)) << name;
  }
  EXPECT_EQ(from_cut.at("lse").get(45), -kInf);
}

// FlashAttention #2562: zero-length sequences. And each sequence equals itself alone.
TEST(attention_sequences, packed_sequences_equal_themselves_alone) {
  const std::int64_t cu_q[] = {0, 0, 30, 30, 71, 90}, cu_k[] = {3, 12, 12, 12, 80, 100};
  driver::Random random(9);
  AttentionRun packed;
  packed.options.mask = {9, 4, Corner::bottom_right};
  packed.inputs["q"] = driver::normal_tensor(DType::f64, {95, 2, 8}, random);
  packed.inputs["k"] = driver::normal_tensor(DType::f64, {101, 2, 8}, random);
  packed.inputs["v"] = driver::normal_tensor(DType::f64, {101, 2, 8}, random);
  packed.inputs["d_out"] = driver::normal_tensor(DType::f64, {95, 2, 8}, random);
  packed.inputs["cu_seqlens_q"] = driver::tensor_of(DType::i64, {6}, {0, 0, 30, 30, 71, 90});
  packed.inputs["cu_seqlens_k"] = driver::tensor_of(DType::i64, {6}, {3, 12, 12, 12, 80, 100});
  const TensorMap all = packed();
  for (int b = 0; b < 5; ++b) {
    AttentionRun alone;
    alone.options.mask = packed.options.mask;
    const auto rows = [&](const HostTensor& tensor, int dim, const std::int64_t* cu) {
      return slice(tensor, dim, cu[b], cu[b + 1] - cu[b]);
    };
    const auto with_batch = [](const HostTensor& tensor) {
      TensorSpec spec = driver::contiguous_copy(tensor).spec();
      const TensorSpec batched =
          TensorSpec::contiguous(spec.dtype, {1, spec.shape[0], spec.shape[1], spec.shape[2]});
      const auto copy = std::make_shared<HostTensor>(driver::contiguous_copy(tensor));
      return HostTensor::borrow(batched, copy->data(), copy);
    };
    alone.inputs["q"] = with_batch(rows(packed.inputs["q"], 0, cu_q));
    alone.inputs["k"] = with_batch(rows(packed.inputs["k"], 0, cu_k));
    alone.inputs["v"] = with_batch(rows(packed.inputs["v"], 0, cu_k));
    alone.inputs["d_out"] = with_batch(rows(packed.inputs["d_out"], 0, cu_q));
    const TensorMap expected = alone();
    expect_near(rows(all.at("out"), 0, cu_q), expected.at("out"), 1e-13, "out");
    expect_near(rows(all.at("lse"), 1, cu_q), expected.at("lse"), 1e-13, "lse");
    expect_near(rows(all.at("d_q"), 0, cu_q), expected.at("d_q"), 1e-13, "d_q");
    expect_near(rows(all.at("d_k"), 0, cu_k), expected.at("d_k"), 1e-13, "d_k");
    expect_near(rows(all.at("d_v"), 0, cu_k), expected.at("d_v"), 1e-13, "d_v");
  }
  for (std::int64_t i = 90; i < 95; ++i) {  // behind the last sequence
    EXPECT_EQ(all.at("out").get(i * 16), 0);
    EXPECT_EQ(all.at("lse").get(95 + i), -kInf);
    EXPECT_EQ(all.at("d_q").get(i * 16 + 15), 0);
  }
  EXPECT_EQ(all.at("d_k").get(2 * 16), 0);  // before the first one
  EXPECT_EQ(all.at("d_v").get(100 * 16 + 15), 0);
}

TEST(attention_band, ranges_agree_with_the_definition) {
  using namespace attention;
  const std::int64_t sides[] = {-1, 0, 1, 3, 100, kMax};
  for (const Sequence sequence : {Sequence{0, 7, 0, 7}, {0, 5, 0, 9}, {0, 9, 0, 5}, {0, 4, 0, 0}}) {
    for (std::int64_t left : sides) {
      for (std::int64_t right : sides) {
        for (Corner corner : {Corner::top_left, Corner::bottom_right}) {
          const BandMask mask{left, right, corner};
          const std::int64_t offset =
              corner == Corner::bottom_right ? sequence.k_length - sequence.q_length : 0;
          for (std::int64_t i = 0; i < sequence.q_length; ++i) {
            const Range keys = visible_keys(mask, sequence, i);
            ASSERT_LE(0, keys.begin);
            ASSERT_LE(keys.begin, keys.end);
            ASSERT_LE(keys.end, sequence.k_length);
            for (std::int64_t j = 0; j < sequence.k_length; ++j) {
              const std::int64_t distance = j - i - offset;
              const bool seen = (left < 0 || distance >= -left) && (right < 0 || distance <= right);
              EXPECT_EQ(keys.begin <= j && j < keys.end, seen);
              const Range queries = seeing_queries(mask, sequence, j);
              EXPECT_EQ(queries.begin <= i && i < queries.end, seen);
            }
          }
        }
      }
    }
  }
}

// Known answers of the generator's authors (Random123, kat_vectors).
TEST(attention_dropout, philox_gives_the_known_answers) {
  const auto words = [](std::uint32_t key, std::uint32_t counter) {
    const auto result = attention::philox(key, key, {{counter, counter, counter, counter}});
    return std::vector<std::uint32_t>(result.word, result.word + 4);
  };
  EXPECT_EQ(words(0, 0),
            (std::vector<std::uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(words(~0u, ~0u),
            (std::vector<std::uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  const auto digits_of_pi =
      attention::philox(0xa4093822, 0x299f31d0, {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}});
  EXPECT_EQ(digits_of_pi.word[0], 0xd16cfe09);
  EXPECT_EQ(digits_of_pi.word[3], 0x24126ea1);
}

TEST(attention_dropout, threshold_and_scale_are_exact) {
  EXPECT_FALSE(attention::Dropout(0, 1).active());
  EXPECT_EQ(attention::Dropout(0.5, 1).threshold, 32768u);
  EXPECT_EQ(attention::Dropout(0.5, 1).scale(), 2);
  EXPECT_EQ(attention::Dropout(0.9999999, 1).threshold, 65535u);
  EXPECT_EQ(attention::Dropout(0.9999999, 1).scale(), 65536);
}

// With v the identity, out is the matrix of kept probabilities: the utility must say the same.
TEST(attention_dropout, forward_drops_what_the_mask_says) {
  constexpr std::int64_t kBatch = 2, kHeads = 3, kQueries = 70, kKeys = 61;
  for (DType dtype : driver::Case().dtypes) {
    AttentionRun run = normal_run(dtype, kBatch, kQueries, kKeys, kHeads, kHeads, kKeys);
    HostTensor identity = driver::filled_tensor(dtype, {1, kKeys, 1, kKeys}, 0);
    for (std::int64_t j = 0; j < kKeys; ++j) identity.set(j * kKeys + j, 1);
    run.inputs["v"] = driver::broadcast(identity, {kBatch, kKeys, kHeads, kKeys});
    run.options.dropout = 0.3;
    run.options.dropout_seed = 0xfedcba9876543210u;
    HostTensor mask(TensorSpec::contiguous(DType::u8, {kBatch, kHeads, kQueries, kKeys}));
    write_dropout_mask(mask.spec(), mask.data(), 0.3, run.options.dropout_seed);
    const HostTensor out = run().at("out");
    std::int64_t kept = 0;
    for (std::int64_t flat = 0; flat < mask.numel(); ++flat) {
      const std::int64_t j = flat % kKeys, i = flat / kKeys % kQueries;
      const std::int64_t h = flat / kKeys / kQueries % kHeads, b = flat / kKeys / kQueries / kHeads;
      const double value = out.get(((b * kQueries + i) * kHeads + h) * kKeys + j);
      ASSERT_EQ(value != 0, mask.get(flat) == 1) << name_of(dtype) << " element " << flat;
      kept += mask.get(flat) == 1;
    }
    // Four standard deviations.
    const auto count = static_cast<double>(mask.numel());
    EXPECT_NEAR(static_cast<double>(kept) / count, 0.7, 4 * std::sqrt(0.21 / count));
  }
}

// The seed's tensor is read by each run of a plan, and is the option under another name.
TEST(attention_dropout, each_run_reads_its_seed) {
  const std::pair<const char*, DType> variants[] = {{"cpu", DType::f32},
                                                    {"cpu", DType::bf16},  // the best that there is
                                                    {"reference", DType::f64}};
  for (const auto& [variant, dtype] : variants) {
    driver::Random random(1);
    const HostTensor q = driver::normal_tensor(dtype, {1, 40, 2, 8}, random);
    AttentionProblem problem;
    problem.q = problem.k = problem.v = q.spec();
    problem.dropout = 0.4;
    const auto out_of = [&](const Plan<AttentionTensors>& plan, const std::uint64_t* seed) {
      HostTensor out(q.spec());
      std::vector<std::byte> memory(plan.workspace_bytes() + kWorkspaceAlignment);
      void* scratch = memory.data();
      std::size_t room = memory.size();
      std::align(kWorkspaceAlignment, plan.workspace_bytes(), scratch, room);
      plan.run({}, {.q = q.data(), .k = q.data(), .v = q.data(), .out = out.data(), .seed = seed},
               {scratch, plan.workspace_bytes()});
      return out;
    };
    AttentionProblem with_tensor = problem;
    with_tensor.seed = TensorSpec::contiguous(DType::i64, {1});
    const PlanOptions options{.variant = dtype == DType::bf16 ? "" : variant};
    const auto plan = make_plan({}, with_tensor, Pass::forward, options);
    for (const std::uint64_t seed : {std::uint64_t{7}, std::uint64_t{0xfedcba9876543210u}}) {
      problem.dropout_seed = seed;
      const HostTensor expected = out_of(make_plan({}, problem, Pass::forward, options), nullptr);
      const HostTensor found = out_of(plan, &seed);
      for (std::int64_t i = 0; i < found.numel(); ++i) ASSERT_EQ(found.get(i), expected.get(i));
    }
    EXPECT_THROW(out_of(plan, nullptr), Error);
  }
}

// Row strides of 2^31 + 64 elements: nothing may pass through 32 bits. The memory is never
// touched between the rows, so that it costs address space only.
TEST(attention_offsets, strides_past_32_bits) {
  constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 64, kRows = 3, kWidth = 4;
  constexpr std::size_t kBytes = static_cast<std::size_t>(kStride) * kRows * sizeof(float);
  void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for 24 GiB";
  AttentionRun near = normal_run(DType::f32, 1, kRows, kRows, 1, 1, kWidth);
  AttentionRun far = near;
  const std::shared_ptr<void> owner(memory, [](void* data) { munmap(data, kBytes); });
  std::int64_t column = 0;
  const auto place = [&] {
    TensorSpec spec = TensorSpec::contiguous(DType::f32, {1, kRows, 1, kWidth});
    spec.strides[1] = kStride;
    column += kWidth;
    return HostTensor::borrow(spec, static_cast<float*>(memory) + column, owner);
  };
  for (auto& [name, tensor] : far.inputs) {
    const HostTensor copy = place();
    for (std::int64_t i = 0; i < copy.numel(); ++i) copy.set(i, tensor.get(i));
    tensor = copy;
  }
  for (const char* name : {"d_q", "d_k", "d_v"}) far.outputs[name] = place();
  const TensorMap expected = near(), got = far();
  for (const auto& [name, tensor] : expected) {
    for (std::int64_t i = 0; i < tensor.numel(); ++i) {
      EXPECT_NEAR(got.at(name).get(i), tensor.get(i), 1e-6) << name;
    }
  }
}

}  // namespace
}  // namespace pullback::testing
