// Forward: a task computes out and lse of a block of queries of one head, or of some heads that
// share their keys, going over the keys it sees tile by tile with a running maximum m and sum l
// (Milakov and Gimelshein 2018; Dao et al. 2022):
//
//   S = Q Kᵀ     m' = max(m, rowmax S)     P = exp(S - m')     f = exp(m - m')
//   l <- f l + rowsum P     O <- f O + P V                     out = O / l     lse = m + log l
//
// The keys of a tile are packed once for all queries of the task. A row's bits do not depend on
// which other queries share its task.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/cpu/forward.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>
#include <cmath>

#include "ops/attention/cpu/engine-inl.hpp"
#include "ops/attention/cpu/scores-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::attention::HWY_NAMESPACE {
namespace {

template <class Engine>
class ForwardTask {
  using Real = typename Engine::Real;

 public:
  ForwardTask(const CpuRun& run, int slot)
      : run_(run),
        layout_(run.layout),
        bump_(run.scratch + static_cast<std::size_t>(slot) * run.layout.scratch_bytes),
        scratch_(bump_, run.layout),
        engine_(scratch_.engine),
        value_width_(padded_width(layout_.sizes.value_dim)) {}

  // Of task_heads heads, from `h` on.
  void Compute(std::int64_t b, std::int64_t h, std::int64_t block) {
    b_ = b;
    first_head_ = h;
    sequence_ = run_.sequences[b];
    first_query_ = block * layout_.task_queries;
    queries_ = std::min(layout_.task_queries, sequence_.q_length - first_query_);
    if (queries_ <= 0) return;
    std::fill_n(scratch_.largest, layout_.task_rows(), -kInfinity<Real>);
    std::fill_n(scratch_.sum, layout_.task_rows(), Real{0});
    std::fill_n(scratch_.out, layout_.task_rows() * value_width_, Real{0});
    const Range keys = SeenKeys(first_query_, queries_);
    if (!keys.empty()) {
      ForEachHead([&] { PackQueries(); });
      const std::int64_t tile = layout_.key_tile;
      for (std::int64_t key = keys.begin / tile * tile; key < keys.end; key += tile) {
        bool seen = false;
        ForEachHead([&] { seen |= SeesBlocks(first_query_, queries_, key); });
        if (seen) AddKeys(key);
      }
    }
    ForEachHead([&] { Write(); });
  }

 private:
  // With h_ and first_row_ of each.
  template <class Work>
  void ForEachHead(const Work& work) {
    for (std::int64_t n = 0; n < layout_.task_heads; ++n) {
      h_ = first_head_ + n;
      first_row_ = n * layout_.task_queries;
      work();
    }
  }

  Range SeenKeys(std::int64_t first, std::int64_t count) const {
    return {visible_keys(layout_.problem.mask, sequence_, first).begin,
            visible_keys(layout_.problem.mask, sequence_, first + count - 1).end};
  }

  // Whether the block mask lets any of the queries see any key of the tile.
  bool SeesBlocks(std::int64_t first, std::int64_t count, std::int64_t first_key) const {
    return layout_.seen_blocks.any(
        b_, h_, {first, first + count},
        {first_key, std::min(first_key + layout_.key_tile, sequence_.k_length)});
  }

  void PackQueries() {
    const AttentionProblem& problem = layout_.problem;
    for (std::int64_t i = 0; i < queries_; i += kQueryTile) {
      NonFiniteRows listed{scratch_.non_finite};
      engine_.PackQueries(
          tile_source(problem.q, run_.tensors.q, b_, sequence_.q_begin + first_query_ + i, h_,
                      std::min(kQueryTile, queries_ - i)),
          QueryTile(i), nullptr, listed);
      finite_[(first_row_ + i) / kQueryTile] = listed.count == 0;
    }
  }

  Real* QueryTile(std::int64_t i) const {
    return scratch_.q + (first_row_ + i) * padded_width(layout_.sizes.head_dim);
  }

  // A tile of keys and values, packed.
  struct KeyTile {
    std::int64_t first;
    std::ptrdiff_t keys;
    TileSource values;
    NonFiniteRows bad_values;
    bool finite;  // keys and values
  };

  void AddKeys(std::int64_t first_key) {
    const AttentionProblem& problem = layout_.problem;
    const auto keys =
        static_cast<std::ptrdiff_t>(std::min(layout_.key_tile, sequence_.k_length - first_key));
    const std::int64_t kv_head = first_head_ / layout_.sizes.group;
    const auto source = [&](const TensorSpec& spec, const void* data) {
      return tile_source(spec, data, b_, sequence_.k_begin + first_key, kv_head, keys);
    };
    NonFiniteRows bad_keys{scratch_.non_finite}, bad_values{scratch_.non_finite + layout_.key_tile};
    const TileSource values = source(problem.v, run_.tensors.v);
    engine_.PackKeys(source(problem.k, run_.tensors.k), scratch_.k, nullptr, bad_keys);
    engine_.PackKeys(values, nullptr, scratch_.v, bad_values);
    const bool finite = bad_keys.count == 0 && bad_values.count == 0;
    const KeyTile tile{first_key, keys, values, bad_values, finite};
    ForEachHead([&] { AddTile(tile); });
  }

