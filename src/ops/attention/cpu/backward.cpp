// Backward: a task computes d_k and d_v of a chunk of keys of one key/value head, going over the
// queries that see them, of every head of the group, tile by tile:
//
//   S = Q Kᵀ    P = exp(s(S) - lse)    dP = dO Vᵀ    dS = P (dP - delta)
//   d_v += Pᵀ dO      d_k += scale dSᵀ Q      d_q += scale dS K      d_bias += dS
//
// with delta = rowsum(out · dO) - d_lse computed beforehand. Each chunk adds to its own copy of
// d_q; the copies are summed in order at the end. Their number follows from the problem alone, so
// the bits do not depend on the number of threads.
//
// d_bias that is not a sum is written tile by tile. A sum over queries or keys is made by the task
// of those keys; a sum over the batch or heads by giving all of them to one task, which then owns
// its keys' columns of d_bias. Sums are kept in Real (CpuLayout::BiasSums).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/attention/cpu/backward.cpp"
#include <hwy/foreach_target.h>

#include <algorithm>

#include "ops/attention/cpu/engine-inl.hpp"
#include "ops/attention/cpu/scores-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace pullback::attention::HWY_NAMESPACE {
namespace {

// Queries that see any of the keys [first, first + count).
Range SeeingQueries(const CpuLayout& layout, const Sequence& sequence, std::int64_t first,
                    std::int64_t count) {
  return {seeing_queries(layout.problem.mask, sequence, first).begin,
          seeing_queries(layout.problem.mask, sequence, first + count - 1).end};
}

// to[i] += from[i]
template <class Real>
HWY_INLINE void AddRow(const Real* from, Real* to, std::ptrdiff_t count) {
  const pb::TileVector<Real> d;
  const auto lanes = static_cast<std::ptrdiff_t>(hn::Lanes(d));
  std::ptrdiff_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, to + i), hn::LoadU(d, from + i)), d, to + i);
  }
  for (; i < count; ++i) to[i] += from[i];
}

template <class Engine>
class BackwardTask {
  using Real = typename Engine::Real;

 public:
  BackwardTask(const CpuRun& run, int slot)
      : run_(run),
        layout_(run.layout),
        bump_(run.scratch + static_cast<std::size_t>(slot) * run.layout.scratch_bytes),
        scratch_(bump_, run.layout),
        engine_(scratch_.engine),
        head_dim_(static_cast<std::ptrdiff_t>(layout_.sizes.head_dim)),
        value_dim_(static_cast<std::ptrdiff_t>(layout_.sizes.value_dim)),
        tile_row_(static_cast<std::ptrdiff_t>(layout_.key_tile)),
        want_ds_(run.tensors.d_q || run.tensors.d_k || run.tensors.d_bias) {}

  void Compute(std::int64_t b, std::int64_t kv_head, std::int64_t chunk) {
    b_ = b;
    kv_head_ = kv_head;
    chunk_ = chunk;
    sequence_ = run_.sequences[b];
    const std::int64_t begin = chunk * layout_.chunk_keys;
    const std::int64_t end = std::min(begin + layout_.chunk_keys, sequence_.k_length);
    if (begin >= end) return;
    if (run_.tensors.d_q) ClearQuerySums(SeeingQueries(layout_, sequence_, begin, end - begin));
    for (std::int64_t key = begin; key < end; key += layout_.key_tile) {
      first_key_ = key;
      keys_ = static_cast<std::ptrdiff_t>(std::min(layout_.key_tile, end - key));
      KeyTile();
    }
  }

 private:
  TileSource QuerySource(const TensorSpec& spec, const void* data, std::int64_t query,
                         std::ptrdiff_t rows) const {
    return tile_source(spec, data, b_, sequence_.q_begin + query, head_, rows);
  }
  TileSource KeySource(const TensorSpec& spec, const void* data) const {
    return tile_source(spec, data, b_, sequence_.k_begin + first_key_, kv_head_, keys_);
  }

  // This chunk's sum for d_q of a query.
  Real* QuerySum(std::int64_t head, std::int64_t query) const {
    const std::int64_t row = run_.first_query_row(b_, sequence_) + query;
    return static_cast<Real*>(run_.d_q_sums) +
           ((chunk_ * layout_.sizes.heads + head) * layout_.query_rows() + row) * head_dim_;
  }

