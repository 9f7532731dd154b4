// The definition, in plain loops. For every row i of every block row (z, h, r), over the columns j
// of its blocks:
//   s_j  = scale · x_j + rpe_j + key_padding_mask_j + attn_mask_j, or -inf where a keep mask is 0
//   y_j  = exp(s_j - max s) / sum exp(s - max s); 0 when every s is -inf
//   ds_j = y_j (d_y_j - sum over j of y_j d_y_j), 0 where y_j is 0
//   d_x = scale · ds; d_rpe, d_key_padding_mask, d_attn_mask = ds, summed over what they broadcast
#include <cmath>
#include <limits>
#include <vector>

#include "core/view.hpp"
#include "ops/block_softmax/problem.hpp"

namespace pullback::block_softmax {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class Arithmetic>
class Reference final : public Body {
  using Real = typename Arithmetic::Real;

 public:
  Reference(const BlockSoftmaxProblem& problem, Pass pass)
      : problem_(problem), sizes_(sizes_of(problem)), pass_(pass) {
    this->description = "plain loops, one thread";
  }

  void run(Stream, const BlockSoftmaxTensors& tensors, Workspace) const override {
    if (pass_ == Pass::forward) {
      forward(tensors);
    } else {
      backward(tensors);
    }
  }

 private:
  template <class Body>
  void for_each_row(const Body& body) const {
    for (std::int64_t z = 0; z < sizes_.Z; ++z) {
      for (std::int64_t h = 0; h < sizes_.H; ++h) {
        for (std::int64_t r = 0; r < sizes_.R; ++r) {
          for (std::int64_t i = 0; i < sizes_.b; ++i) body(z, problem_.layout->row(h, r), i);
        }
      }
    }
  }

  void forward(const BlockSoftmaxTensors& tensors) const {
    const BlockSoftmaxProblem& p = problem_;
    const View x(p.x, tensors.x), y(p.y, tensors.y), rpe(p.rpe, tensors.rpe);
    const View key_padding_mask(p.key_padding_mask, tensors.key_padding_mask);
    const View attn_mask(p.attn_mask, tensors.attn_mask);
    const std::int64_t b = sizes_.b;
    std::vector<Real> s;
    for_each_row([&](std::int64_t z, std::span<const BlockLayout::Block> blocks, std::int64_t i) {
      s.clear();
      Real largest = -std::numeric_limits<Real>::infinity();
      for (const auto& block : blocks) {
        const std::int64_t row = block.row * b + i;
        for (std::int64_t j = 0; j < b; ++j) {
          const std::int64_t column = block.column * b + j;
          Real value = static_cast<Real>(x.get(z, block.rank, i, j));
          value = Arithmetic::round(value * static_cast<Real>(p.scale));
          if (rpe) add(value, rpe.get(z, block.head, row, column));
          if (key_padding_mask) {
            apply(value, key_padding_mask.get(z, column), p.key_padding_mode);
          }
          if (attn_mask) apply(value, attn_mask.get(row, column), p.attn_mask_mode);
          if (value > largest) largest = value;
          s.push_back(value);
        }
      }
      const Real shift = std::isinf(largest) && largest < 0 ? Real{0} : largest;
      Real sum = 0;
      for (Real& value : s) sum += value = std::exp(value - shift);
      std::size_t at = 0;
      for (const auto& block : blocks) {
        for (std::int64_t j = 0; j < b; ++j, ++at) {
          y.set(sum == 0 ? 0 : static_cast<double>(s[at] / sum), z, block.rank, i, j);
        }
      }
    });
  }