  void AddTile(const KeyTile& tile) {
    const AttentionSizes& sizes = layout_.sizes;
    TileTerms<Real> terms(run_, scratch_.row, sequence_, b_, h_, tile.first, tile.keys);
    const auto head_dim = static_cast<std::ptrdiff_t>(sizes.head_dim);
    const auto value_dim = static_cast<std::ptrdiff_t>(sizes.value_dim);
    const auto tile_row = static_cast<std::ptrdiff_t>(layout_.key_tile);
    const std::ptrdiff_t multiple = Engine::KeyMultiple();
    const std::ptrdiff_t padded = (tile.keys + multiple - 1) / multiple * multiple;
    for (std::int64_t i = 0; i < queries_; i += kQueryTile) {
      const auto rows = static_cast<std::ptrdiff_t>(std::min(kQueryTile, queries_ - i));
      const Range seen = SeenKeys(first_query_ + i, rows);
      if (seen.end <= tile.first || seen.begin >= tile.first + tile.keys) continue;
      if (!SeesBlocks(first_query_ + i, rows, tile.first)) continue;
      const std::int64_t first_row = first_row_ + i;
      const bool plain = terms.plain() && tile.finite && finite_[first_row / kQueryTile];
      Real* const scores = scratch_.scores;
      Real* const out = scratch_.out + first_row * value_width_;
      engine_.Scores(rows, tile.keys, head_dim, QueryTile(i), scratch_.k, scores, tile_row);
      for (std::ptrdiff_t r = 0; r < rows; ++r) {
        const std::int64_t query = first_query_ + i + r;
        const Columns columns = terms.columns(query, padded);
        Real* const row = scores + r * tile_row;
        Real& m = scratch_.largest[first_row + r];
        Real& l = scratch_.sum[first_row + r];
        const Real factor =
            plain ? SoftmaxRow<true>(ScoreTerms<Real>(terms.row(query)), columns, row, m, l)
                  : SoftmaxRow<false>(terms.row(query), columns, row, m, l);
        if (factor != 1) Scale(out + r * value_width_, factor);
      }
      engine_.MultiplyRows(rows, value_dim, tile.keys, scores, tile_row, scratch_.v, out,
                           value_width_, true);
      if (tile.bad_values.count > 0) {
        AddNonFiniteRows<Real>({scores, tile_row, 1}, rows, tile.values, tile.bad_values,
                               {out, value_width_, 1});
      }
    }
  }

  void Scale(Real* row, Real factor) const {
    const pb::TileVector<Real> d;
    const auto f = hn::Set(d, factor);
    for (std::ptrdiff_t j = 0; j < value_width_; j += static_cast<std::ptrdiff_t>(hn::Lanes(d))) {
      hn::StoreU(hn::Mul(hn::LoadU(d, row + j), f), d, row + j);
    }
  }

  void Write() const {
    const AttentionProblem& problem = layout_.problem;
    const RowStrides out = row_strides(problem.out), lse = lse_strides(problem.lse);
    const std::int64_t first_row = sequence_.q_begin + first_query_;
    const Real* const from = scratch_.out + first_row_ * value_width_;
    const Real* const sum = scratch_.sum + first_row_;
    const Real* const largest = scratch_.largest + first_row_;
    pb::ForStorage<Real>(problem.out.dtype, [&]<class T>() {
      T* const to = static_cast<T*>(run_.tensors.out) + b_ * out.batch + h_ * out.head;
      for (std::int64_t i = 0; i < queries_; ++i) {
        // l = 0: nothing seen, O is 0.
        const Real l = sum[i] == 0 ? Real{1} : sum[i];
        pb::WriteRow(from + i * value_width_, Real{1}, l, to + (first_row + i) * out.row,
                     static_cast<std::ptrdiff_t>(out.element),
                     static_cast<std::ptrdiff_t>(layout_.sizes.value_dim));
      }
    });
    if (run_.tensors.lse == nullptr) return;
    Real* const to = static_cast<Real*>(run_.tensors.lse) + b_ * lse.batch + h_ * lse.head;
    for (std::int64_t i = 0; i < queries_; ++i) {
      to[(first_row + i) * lse.row] =
          sum[i] == 0 ? -kInfinity<Real> : largest[i] + std::log(sum[i]);
    }
  }

  const CpuRun& run_;
  const CpuLayout& layout_;
  Bump bump_;
  ForwardScratch<Real> scratch_;
  Engine engine_;
  std::ptrdiff_t value_width_;
  std::int64_t b_ = 0, first_head_ = 0, first_query_ = 0, queries_ = 0;
  std::int64_t h_ = 0, first_row_ = 0;  // of ForEachHead(): a head, and its first row in scratch
  Sequence sequence_;
  bool finite_[kMostTaskTiles] = {};  // of each tile of queries: whether it has no NaN or infinity
};

template <class Engine>
void RunForward(const CpuRun& run) {
  const std::int64_t heads = run.layout.task_heads, tasks = run.layout.sizes.heads / heads;
  run.threads.parallel_for(run.blocks.total * tasks, [&](std::int64_t i, int slot) {
    [[maybe_unused]] const typename Engine::Scope scope;
    // From the last block on: under a causal mask the late queries have the most keys.
    const auto [b, block] = run.blocks[run.blocks.total - 1 - i / tasks];
    ForwardTask<Engine>(run, slot).Compute(b, i % tasks * heads, block);
  });
}

}  // namespace

void Forward(const CpuRun& run) {
  if (run.layout.problem.q.dtype == DType::f64) {
    RunForward<SimdEngine<double>>(run);
  } else if (run.layout.isa == CpuIsa::amx_bf16) {
    RunForward<Bf16Engine<CpuIsa::amx_bf16>>(run);
  } else if (run.layout.isa == CpuIsa::avx512_bf16) {
    RunForward<Bf16Engine<CpuIsa::avx512_bf16>>(run);
  } else {
    RunForward<SimdEngine<float>>(run);
  }
}

}  // namespace pullback::attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pullback::attention {

HWY_EXPORT(Forward);
void cpu_forward(const CpuRun& run) { HWY_DYNAMIC_DISPATCH(Forward)(run); }

}  // namespace pullback::attention
#endif