  void ClearQuerySums(const Range& queries) const {
    const std::int64_t group = layout_.sizes.group;
    for (std::int64_t h = kv_head_ * group; h < (kv_head_ + 1) * group; ++h) {
      std::fill_n(QuerySum(h, queries.begin), (queries.end - queries.begin) * head_dim_, Real{0});
    }
  }

  void KeyTile() {
    const AttentionProblem& problem = layout_.problem;
    const AttentionTensors& tensors = run_.tensors;
    bad_keys_.rows = scratch_.non_finite;
    bad_values_.rows = scratch_.non_finite + layout_.key_tile;
    engine_.PackKeys(KeySource(problem.k, tensors.k), scratch_.k_transposed,
                     tensors.d_q ? scratch_.k_right : nullptr, bad_keys_);
    bad_values_.count = 0;
    if (want_ds_) {
      engine_.PackKeys(KeySource(problem.v, tensors.v), scratch_.v_transposed, nullptr,
                       bad_values_);
    }
    if (tensors.d_k) Engine::ClearAccumulator(scratch_.d_k, keys_, head_dim_);
    if (tensors.d_v) Engine::ClearAccumulator(scratch_.d_v, keys_, value_dim_);

    const Range queries = SeeingQueries(layout_, sequence_, first_key_, keys_);
    const std::int64_t group = layout_.sizes.group;
    for (head_ = kv_head_ * group; head_ < (kv_head_ + 1) * group && !queries.empty(); ++head_) {
      TileTerms<Real> terms(run_, scratch_.row, sequence_, b_, head_, first_key_, keys_);
      for (std::int64_t query = queries.begin / kQueryTile * kQueryTile; query < queries.end;
           query += kQueryTile) {
        const Range rows{query, std::min(query + kQueryTile, sequence_.q_length)};
        const Range keys{first_key_, first_key_ + keys_};
        if (layout_.seen_blocks.any(b_, head_, rows, keys)) QueryTile(query, terms);
      }
    }
    if (tensors.d_k) {
      WriteKeys(problem.d_k, tensors.d_k, scratch_.d_k, head_dim_,
                static_cast<Real>(*problem.scale));
    }
    if (tensors.d_v) WriteKeys(problem.d_v, tensors.d_v, scratch_.d_v, value_dim_, Real{1});
  }

  void QueryTile(std::int64_t query, TileTerms<Real>& terms) {
    const AttentionProblem& problem = layout_.problem;
    const AttentionTensors& tensors = run_.tensors;
    const auto rows = static_cast<std::ptrdiff_t>(std::min(kQueryTile, sequence_.q_length - query));
    const TileSource q = QuerySource(problem.q, tensors.q, query, rows);
    const TileSource d_out = QuerySource(problem.d_out, tensors.d_out, query, rows);
    NonFiniteRows bad_q{scratch_.non_finite + 2 * layout_.key_tile};
    NonFiniteRows bad_d_out{scratch_.non_finite + 3 * layout_.key_tile};
    engine_.PackQueries(q, scratch_.q_left, tensors.d_k ? scratch_.q_columns : nullptr, bad_q);
    engine_.PackQueries(d_out, scratch_.d_out_left, tensors.d_v ? scratch_.d_out_columns : nullptr,
                        bad_d_out);
    Real* const p = scratch_.p;
    Real* const ds = scratch_.ds;
    engine_.Scores(rows, keys_, head_dim_, scratch_.q_left, scratch_.k_transposed, p, tile_row_);
    if (want_ds_) {
      engine_.Scores(rows, keys_, value_dim_, scratch_.d_out_left, scratch_.v_transposed, ds,
                     tile_row_);
    }
    const bool plain = terms.plain() && bad_q.count == 0 && bad_d_out.count == 0 &&
                       bad_keys_.count == 0 && bad_values_.count == 0;
    Rows(query, rows, terms, plain);

    if (tensors.d_v) {
      engine_.AddColumns(keys_, value_dim_, rows, p, tile_row_, scratch_.d_out_columns,
                         scratch_.d_v);
      AddNonFiniteRows<Real>({p, 1, tile_row_}, keys_, d_out, bad_d_out,
                             Engine::Accumulator(scratch_.d_v, keys_, value_dim_));
    }
    if (tensors.d_k) {
      engine_.AddColumns(keys_, head_dim_, rows, ds, tile_row_, scratch_.q_columns, scratch_.d_k);
      AddNonFiniteRows<Real>({ds, 1, tile_row_}, keys_, q, bad_q,
                             Engine::Accumulator(scratch_.d_k, keys_, head_dim_));
    }
    if (tensors.d_q) {
      const auto width = static_cast<std::ptrdiff_t>(padded_width(head_dim_));
      engine_.MultiplyRows(rows, head_dim_, keys_, ds, tile_row_, scratch_.k_right, scratch_.d_q,
                           width, false);
      AddNonFiniteRows<Real>({ds, tile_row_, 1}, rows, KeySource(problem.k, tensors.k), bad_keys_,
                             {scratch_.d_q, width, 1});
      for (std::ptrdiff_t r = 0; r < rows; ++r) {
        const std::int64_t i = query + r;
        if (terms.columns(i, 0).begin < terms.columns(i, 0).end) {
          AddRow(scratch_.d_q + r * width, QuerySum(head_, i), head_dim_);
        }
      }
    }
  }

