// The definition of segment, forward and backward, per column of a segment:
//   sum, mean, prod   the obvious; prod's gradient is d_out times the product of all other rows
//   max, min          the extreme; a NaN beats everything. Gradient to the first or last of the
//                     rows that equal it (of NaN: always the first), or an equal share to each
//   logsumexp         m + log sum exp(x - m), m = max (0 when infinite); d_x = d_out exp(x - out)
//   softmax           exp(x - m) / sum; NaN where +inf or NaN is in the segment, 0 where all
//                     is -inf; d_x = out (d_out - sum out d_out)
#include <cmath>
#include <limits>
#include <type_traits>

#include "core/arithmetic.hpp"
#include "core/view.hpp"
#include "ops/segment/index.hpp"
#include "ops/segment/problem.hpp"

namespace pullback {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

bool ties(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

template <class Arithmetic>
class ReferenceBody final : public SegmentBody {
  // The definition of sums of doubles must be better than double itself.
  using Real = std::conditional_t<std::is_same_v<Arithmetic, ExactArithmetic>, long double,
                                  typename Arithmetic::Real>;
  static double round(Real value) {
    return Arithmetic::round(static_cast<typename Arithmetic::Real>(value));
  }

 public:
  ReferenceBody(const SegmentProblem& problem, const Device& device, Pass pass)
      : problem_(problem), pass_(pass), threads_(device.threads) {
    const std::size_t offsets = segments_workspace_bytes(problem);
    suffix_at_ = (offsets + alignof(Real) - 1) / alignof(Real) * alignof(Real);
    workspace_bytes = suffix_at_ + static_cast<std::size_t>(problem.x.shape[0] + 1) * sizeof(Real);
    description = "plain loops";
  }

  void run(Stream, const SegmentTensors& tensors, Workspace workspace) const override {
    check_indices(problem_, tensors, workspace.data);
    const Segments segments = make_segments(problem_, tensors, workspace.data, threads_);
    check_places(problem_, tensors, segments);
    auto* suffix = reinterpret_cast<Real*>(static_cast<char*>(workspace.data) + suffix_at_);
    pass_ == Pass::forward ? forward(tensors, segments) : backward(tensors, segments, suffix);
  }

 private:
  // The rows of one segment in one column of a tensor with a row for each of x.
  struct Column {
    const Segments& segments;
    const View& view;
    std::int64_t column;
    double operator()(std::int64_t r) const { return view.get(segments.readable_row(r), column); }
  };

  // Place of the row that is the extreme, by the rule of ties; -1 when there is no row.
  std::int64_t extreme_place(const Column& x, std::int64_t begin, std::int64_t end) const {
    std::int64_t best = -1;
    for (std::int64_t r = begin; r < end; ++r) {
      if (best < 0) {
        best = r;
        continue;
      }
      const double value = x(r), top = x(best);
      if (std::isnan(top)) break;
      const bool beats = problem_.reduce == SegmentReduce::max ? value > top : value < top;
      const bool later = problem_.ties == Ties::last && value == top;
      if (beats || later || std::isnan(value)) best = r;
    }
    return best;
  }

  struct LogSum {
    Real shift, sum;
    Real log() const { return shift + std::log(sum); }
  };
  LogSum log_sum(const Column& x, std::int64_t begin, std::int64_t end) const {
    double largest = -kInfinity;
    for (std::int64_t r = begin; r < end; ++r) largest = std::max(largest, x(r));
    LogSum result{static_cast<Real>(std::isfinite(largest) ? largest : 0), 0};
    for (std::int64_t r = begin; r < end; ++r) {
      result.sum += std::exp(static_cast<Real>(x(r)) - result.shift);
    }
    return result;
  }

  Real reduced(const Column& x, std::int64_t begin, std::int64_t end) const {
    if (begin == end) return empty_value(problem_);
    switch (problem_.reduce) {
      case SegmentReduce::prod: {
        Real product = 1;
        for (std::int64_t r = begin; r < end; ++r) product *= static_cast<Real>(x(r));
        return product;
      }
      case SegmentReduce::max:
      case SegmentReduce::min:
        return x(extreme_place(x, begin, end));
      case SegmentReduce::logsumexp:
        return log_sum(x, begin, end).log();
      default: {
        Real sum = 0;
        for (std::int64_t r = begin; r < end; ++r) sum += static_cast<Real>(x(r));
        return problem_.reduce == SegmentReduce::mean ? sum / static_cast<Real>(end - begin) : sum;
      }
    }
  }

  void forward(const SegmentTensors& tensors, const Segments& segments) const {
    const View x(problem_.x, tensors.x), out(problem_.out, tensors.out);
    const View arg(problem_.arg, tensors.arg), mask(problem_.arg_mask, tensors.arg_mask);
    const View lse(problem_.lse, tensors.lse);
    const bool softmax = problem_.reduce == SegmentReduce::softmax;
    if (softmax && out) fill_rows(out, 0);
    if (mask) fill_rows(mask, 0);
    for (std::int64_t s = 0; s < segments.count; ++s) {
      const std::int64_t begin = segments.begin(s), end = segments.end(s);
      for (std::int64_t d = 0; d < problem_.x.shape[1]; ++d) {
        const Column column{segments, x, d};
        if (softmax) {
          if (out) softmax_forward(column, out, segments, begin, end);
          continue;
        }
        if (out) out.set(round(reduced(column, begin, end)), s, d);
        if (lse) lse.set(reduced(column, begin, end), s, d);
        if (!arg && !mask) continue;
        const std::int64_t best = extreme_place(column, begin, end);
        if (arg) arg.set(static_cast<double>(saved_arg(segments, begin, best)), s, d);
        if (!mask || best < 0) continue;
        for (std::int64_t r = begin; r < end; ++r) {
          const bool chosen =
              problem_.ties == Ties::even ? ties(column(r), column(best)) : r == best;
          const std::int64_t n = segments.row(r);
          if (chosen && n >= 0) {
            mask.set(static_cast<int>(mask.get(n, d / 8)) | (1 << (d % 8)), n, d / 8);
          }
        }
      }
    }
  }

  std::int64_t saved_arg(const Segments& segments, std::int64_t begin, std::int64_t best) const {
    if (problem_.arg.dtype == DType::u8) return best < 0 ? kNoPlace : best - begin;
    return best < 0 ? -1 : segments.row(best);
  }

  void softmax_forward(const Column& x, const View& out, const Segments& segments,
                       std::int64_t begin, std::int64_t end) const {
    const LogSum total = log_sum(x, begin, end);
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t n = segments.row(r);
      if (n < 0) continue;
      Real y = std::exp(static_cast<Real>(x(r)) - total.shift) / total.sum;
      if (total.sum == 0) y = 0;
      if (!std::isfinite(total.sum)) y = static_cast<Real>(kNaN);
      out.set(round(y), n, x.column);
    }
  }

  void fill_rows(const View& view, double value) const {
    for (std::int64_t n = 0; n < view.spec->shape[0]; ++n) {
      for (std::int64_t d = 0; d < view.spec->shape[1]; ++d) view.set(value, n, d);
    }
  }

  void backward(const SegmentTensors& tensors, const Segments& segments, Real* suffix) const {
    const View d_x(problem_.d_x, tensors.d_x);
    if (!d_x) return;
    fill_rows(d_x, 0);
    for (std::int64_t s = 0; s < segments.count; ++s) {
      for (std::int64_t d = 0; d < problem_.x.shape[1]; ++d) {
        if (is_extreme(problem_.reduce)) {
          extreme_backward(tensors, segments, s, d, d_x);
        } else if (problem_.reduce == SegmentReduce::softmax) {
          softmax_backward(tensors, segments, s, d, d_x);
        } else {
          smooth_backward(tensors, segments, s, d, d_x, suffix);
        }
      }
    }
  }

  void store(const View& d_x, const Segments& segments, std::int64_t r, std::int64_t d,
             Real value) const {
    const std::int64_t n = segments.row(r);
    if (n >= 0) d_x.set(round(value), n, d);
  }

  void smooth_backward(const SegmentTensors& tensors, const Segments& segments, std::int64_t s,
                       std::int64_t d, const View& d_x, Real* suffix) const {
    const View x(problem_.x, tensors.x), out(problem_.out, tensors.out);
    const View saved_lse(problem_.lse, tensors.lse);
    const Column column{segments, x, d};
    const std::int64_t begin = segments.begin(s), end = segments.end(s);
    const auto g = static_cast<Real>(View(problem_.d_out, tensors.d_out).get(s, d));
    Real lse = 0;
    if (problem_.reduce == SegmentReduce::logsumexp) {
      lse = out_is_lse(problem_) ? static_cast<Real>(out.get(s, d))
            : saved_lse          ? static_cast<Real>(saved_lse.get(s, d))
                                 : log_sum(column, begin, end).log();
      if (lse == -kInfinity) lse = 0;
    }
    if (problem_.reduce == SegmentReduce::prod) {
      suffix[end - begin] = 1;
      for (std::int64_t r = end; r-- > begin;) {
        suffix[r - begin] = suffix[r - begin + 1] * static_cast<Real>(column(r));
      }
    }
    Real prefix = 1;
    for (std::int64_t r = begin; r < end; ++r) {
      Real value = g;
      if (problem_.reduce == SegmentReduce::mean) value = g / static_cast<Real>(end - begin);
      if (problem_.reduce == SegmentReduce::logsumexp) {
        value = g * std::exp(static_cast<Real>(column(r)) - lse);
      }
      if (problem_.reduce == SegmentReduce::prod) {
        value = g * (prefix * suffix[r - begin + 1]);
        prefix *= static_cast<Real>(column(r));
      }
      store(d_x, segments, r, d, value);
    }
  }

  void extreme_backward(const SegmentTensors& tensors, const Segments& segments, std::int64_t s,
                        std::int64_t d, const View& d_x) const {
    const View x(problem_.x, tensors.x), out(problem_.out, tensors.out);
    const View arg(problem_.arg, tensors.arg), mask(problem_.arg_mask, tensors.arg_mask);
    const std::int64_t begin = segments.begin(s), end = segments.end(s);
    const SegmentSaved saved = saved_of(problem_, tensors);
    const Column column{segments, x, d};
    const bool even = problem_.ties == Ties::even;
    const std::int64_t best =
        saved == SegmentSaved::nothing ? place_of(column, out.get(s, d), begin, end) : -1;
    const auto chosen = [&](std::int64_t r) {
      const std::int64_t n = segments.readable_row(r);
      if (saved == SegmentSaved::arg) {
        const std::int64_t row = problem_.arg.dtype == DType::u8 ? r - begin : n;
        return arg.get(s, d) == static_cast<double>(row);
      }
      if (saved == SegmentSaved::arg_mask) {
        return (static_cast<int>(mask.get(n, d / 8)) >> (d % 8) & 1) != 0;
      }
      return even ? ties(column(r), out.get(s, d)) : r == best;
    };
    std::int64_t count = 0;
    for (std::int64_t r = begin; r < end; ++r) count += chosen(r);
    auto g = static_cast<Real>(View(problem_.d_out, tensors.d_out).get(s, d));
    if (even) g /= static_cast<Real>(count);
    for (std::int64_t r = begin; r < end; ++r) {
      if (chosen(r)) store(d_x, segments, r, d, g);
    }
  }

  // Place of the row that equals `value`: the last one for ties = last, unless it is NaN.
  std::int64_t place_of(const Column& x, double value, std::int64_t begin, std::int64_t end) const {
    std::int64_t place = -1;
    for (std::int64_t r = begin; r < end; ++r) {
      if (!ties(x(r), value)) continue;
      place = r;
      if (problem_.ties != Ties::last || std::isnan(value)) break;
    }
    return place;
  }

  void softmax_backward(const SegmentTensors& tensors, const Segments& segments, std::int64_t s,
                        std::int64_t d, const View& d_x) const {
    const View y(problem_.out, tensors.out), d_y(problem_.d_out, tensors.d_out);
    const Column out{segments, y, d}, d_out{segments, d_y, d};
    Real sum = 0;
    for (std::int64_t r = segments.begin(s); r < segments.end(s); ++r) {
      sum += static_cast<Real>(out(r)) * static_cast<Real>(d_out(r));
    }
    for (std::int64_t r = segments.begin(s); r < segments.end(s); ++r) {
      store(d_x, segments, r, d, static_cast<Real>(out(r)) * (static_cast<Real>(d_out(r)) - sum));
    }
  }

  SegmentProblem problem_;
  Pass pass_;
  Threads threads_;
  std::size_t suffix_at_;
};

}  // namespace

std::unique_ptr<SegmentBody> make_segment_reference(const SegmentProblem& problem,
                                                    const Device& device, Pass pass) {
  return std::make_unique<ReferenceBody<ExactArithmetic>>(problem, device, pass);
}

std::unique_ptr<SegmentBody> make_segment_textbook(const SegmentProblem& problem,
                                                   const Device& device, Pass pass) {
  return dispatch_floating(problem.x.dtype, [&]<class T>() -> std::unique_ptr<SegmentBody> {
    return std::make_unique<ReferenceBody<TextbookArithmetic<T>>>(problem, device, pass);
  });
}

}  // namespace pullback
