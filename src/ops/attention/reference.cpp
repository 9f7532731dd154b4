// The definition of attention: plain loops, one thread. For each batch item b, head h, query i:
//
//   s_j   = c tanh(scale q_i·k_j / c) + bias_ij     over the keys j that i sees
//   lse   = log sum_j exp(s_j)                      p_j = exp(s_j - lse)
//   out   = sum_j p_j m_j v_j                       m_j = 0 (dropped) or 1 / P(kept)
//
//   delta = out·d_out - d_lse                       dp_j = m_j d_out·v_j
//   ds_j  = p_j (dp_j - delta)                      da_j = ds_j (1 - tanh²)
//   d_q   = scale sum_j da_j k_j                    d_k_j += scale da_j q_i
//   d_v_j += p_j m_j d_out                          d_bias_ij += ds_j
//
// What a query does not see is skipped, not multiplied by 0, so that a NaN there goes nowhere:
// keys outside the band, keys in absent blocks, keys whose score is -inf (as a bias of -inf makes
// it), and, for the products with m_j, keys that are dropped.
#include <cmath>
#include <limits>

#include "core/arithmetic.hpp"
#include "core/element.hpp"
#include "ops/attention/dropout.cuh"
#include "ops/attention/problem.hpp"

namespace pullback::attention {
namespace {

// A tensor copied to the workspace: row-major [items, rows, heads, width], whatever its strides.
// A dimension of size 1 serves every index (a broadcast bias).
template <class Real>
struct Packed {
  std::int64_t items = 0, rows = 0, heads = 0, width = 0;
  Real* data = nullptr;

  std::int64_t numel() const { return items * rows * heads * width; }

  Real* row(std::int64_t item, std::int64_t i, std::int64_t h) const {
    const auto at = [](std::int64_t index, std::int64_t size) { return size == 1 ? 0 : index; };
    return data + ((at(item, items) * rows + at(i, rows)) * heads + at(h, heads)) * width;
  }

  // f(element of ours, offset in the tensor)
  template <class F>
  void for_each(const RowStrides& strides, const F& f) const {
    Real* element = data;
    for (std::int64_t item = 0; item < items; ++item) {
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t h = 0; h < heads; ++h) {
          for (std::int64_t d = 0; d < width; ++d) {
            f(*element++,
              item * strides.batch + i * strides.row + h * strides.head + d * strides.element);
          }
        }
      }
    }
  }
};

template <class Real>
Real dot(const Real* a, const Real* b, std::int64_t length) {
  Real sum = 0;
  for (std::int64_t d = 0; d < length; ++d) sum += a[d] * b[d];
  return sum;
}

// sum += factor * row
template <class Real>
void add_scaled(Real* sum, Real factor, const Real* row, std::int64_t length) {
  for (std::int64_t d = 0; d < length; ++d) sum[d] += factor * row[d];
}

template <class Arithmetic>
class ReferenceBody final : public PlanBody<AttentionTensors> {
  using Real = typename Arithmetic::Real;
  using Array = Packed<Real>;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

  struct Arrays {
    Array q, k, v, bias, out, lse;
    Array d_out, d_lse, d_q, d_k, d_v, d_bias;  // backward
    Real* scores = nullptr;                     // one row: [max_key]
    Dropout dropout;
  };

  struct Row {
    std::int64_t item, batch, head, kv_head;
    std::int64_t query;  // within the sequence; + sequence.q_begin within the tensor
    Sequence sequence;
    Range keys;
  };