  // p and ds from the products, row by row.
  void Rows(std::int64_t query, std::ptrdiff_t rows, TileTerms<Real>& terms, bool plain) {
    const RowStrides lse = lse_strides(layout_.problem.lse);
    const Real* const lse_from = static_cast<const Real*>(run_.tensors.lse) + b_ * lse.batch +
                                 head_ * lse.head + (sequence_.q_begin + query) * lse.row;
    const Real* const delta = static_cast<const Real*>(run_.delta) + head_ * layout_.query_rows() +
                              run_.first_query_row(b_, sequence_) + query;
    Real* const d_bias = run_.tensors.d_bias ? scratch_.d_bias : nullptr;
    const std::ptrdiff_t multiple = Engine::KeyMultiple();
    const std::ptrdiff_t padded = (keys_ + multiple - 1) / multiple * multiple;
    for (std::ptrdiff_t r = 0; r < rows; ++r) {
      const Columns columns = terms.columns(query + r, padded);
      Real* const p = scratch_.p + r * tile_row_;
      Real* const ds = want_ds_ ? scratch_.ds + r * tile_row_ : nullptr;
      const ScoreTerms<Real>& row_terms = terms.row(query + r);
      if (plain) {
        GradientRow<true>(row_terms, columns, lse_from[r * lse.row], delta[r], p, ds, d_bias);
      } else {
        GradientRow<false>(row_terms, columns, lse_from[r * lse.row], delta[r], p, ds, d_bias);
      }
      if (d_bias) AddBiasRow(query + r);
    }
  }

  // scratch_.d_bias holds ds of one query.
  void AddBiasRow(std::int64_t query) const {
    const CpuLayout::BiasSums& sums = layout_.bias_sums;
    const TensorSpec& spec = layout_.problem.d_bias;
    if (!sums.any()) {
      const BiasStrides strides = bias_strides(spec);
      pb::ForStorage<Real>(spec.dtype, [&]<class T>() {
        pb::WriteRow(scratch_.d_bias, Real{1}, Real{1},
                     static_cast<T*>(run_.tensors.d_bias) + b_ * strides.batch +
                         head_ * strides.head + query * strides.query + first_key_ * strides.key,
                     static_cast<std::ptrdiff_t>(strides.key), keys_);
      });
      return;
    }
    const auto at = [](std::int64_t index, bool summed) { return summed ? 0 : index; };
    const std::int64_t row =
        (at(b_, sums.batch) * sums.shape[1] + at(head_, sums.head)) * sums.shape[2] +
        at(query, sums.query);
    Real* const to = static_cast<Real*>(run_.bias_sums) + row * sums.shape[3];
    if (sums.key) {
      Real sum = 0;
      for (std::ptrdiff_t j = 0; j < keys_; ++j) sum += scratch_.d_bias[j];
      to[chunk_ * sums.numel()] += sum;
    } else {
      AddRow(scratch_.d_bias, to + first_key_, keys_);
    }
  }