  void backward(const BlockSoftmaxTensors& tensors) const {
    const BlockSoftmaxProblem& p = problem_;
    const auto& [Z, H, R, C, b, nnz] = sizes_;
    const View y(p.y, tensors.y), d_y(p.d_y, tensors.d_y), d_x(p.d_x, tensors.d_x);
    const View d_rpe(p.d_rpe, tensors.d_rpe);
    const View d_key_padding_mask(p.d_key_padding_mask, tensors.d_key_padding_mask);
    const View d_attn_mask(p.d_attn_mask, tensors.d_attn_mask);
    const bool rpe_per_z = p.rpe.given() && p.rpe.shape[0] != 1;
    const bool rpe_per_h = p.rpe.given() && p.rpe.shape[1] != 1;
    const auto sums = [](const View& view) {
      return std::vector<Real>(view ? static_cast<std::size_t>(view.spec->numel()) : 0);
    };
    std::vector<Real> rpe_sum = sums(d_rpe), key_sum = sums(d_key_padding_mask);
    std::vector<Real> attn_sum = sums(d_attn_mask);
    const std::int64_t rows = R * b, columns = C * b;
    std::vector<Real> ds(static_cast<std::size_t>(columns));

    for_each_row([&](std::int64_t z, std::span<const BlockLayout::Block> blocks, std::int64_t i) {
      Real delta = 0;
      for (const auto& block : blocks) {
        for (std::int64_t j = 0; j < b; ++j) {
          const auto probability = static_cast<Real>(y.get(z, block.rank, i, j));
          if (probability == 0) continue;
          delta += probability * static_cast<Real>(d_y.get(z, block.rank, i, j));
        }
      }
      // All of d_y's row is read before d_x's is written: they may be the same memory.
      for (const auto& block : blocks) {
        for (std::int64_t j = 0; j < b; ++j) {
          const auto probability = static_cast<Real>(y.get(z, block.rank, i, j));
          const auto gradient = static_cast<Real>(d_y.get(z, block.rank, i, j));
          ds[static_cast<std::size_t>(block.column * b + j)] =
              probability == 0 ? Real{0} : probability * (gradient - delta);
        }
      }
      for (const auto& block : blocks) {
        const std::int64_t row = block.row * b + i;
        for (std::int64_t j = 0; j < b; ++j) {
          const std::int64_t column = block.column * b + j;
          const Real value = ds[static_cast<std::size_t>(column)];
          if (d_x) {
            d_x.set(static_cast<double>(value * static_cast<Real>(p.scale)), z, block.rank, i, j);
          }
          if (d_rpe) {
            const std::int64_t plane =
                (rpe_per_z ? z : 0) * (rpe_per_h ? H : 1) + (rpe_per_h ? block.head : 0);
            rpe_sum[static_cast<std::size_t>((plane * rows + row) * columns + column)] += value;
          }
          if (d_key_padding_mask) key_sum[static_cast<std::size_t>(z * columns + column)] += value;
          if (d_attn_mask) attn_sum[static_cast<std::size_t>(row * columns + column)] += value;
        }
      }
    });

    std::size_t at = 0;
    if (d_rpe) {
      for (std::int64_t z = 0; z < p.d_rpe.shape[0]; ++z) {
        for (std::int64_t h = 0; h < p.d_rpe.shape[1]; ++h) {
          for (std::int64_t i = 0; i < rows; ++i) {
            for (std::int64_t j = 0; j < columns; ++j) {
              d_rpe.set(static_cast<double>(rpe_sum[at++]), z, h, i, j);
            }
          }
        }
      }
    }
    at = 0;
    if (d_key_padding_mask) {
      for (std::int64_t z = 0; z < Z; ++z) {
        for (std::int64_t j = 0; j < columns; ++j) {
          d_key_padding_mask.set(static_cast<double>(key_sum[at++]), z, j);
        }
      }
    }
    at = 0;
    if (d_attn_mask) {
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < columns; ++j) {
          d_attn_mask.set(static_cast<double>(attn_sum[at++]), i, j);
        }
      }
    }
  }

  static void add(Real& value, double term) {
    value = Arithmetic::round(value + static_cast<Real>(term));
  }
  static void apply(Real& value, double mask, MaskMode mode) {
    if (mode == MaskMode::add) {
      add(value, mask);
    } else if (mask == 0) {
      value = static_cast<Real>(-kInfinity);
    }
  }

  BlockSoftmaxProblem problem_;
  Sizes sizes_;
  Pass pass_;
};

}  // namespace

std::unique_ptr<Body> make_reference(const BlockSoftmaxProblem& problem, const Device&, Pass pass) {
  return std::make_unique<Reference<ExactArithmetic>>(problem, pass);
}

std::unique_ptr<Body> make_textbook(const BlockSoftmaxProblem& problem, const Device&, Pass pass) {
  return dispatch_floating(problem.x.dtype, [&]<class T>() -> std::unique_ptr<Body> {
    return std::make_unique<Reference<TextbookArithmetic<T>>>(problem, pass);
  });
}

}  // namespace pullback::block_softmax