 public:
  ReferenceBody(const AttentionProblem& problem, Pass pass)
      : problem_(problem),
        pass_(pass),
        sizes_(sizes_of(problem)),
        scale_(static_cast<Real>(*problem.scale)),
        softcap_(static_cast<Real>(problem.softcap)) {
    Real* end = nullptr;
    lay_out(end, end);
    workspace_bytes = Sequences::workspace_bytes(sizes_) +
                      static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(end));
    description = std::string("plain loops on one thread, sums in ") +
                  (sizeof(Real) == 8 ? "double" : "float");
  }

  void run(Stream, const AttentionTensors& tensors, Workspace workspace) const override {
    const Sequences sequences(problem_, sizes_, tensors, workspace.data);
    Real* scratch = reinterpret_cast<Real*>(static_cast<std::byte*>(workspace.data) +
                                            Sequences::workspace_bytes(sizes_));
    Arrays arrays = lay_out(scratch, scratch);
    arrays.dropout = dropout_of(problem_, tensors);
    load(arrays.q, problem_.q, row_strides(problem_.q), tensors.q);
    load(arrays.k, problem_.k, row_strides(problem_.k), tensors.k);
    load(arrays.v, problem_.v, row_strides(problem_.v), tensors.v);
    load(arrays.bias, problem_.bias, bias_rows(problem_.bias), tensors.bias);
    const RowStrides out = row_strides(problem_.out), lse = lse_strides(problem_.lse);
    if (pass_ == Pass::forward) {
      std::fill_n(arrays.out.data, arrays.out.numel(), Real{0});
      std::fill_n(arrays.lse.data, arrays.lse.numel(), -kInfinity);
      for_each_row(sequences, [&](const Row& row) { forward(arrays, row); });
      store(arrays.out, problem_.out, out, tensors.out);
      store(arrays.lse, problem_.lse, lse, tensors.lse);
      return;
    }
    load(arrays.out, problem_.out, out, tensors.out);
    load(arrays.lse, problem_.lse, lse, tensors.lse);
    load(arrays.d_out, problem_.d_out, row_strides(problem_.d_out), tensors.d_out);
    load(arrays.d_lse, problem_.d_lse, lse_strides(problem_.d_lse), tensors.d_lse);
    for (const Array& gradient : {arrays.d_q, arrays.d_k, arrays.d_v, arrays.d_bias}) {
      std::fill_n(gradient.data, gradient.numel(), Real{0});
    }
    for_each_row(sequences, [&](const Row& row) { backward(arrays, row); });
    store(arrays.d_q, problem_.d_q, row_strides(problem_.d_q), tensors.d_q);
    store(arrays.d_k, problem_.d_k, row_strides(problem_.d_k), tensors.d_k);
    store(arrays.d_v, problem_.d_v, row_strides(problem_.d_v), tensors.d_v);
    store(arrays.d_bias, problem_.d_bias, bias_rows(problem_.d_bias), tensors.d_bias);
  }

 private:
  // The arrays one after another from `begin`; `end` is moved behind them.
  Arrays lay_out(Real* begin, Real*& end) const {
    std::uintptr_t address = reinterpret_cast<std::uintptr_t>(begin);
    const auto take = [&](std::int64_t count) {
      Real* const data = reinterpret_cast<Real*>(address);
      address += static_cast<std::size_t>(count) * sizeof(Real);
      return data;
    };
    const auto array = [&](std::int64_t items, std::int64_t rows, std::int64_t heads,
                           std::int64_t width) {
      Array result{items, rows, heads, width, nullptr};
      result.data = take(result.numel());
      return result;
    };
    const std::int64_t items = sizes_.varlen ? 1 : sizes_.batch;
    const std::int64_t sq = sizes_.total_query, sk = sizes_.total_key, h = sizes_.heads;
    const std::int64_t hkv = sizes_.kv_heads;
    const std::int64_t dqk = sizes_.head_dim, dv = sizes_.value_dim;
    const auto bias = [&] {
      if (!problem_.bias.given()) return Array{};
      const auto& shape = problem_.bias.shape;
      return array(shape[0], shape[2], shape[1], shape[3]);
    };
    Arrays arrays;
    arrays.scores = take(sizes_.max_key);
    arrays.q = array(items, sq, h, dqk);
    arrays.k = array(items, sk, hkv, dqk);
    arrays.v = array(items, sk, hkv, dv);
    arrays.bias = bias();
    arrays.out = array(items, sq, h, dv);
    arrays.lse = array(items, sq, h, 1);
    if (pass_ == Pass::backward) {
      arrays.d_out = array(items, sq, h, dv);
      arrays.d_lse = array(items, sq, h, 1);
      arrays.d_q = array(items, sq, h, dqk);
      arrays.d_k = array(items, sk, hkv, dqk);
      arrays.d_v = array(items, sk, hkv, dv);
      arrays.d_bias = bias();
    }
    end = reinterpret_cast<Real*>(address);
    return arrays;
  }

  // Strides of a [B,H,Sq,Sk] bias in our order of dimensions.
  static RowStrides bias_rows(const TensorSpec& spec) {
    const BiasStrides strides = bias_strides(spec);
    return {strides.batch, strides.query, strides.head, strides.key};
  }

  static void load(const Array& array, const TensorSpec& spec, const RowStrides& strides,
                   const void* data) {
    array.for_each(strides, [&](Real& element, std::int64_t offset) {
      element = data ? static_cast<Real>(load_element(spec.dtype, data, offset)) : Real{0};
    });
  }

  static void store(const Array& array, const TensorSpec& spec, const RowStrides& strides,
                    void* data) {
    if (data == nullptr) return;
    array.for_each(strides, [&](Real element, std::int64_t offset) {
      store_element(spec.dtype, data, offset, static_cast<double>(element));
    });
  }

  template <class F>
  void for_each_row(const Sequences& sequences, const F& f) const {
    if (sizes_.total_query == 0) return;  // of however many batch items
    for (std::int64_t b = 0; b < sizes_.batch; ++b) {
      const Sequence sequence = sequences[b];
      for (std::int64_t h = 0; h < sizes_.heads; ++h) {
        for (std::int64_t i = 0; i < sequence.q_length; ++i) {
          f(Row{sizes_.varlen ? 0 : b, b, h, h / sizes_.group, i, sequence,
                visible_keys(problem_.mask, sequence, i)});
        }
      }
    }
  }

  // s_j, and in `slope` the derivative of the softcap there.
  Real score(const Arrays& arrays, const Row& row, std::int64_t j, Real& slope) const {
    const Real* const q = arrays.q.row(row.item, row.sequence.q_begin + row.query, row.head);
    const Real* const k = arrays.k.row(row.item, row.sequence.k_begin + j, row.kv_head);
    slope = 1;
    if (!seen_blocks_.sees(row.batch, row.head, row.query, j)) return -kInfinity;
    Real bias = 0;
    if (problem_.bias.given()) {
      const Real* const biases = arrays.bias.row(row.batch, row.query, row.head);
      bias = biases[arrays.bias.width == 1 ? 0 : j];
      if (bias == -kInfinity) return bias;  // unseen, whatever q and k hold
    }
    Real s = Arithmetic::round(scale_ * dot(q, k, sizes_.head_dim));
    if (softcap_ > 0) {
      const Real tanh = std::tanh(s / softcap_);
      slope = 1 - tanh * tanh;
      s = Arithmetic::round(softcap_ * tanh);
    }
    return problem_.bias.given() ? Arithmetic::round(s + bias) : s;
  }

  // m_j
  Real keep_factor(const Dropout& dropout, const Row& row, std::int64_t j) const {
    if (!dropout.active()) return 1;
    const auto plane = static_cast<std::uint64_t>(row.batch * sizes_.heads + row.head);
    return dropout.keeps(plane, row.query, j) ? static_cast<Real>(dropout.scale()) : Real{0};
  }

  void forward(const Arrays& arrays, const Row& row) const {
    Real largest = -kInfinity, sum = 0, slope;
    bool sees = false;
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
      const Real s = arrays.scores[j] = score(arrays, row, j, slope);
      sees |= s != -kInfinity;
      largest = std::max(largest, s);  // a NaN is not lost: it makes the sum NaN
    }
    if (!sees) return;
    const auto weight = [&](std::int64_t j) {
      return arrays.scores[j] == -kInfinity ? 0 : std::exp(arrays.scores[j] - largest);
    };
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) sum += weight(j);

    const std::int64_t i = row.sequence.q_begin + row.query;
    Real* const out = arrays.out.row(row.item, i, row.head);
    // Whatever dropout keeps.
    if (std::isnan(sum)) std::fill_n(out, sizes_.value_dim, sum);
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
      const Real keep = keep_factor(arrays.dropout, row, j);
      if (keep == 0 || arrays.scores[j] == -kInfinity) continue;
      const Real p = Arithmetic::round(Arithmetic::round(weight(j) / sum) * keep);
      add_scaled(out, p, arrays.v.row(row.item, row.sequence.k_begin + j, row.kv_head),
                 sizes_.value_dim);
    }
    *arrays.lse.row(row.item, i, row.head) = largest + std::log(sum);
  }

  void backward(const Arrays& arrays, const Row& row) const {
    const std::int64_t i = row.sequence.q_begin + row.query;
    const Real lse = *arrays.lse.row(row.item, i, row.head);
    if (lse == -kInfinity) return;  // sees nothing: its d_out reaches no gradient
    const Real* const q = arrays.q.row(row.item, i, row.head);
    const Real* const d_out = arrays.d_out.row(row.item, i, row.head);
    Real* const d_q = arrays.d_q.row(row.item, i, row.head);
    const Real delta = dot(arrays.out.row(row.item, i, row.head), d_out, sizes_.value_dim) -
                       *arrays.d_lse.row(row.item, i, row.head);
    for (std::int64_t j = row.keys.begin; j < row.keys.end; ++j) {
      Real slope;
      const Real s = score(arrays, row, j, slope);
      if (s == -kInfinity) continue;
      const Real p = Arithmetic::round(std::exp(s - lse));
      const Real keep = keep_factor(arrays.dropout, row, j);
      const std::int64_t key = row.sequence.k_begin + j;
      Real d_p = 0;
      if (keep != 0) {
        d_p = Arithmetic::round(
            dot(d_out, arrays.v.row(row.item, key, row.kv_head), sizes_.value_dim));
        d_p = Arithmetic::round(d_p * keep);
        add_scaled(arrays.d_v.row(row.item, key, row.kv_head), Arithmetic::round(p * keep), d_out,
                   sizes_.value_dim);
      }
      const Real d_s = Arithmetic::round(p * (d_p - delta));
      if (problem_.bias.given()) {
        Real* const d_bias = arrays.d_bias.row(row.batch, row.query, row.head);
        d_bias[arrays.d_bias.width == 1 ? 0 : j] += d_s;
      }
      const Real d_a = Arithmetic::round(d_s * slope) * scale_;
      add_scaled(d_q, d_a, arrays.k.row(row.item, key, row.kv_head), sizes_.head_dim);
      add_scaled(arrays.d_k.row(row.item, key, row.kv_head), d_a, q, sizes_.head_dim);
    }
  }

  AttentionProblem problem_;
  Pass pass_;
  AttentionSizes sizes_;
  SeenBlocks seen_blocks_{problem_};
  Real scale_, softcap_;
};

}  // namespace

Body make_reference(const AttentionProblem& problem, const Device&, Pass pass) {
  return std::make_unique<ReferenceBody<ExactArithmetic>>(problem, pass);
}

Body make_textbook(const AttentionProblem& problem, const Device&, Pass pass) {
  return dispatch_floating(problem.q.dtype, [&]<class T>() -> Body {
    return std::make_unique<ReferenceBody<TextbookArithmetic<T>>>(problem, pass);
  });
}

}  // namespace pullback::attention