  void WriteKeys(const TensorSpec& spec, void* data, Real* sums, std::ptrdiff_t columns,
                 Real factor) const {
    const TileSource target = KeySource(spec, data);
    const StridedTile<Real> from = Engine::Accumulator(sums, keys_, columns);
    pb::ForStorage<Real>(spec.dtype, [&]<class T>() {
      T* const to = static_cast<T*>(data) + target.offset;
      for (std::ptrdiff_t r = 0; r < keys_; ++r) {
        for (std::ptrdiff_t j = 0; j < columns; ++j) {
          scratch_.line[j] = from.data[r * from.row + j * from.column];
        }
        pb::WriteRow(scratch_.line, factor, Real{1}, to + r * target.row,
                     static_cast<std::ptrdiff_t>(target.element), columns);
      }
    });
  }

  const CpuRun& run_;
  const CpuLayout& layout_;
  Bump bump_;
  BackwardScratch<Real> scratch_;
  Engine engine_;
  std::ptrdiff_t head_dim_, value_dim_, tile_row_;
  bool want_ds_;
  std::int64_t b_ = 0, kv_head_ = 0, head_ = 0, chunk_ = 0, first_key_ = 0;
  std::ptrdiff_t keys_ = 0;
  Sequence sequence_;
  NonFiniteRows bad_keys_, bad_values_;
};

// Rows of the passes before and after: cut into blocks of this many.
constexpr std::int64_t kRowBlock = 128;
constexpr std::int64_t kMaxWidth = 256;  // the largest head dim

// Rounded as the products of the engines are.
template <class Real>
HWY_INLINE Real MultiplyAdd(Real a, Real b, Real c) {
  const hn::CappedTag<Real, 1> d;
  return hn::GetLane(hn::MulAdd(hn::Set(d, a), hn::Set(d, b), hn::Set(d, c)));
}

// delta = rowsum(out · d_out) - d_lse of every row of q, those outside the sequences too. The sum
// runs over d in the order of the product d_out · v: where a query sees one key, so that out = v,
// the two cancel exactly.
template <class Real>
void ComputeDelta(const CpuRun& run) {
  const AttentionProblem& problem = run.layout.problem;
  const AttentionSizes& sizes = run.layout.sizes;
  const std::int64_t items = sizes.varlen ? 1 : sizes.batch;
  const std::int64_t blocks = blocks_of(sizes.total_query, kRowBlock);
  const RowStrides d_lse = lse_strides(problem.d_lse);
  run.threads.parallel_for(items * sizes.heads * blocks, [&](std::int64_t task, int) {
    const std::int64_t first = task % blocks * kRowBlock, h = task / blocks % sizes.heads;
    const std::int64_t item = task / blocks / sizes.heads;
    const std::int64_t rows = std::min(kRowBlock, sizes.total_query - first);
    const TileSource out = tile_source(problem.out, run.tensors.out, item, first, h, rows);
    const TileSource d_out = tile_source(problem.d_out, run.tensors.d_out, item, first, h, rows);
    Real* const to = static_cast<Real*>(run.delta) + h * run.layout.query_rows() +
                     item * sizes.total_query + first;
    // Sums of several rows at a time: one alone would wait for its own additions.
    constexpr std::int64_t kRows = 8;
    HWY_ALIGN Real a[kRows][kMaxWidth], b[kRows][kMaxWidth];
    pb::ForStorage<Real>(out.dtype, [&]<class T>() {
      const auto read = [](const TileSource& source, std::int64_t r, Real* row) {
        pb::ReadRow(static_cast<const T*>(source.data) + source.offset + r * source.row,
                    static_cast<std::ptrdiff_t>(source.element), source.columns, row);
      };
      for (std::int64_t block = 0; block < rows; block += kRows) {
        const std::int64_t count = std::min(kRows, rows - block);
        for (std::int64_t r = 0; r < count; ++r) {
          read(out, block + r, a[r]);
          read(d_out, block + r, b[r]);
        }
        Real sum[kRows] = {};
        for (std::ptrdiff_t j = 0; j < out.columns; ++j) {
          for (std::int64_t r = 0; r < kRows; ++r) sum[r] = MultiplyAdd(b[r][j], a[r][j], sum[r]);
        }
        for (std::int64_t r = 0; r < count; ++r) to[block + r] = sum[r];
      }
    });
    if (run.tensors.d_lse == nullptr) return;
    const Real* const from = static_cast<const Real*>(run.tensors.d_lse) + item * d_lse.batch +
                             h * d_lse.head + first * d_lse.row;
    for (std::int64_t r = 0; r < rows; ++r) to[r] -= from[r * d_lse.row];
  });
}

// d_q = scale · the chunks' sums, of those chunks that the query sees any key of.
template <class Real>
void WriteQueryGradient(const CpuRun& run) {
  const CpuLayout& layout = run.layout;
  const AttentionSizes& sizes = layout.sizes;
  const TensorSpec& spec = layout.problem.d_q;
  const auto head_dim = static_cast<std::ptrdiff_t>(sizes.head_dim);
  // Queries [first, last) of a sequence.
  const auto write = [&](std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t last) {
    const Sequence sequence = run.sequences[b];
    HWY_ALIGN Real line[kMaxWidth];
    const TileSource target =
        tile_source(spec, run.tensors.d_q, b, sequence.q_begin + first, h, last - first);
    pb::ForStorage<Real>(spec.dtype, [&]<class T>() {
      for (std::int64_t query = first; query < last; ++query) {
        std::fill_n(line, kMaxWidth, Real{0});
        for (std::int64_t chunk = 0; chunk * layout.chunk_keys < sequence.k_length; ++chunk) {
          const std::int64_t key = chunk * layout.chunk_keys;
          const Range seeing = SeeingQueries(layout, sequence, key,
                                             std::min(layout.chunk_keys, sequence.k_length - key));
          if (query < seeing.begin || query >= seeing.end) continue;
          const std::int64_t row = run.first_query_row(b, sequence) + query;
          AddRow(static_cast<const Real*>(run.d_q_sums) +
                     ((chunk * sizes.heads + h) * run.layout.query_rows() + row) * head_dim,
                 line, head_dim);
        }
        pb::WriteRow(
            line, static_cast<Real>(*layout.problem.scale), Real{1},
            static_cast<T*>(run.tensors.d_q) + target.offset + (query - first) * target.row,
            static_cast<std::ptrdiff_t>(target.element), head_dim);
      }
    });
  };
  const std::int64_t items = sizes.varlen ? 1 : sizes.batch;
  const std::int64_t blocks = blocks_of(sizes.total_query, kRowBlock);
  run.threads.parallel_for(items * sizes.heads * blocks, [&](std::int64_t task, int) {
    const std::int64_t first = task % blocks * kRowBlock, h = task / blocks % sizes.heads;
    const std::int64_t last = std::min(first + kRowBlock, sizes.total_query);
    if (!sizes.varlen) return write(task / blocks / sizes.heads, h, first, last);
    // The sequences that have rows here. They come in order, and so do their ends.
    const auto table = run.sequences.table();
    const auto behind = [&](const Sequence& s) { return s.q_begin + s.q_length <= first; };
    for (auto s = std::ranges::partition_point(table, behind);
         s != table.end() && s->q_begin < last; ++s) {
      write(s - table.begin(), h, std::max(first - s->q_begin, std::int64_t{0}),
            std::min(last - s->q_begin, s->q_length));
    }
  });
}

// Rows of d_bias, (b, h, query): f(row number, T* to its first element).
template <class Real, class F>
void ForBiasRows(const CpuRun& run, const F& f) {
  const TensorSpec& spec = run.layout.problem.d_bias;
  const BiasStrides strides = bias_strides(spec);
  const auto& shape = spec.shape;
  run.threads.parallel_for(
      shape[0] * shape[1] * shape[2],
      [&](std::int64_t row, int) {
        const std::int64_t query = row % shape[2], h = row / shape[2] % shape[1];
        const std::int64_t b = row / shape[2] / shape[1];
        pb::ForStorage<Real>(spec.dtype, [&]<class T>() {
          f(row, static_cast<T*>(run.tensors.d_bias) + b * strides.batch + h * strides.head +
                     query * strides.query);
        });
      },
      16);
}

template <class Real>
void ClearBias(const CpuRun& run) {
  const CpuLayout::BiasSums& sums = run.layout.bias_sums;
  if (sums.any()) {
    std::fill_n(static_cast<Real*>(run.bias_sums),
                (sums.key ? run.layout.chunks : 1) * sums.numel(), Real{0});
    return;
  }
  const BandMask& mask = run.layout.problem.mask;
  const bool all_seen = mask.left == BandMask::kUnbounded && mask.right == BandMask::kUnbounded &&
                        !run.layout.seen_blocks.given();
  if (all_seen) return;
  const TensorSpec& spec = run.layout.problem.d_bias;
  const std::int64_t stride = bias_strides(spec).key;
  ForBiasRows<Real>(run, [&]<class T>(std::int64_t, T* to) {
    for (std::int64_t j = 0; j < spec.shape[3]; ++j) to[j * stride] = T(0.0f);
  });
}

template <class Real>
void WriteBiasSums(const CpuRun& run) {
  const CpuLayout::BiasSums& sums = run.layout.bias_sums;
  const std::int64_t stride = bias_strides(run.layout.problem.d_bias).key;
  const Real* const all = static_cast<const Real*>(run.bias_sums);
  ForBiasRows<Real>(run, [&]<class T>(std::int64_t row, T* to) {
    if (!sums.key) {
      pb::WriteRow(all + row * sums.shape[3], Real{1}, Real{1}, to,
                   static_cast<std::ptrdiff_t>(stride), static_cast<std::ptrdiff_t>(sums.shape[3]));
      return;
    }
    Real sum = 0;
    for (std::int64_t chunk = 0; chunk < run.layout.chunks; ++chunk) {
      sum += all[chunk * sums.numel() + row];
    }
    *to = T(sum);
  });
}

template <class Engine>
void RunBackward(const CpuRun& run) {
  using Real = typename Engine::Real;
  const AttentionSizes& sizes = run.layout.sizes;
  const bool want_bias = run.tensors.d_bias != nullptr;
  if (run.tensors.d_q || run.tensors.d_k || want_bias) ComputeDelta<Real>(run);
  if (want_bias) ClearBias<Real>(run);

  // A task computes one chunk of these batch items and key/value heads.
  const CpuLayout::BiasSums& sums = run.layout.bias_sums;
  const bool all_batch = want_bias && sums.batch, all_heads = want_bias && sums.head;
  const std::int64_t kv_heads = all_heads ? 1 : sizes.kv_heads;
  const std::int64_t blocks = all_batch ? run.blocks.uniform : run.blocks.total;
  run.threads.parallel_for(blocks * kv_heads, [&](std::int64_t i, int slot) {
    [[maybe_unused]] const typename Engine::Scope scope;
    BackwardTask<Engine> task(run, slot);
    const auto [first_b, chunk] = run.blocks[i / kv_heads];
    for (std::int64_t b = first_b; b < (all_batch ? sizes.batch : first_b + 1); ++b) {
      for (std::int64_t h = i % kv_heads; h < sizes.kv_heads; h += kv_heads) {
        task.Compute(b, h, chunk);
        if (!all_heads) break;
      }
    }
  });
  if (run.tensors.d_q) WriteQueryGradient<Real>(run);
  if (want_bias && sums.any()) WriteBiasSums<Real>(run);
}

}  // namespace

void Backward(const CpuRun& run) {
  if (run.layout.problem.q.dtype == DType::f64) {
    RunBackward<SimdEngine<double>>(run);
  } else if (run.layout.isa == CpuIsa::amx_bf16) {
    RunBackward<Bf16Engine<CpuIsa::amx_bf16>>(run);
  } else if (run.layout.isa == CpuIsa::avx512_bf16) {
    RunBackward<Bf16Engine<CpuIsa::avx512_bf16>>(run);
  } else {
    RunBackward<SimdEngine<float>>(run);
  }
}

}  // namespace pullback::attention::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pullback::attention {

HWY_EXPORT(Backward);
void cpu_backward(const CpuRun& run) { HWY_DYNAMIC_DISPATCH(Backward)(run); }

}  // namespace pullback::attention
#endif
