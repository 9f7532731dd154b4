// The definition of entmax and its gradients in plain loops. With b = alpha - 1, z = x - max(x):
//   p_i = [b z_i - theta]_+^(1/b), sum p = 1;   tau = b max(x) + theta
//   alpha = 1:  p = exp(z) / sum exp(z);        tau = logsumexp(x)
//   s = p^(2-alpha) on the support (p > 0), t = s / sum s
//   d_x = s (d_y - <t, d_y>)
//   d_alpha = sum_i d_y_i [ (p_i - t_i) / b^2 - (p_i ln p_i - t_i sum_j p_j ln p_j) / b ]
// theta comes from sorting (alpha = 2), Newton's steps or bisection. Above alpha = 2, p is so steep
// where an element enters the support that no number theta may make the sum 1. With e the smallest
// z in the support and q its p, there is a q that does:  p_i = (b (z_i - e) + q^b)^(1/b). And as a
// few s may outweigh all others by any factor, the mean <t, d_y> is told from d_y of the largest.
// Textbooks do neither.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/arithmetic.hpp"
#include "ops/entmax/problem.hpp"

namespace pullback::entmax {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Below this alpha, b z - theta is close to 1 everywhere, and what matters is its difference from
// 1; theta then stands for c in p = (1 + b (z - c))^(1/b), which tends to exp(z - c).
constexpr double kNearOne = 1.125;

template <class Real>
struct Row {
  std::vector<Real> p;  // empty for a row of NaN
  Real tau = static_cast<Real>(kInfinity);
  std::int64_t support_size = 0;
};

template <class Real>
Real power(Real z, Real theta, Real b, bool near_one) {
  if (near_one) {
    const Real w = b * (z - theta);
    return w > -1 ? std::exp(std::log1p(w) / b) : 0;
  }
  const Real t = b * z - theta;
  if (!(t > 0)) return 0;
  return b == 1 ? t : b == Real{0.5} ? t * t : std::pow(t, 1 / b);
}

template <class Real>
Real sparsemax_theta(std::vector<Real> z) {
  std::sort(z.begin(), z.end(), std::greater<>());
  Real sum = 0, theta = -1;
  for (std::size_t k = 1; k <= z.size(); ++k) {
    sum += z[k - 1];
    const Real candidate = (sum - 1) / static_cast<Real>(k);
    if (z[k - 1] > candidate) theta = candidate;
  }
  return theta;
}

// The arithmetic of the definition, as run() chooses it.
template <class Real>
constexpr bool kExact = std::is_same_v<Real, long double>;

template <class Real>
struct Edge {
  Real z, p;
};

// b > 1: the smallest element of the support. With each in turn at the threshold, the sum of those
// above it grows: to less than 1 in the support. q by bisection down to neighbouring numbers.
template <class Real>
Edge<Real> edge_of_support(std::vector<Real> z, Real b) {
  std::sort(z.begin(), z.end(), std::greater<>());
  const auto sum_above = [&](Real edge, Real lift) {
    Real sum = 0;
    for (auto i = z.begin(); *i > edge; ++i) sum += std::pow(b * (*i - edge) + lift, 1 / b);
    return sum;
  };
  const Real edge =
      *(std::partition_point(z.begin(), z.end(), [&](Real e) { return sum_above(e, 0) < 1; }) - 1);
  const auto equal = static_cast<Real>(std::count(z.begin(), z.end(), edge));
  Real low = 0, high = 1;
  while (true) {
    const Real q = low + (high - low) / 2;
    if (!(q > low && q < high)) return {edge, high};
    (sum_above(edge, std::pow(q, b)) + equal * q < 1 ? low : high) = q;
  }
}

// The sum is convex in theta for b < 1: Newton's steps from below stay below, but for rounding.
// Beyond, where its slope has no bound, by bisection down to neighbouring numbers.
template <class Real>
Real solved_theta(const std::vector<Real>& z, Real b, bool near_one) {
  const Real uniform = std::pow(static_cast<Real>(z.size()), -b);
  Real low = near_one ? 0 : -1;
  Real high = near_one ? (1 - uniform) / b : -uniform;
  Real theta = low;
  while (true) {
    Real sum = 0, slope = 0;  // minus the derivative of the sum
    for (Real value : z) {
      const Real p = power(value, theta, b, near_one);
      sum += p;
      if (p > 0) slope += near_one ? p / (1 + b * (value - theta)) : p / (b * (b * value - theta));
    }
    (sum >= 1 ? low : high) = theta;
    Real next = low + (high - low) / 2;
    if (b < 1) {
      const Real newton = theta + (sum - 1) / slope;
      if (newton == theta) return theta;
      if (newton > low && newton < high) next = newton;
    }
    if (!(next > low && next < high)) return low;
    theta = next;
  }
}

// x holds -inf for hidden elements.
template <class Real>
Row<Real> forward_row(const std::vector<Real>& x, double alpha) {
  Row<Real> row;
  Real max = static_cast<Real>(-kInfinity);
  bool nan = !(alpha >= 1) || std::isinf(alpha);
  for (Real value : x) {
    nan |= std::isnan(value) || value == static_cast<Real>(kInfinity);
    max = std::max(max, value);
  }
  if (nan) {
    row.tau = static_cast<Real>(kNaN);
    row.support_size = -1;
    return row;
  }
  row.p.assign(x.size(), 0);
  if (std::isinf(max)) return row;

  const Real b = static_cast<Real>(alpha - 1);
  const bool near_one = alpha < kNearOne;
  std::vector<Real> z;  // those that can be in the support
  for (Real value : x) {
    if (b * (value - max) > -1) z.push_back(value - max);
  }
  const bool by_edge = kExact<Real> && b > 1;
  Edge<Real> edge{};
  Real theta = 0;
  if (by_edge) {
    edge = edge_of_support(z, b);
    theta = b * edge.z - std::pow(edge.p, b);
  } else if (b == 1) {
    theta = sparsemax_theta(z);
  } else if (b > 0) {
    theta = solved_theta(z, b, near_one);
  }

  Real sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const Real shifted = x[i] - max;
    if (by_edge) {
      const Real above = b * (shifted - edge.z);
      row.p[i] = above > 0 ? std::pow(above + std::pow(edge.p, b), 1 / b) : above == 0 ? edge.p : 0;
    } else {
      row.p[i] = b == 0 ? std::exp(shifted) : power(shifted, theta, b, near_one);
    }
    // Near 1 what is in the support may be too small for any number.
    row.support_size += b == 0     ? shifted > static_cast<Real>(-kInfinity)
                        : near_one ? b * (shifted - theta) > -1
                                   : row.p[i] > 0;
    sum += row.p[i];
  }
  if (b != 1) {
    for (Real& value : row.p) value /= sum;
  }
  row.tau = b == 0 ? max + std::log(sum) : b * max + (near_one ? b * theta - 1 : theta);
  return row;
}

template <class Real>
void backward_row(double alpha, const std::vector<Real>& s, const std::vector<Real>& d_y,
                  std::vector<Real>& d_x) {
  Real heaviest = 0;
  if (kExact<Real> && alpha > 2 && !s.empty())
    heaviest = d_y[std::max_element(s.begin(), s.end()) - s.begin()];
  Real sum = 0, dot = 0;
  for (std::size_t i = 0; i < s.size(); ++i) {
    if (s[i] == 0) continue;
    sum += s[i];
    dot += s[i] * (d_y[i] - heaviest);
  }
  for (std::size_t i = 0; i < s.size(); ++i) {
    d_x[i] = s[i] == 0 ? 0 : s[i] * (d_y[i] - heaviest - dot / sum);
  }
}

// (exp(x) - 1 - x) / x^2
template <class Real>
Real second_remainder(Real x) {
  if (std::abs(x) > Real{0.5}) return (std::expm1(x) - x) / (x * x);
  Real term = Real{0.5}, sum = 0;
  for (int k = 3; k < 26; ++k) {
    sum += term;
    term *= x / static_cast<Real>(k);
  }
  return sum;
}

// The formula at the top has differences of nearly equal terms over b and b^2. With L = ln p and
// R = (s/p - 1 + b L) / b^2 = L^2 (exp(x) - 1 - x) / x^2 at x = -b L, which is L^2 / 2 at b = 0, it
// becomes, all divisions by b gone:
//   d_alpha = [ <p,R> (<d_y,p> - b <d_y,pL>) - (1 - b sum pL) <d_y,pR> ] / sum s
// where 1 is written sum p, so that rounded p leave no trace of a constant added to d_y.
template <class Real>
Real d_alpha_of_row(const std::vector<Real>& p, const std::vector<Real>& d_y, Real b) {
  Real sum_p = 0, sum_s = 0, sum_pl = 0, sum_pr = 0, g_p = 0, g_pl = 0, g_pr = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    if (p[i] == 0) continue;
    const Real l = std::log(p[i]);
    const Real pr = p[i] * l * l * second_remainder(-b * l);
    sum_p += p[i];
    sum_s += p[i] * std::exp(-b * l);
    sum_pl += p[i] * l;
    sum_pr += pr;
    g_p += d_y[i] * p[i];
    g_pl += d_y[i] * p[i] * l;
    g_pr += d_y[i] * pr;
  }
  if (sum_p == 0) return 0;
  return (sum_pr * (g_p - b * g_pl) - (sum_p - b * sum_pl) * g_pr) / sum_s;
}

template <class Arithmetic>
class ReferencePlan final : public PlanBody<EntmaxTensors> {
 public:
  ReferencePlan(const EntmaxProblem& problem, Pass pass) : problem_(problem), pass_(pass) {
    description = "plain loops; exact threshold by sorting, Newton's steps or bisection";
  }

  void run(Stream, const EntmaxTensors& tensors, Workspace) const override {
    const std::int64_t groups = group_count(problem_);
    if (groups >= 0 && problem_.check_indices) check_offsets(problem_, tensors.offsets);
    const Outer outer(problem_);
    std::int64_t count = 1;
    for (int dim = 0; dim < outer.rank; ++dim) count *= outer.sizes[dim];
    for (std::int64_t index = 0; index < count; ++index) {
      Place place{};
      std::int64_t rest = index;
      for (int dim = outer.rank - 1; dim >= 0; --dim) {
        place.outer[dim] = rest % outer.sizes[dim];
        rest /= outer.sizes[dim];
      }
      if (groups < 0) {
        place.end = row_length(problem_);
        row(tensors, place);
        continue;
      }
      OffsetReader offsets(problem_, tensors.offsets);
      place.end = offsets.next();
      zero(tensors, place, 0, place.end);
      for (place.group = 0; place.group < groups; ++place.group) {
        place.begin = place.end;
        place.end = offsets.next();
        row(tensors, place);
      }
      zero(tensors, place, place.end, row_length(problem_));
    }
  }

 private:
  // The definition is evaluated in more digits than any dtype has, so that it can judge f64 too.
  using Real = std::conditional_t<std::is_same_v<Arithmetic, ExactArithmetic>, long double,
                                  typename Arithmetic::Real>;

  struct Place {
    std::array<std::int64_t, kMaxRank - 1> outer;
    std::int64_t group, begin, end;
  };

  static std::int64_t offset(const Steps& steps, const Place& place, std::int64_t along) {
    std::int64_t sum = along * steps.axis;
    for (std::size_t dim = 0; dim < place.outer.size(); ++dim) {
      sum += place.outer[dim] * steps.outer[dim];
    }
    return sum;
  }
  std::int64_t element(const TensorSpec& spec, const Place& place, std::int64_t i) const {
    return offset(steps_with_axis(problem_, spec), place, i);
  }
  std::int64_t of_row(const TensorSpec& spec, const Place& place) const {
    return offset(steps_per_row(problem_, spec), place, place.group);
  }
  std::vector<Real> load(const TensorSpec& spec, const void* data, const Place& place) const {
    std::vector<Real> values;
    for (std::int64_t i = place.begin; i < place.end; ++i) {
      values.push_back(static_cast<Real>(load_element(spec.dtype, data, element(spec, place, i))));
    }
    return values;
  }
  void store(const TensorSpec& spec, void* data, const Place& place, std::int64_t i,
             Real value) const {
    store_element(spec.dtype, data, element(spec, place, i), static_cast<double>(value));
  }

  void row(const EntmaxTensors& tensors, const Place& place) const {
    const double alpha = problem_.alpha_per_row.given()
                             ? load_element(problem_.alpha_per_row.dtype, tensors.alpha_per_row,
                                            of_row(problem_.alpha_per_row, place))
                             : problem_.alpha;
    pass_ == Pass::forward ? forward(tensors, place, alpha) : backward(tensors, place, alpha);
  }

  // Elements that belong to no ragged row.
  void zero(const EntmaxTensors& tensors, const Place& place, std::int64_t begin,
            std::int64_t end) const {
    const TensorSpec& spec = pass_ == Pass::forward ? problem_.y : problem_.d_x;
    void* data = pass_ == Pass::forward ? tensors.y : tensors.d_x;
    for (std::int64_t i = begin; data && i < end; ++i) store(spec, data, place, i, 0);
  }

  void forward(const EntmaxTensors& tensors, const Place& place, double alpha) const {
    std::vector<Real> x = load(problem_.x, tensors.x, place);
    const auto length = static_cast<std::int64_t>(x.size());
    for (std::int64_t i = 0; problem_.mask.given() && i < length; ++i) {
      const auto at = element(problem_.mask, place, place.begin + i);
      if (load_element(DType::u8, tensors.mask, at) == 0) {
        x[static_cast<std::size_t>(i)] = static_cast<Real>(-kInfinity);
      }
    }
    const Row<Real> result = forward_row(x, alpha);
    const auto p = [&](std::int64_t i) {
      return result.p.empty() ? static_cast<Real>(kNaN) : result.p[static_cast<std::size_t>(i)];
    };
    for (std::int64_t i = 0; tensors.y && i < length; ++i) {
      store(problem_.y, tensors.y, place, place.begin + i, p(i));
    }
    if (tensors.tau) {
      store_element(problem_.tau.dtype, tensors.tau, of_row(problem_.tau, place),
                    static_cast<double>(result.tau));
    }
    if (tensors.support_size) {
      store_element(DType::i32, tensors.support_size, of_row(problem_.support_size, place),
                    static_cast<double>(result.support_size));
    }
    for (std::int64_t i = 0; tensors.support && i < length; i += 8) {
      int bits = 0;
      for (std::int64_t j = i; j < std::min(i + 8, length); ++j) {
        if (p(j) > 0) bits |= 1 << (j - i);
      }
      store_element(DType::u8, tensors.support,
                    offset(steps_of_support(problem_.support), place, i / 8), bits);
    }
  }

  void backward(const EntmaxTensors& tensors, const Place& place, double alpha) const {
    const std::vector<Real> d_y = load(problem_.d_y, tensors.d_y, place);
    const bool valid = alpha >= 1 && !std::isinf(alpha);
    std::vector<Real> s(d_y.size()), d_x(d_y.size());
    std::vector<Real> y;
    if (tensors.y || d_y.empty()) {  // a y without elements may be null
      y = load(problem_.y, tensors.y, place);
      for (std::size_t i = 0; i < s.size(); ++i) {
        s[i] = y[i] == 0    ? 0
               : alpha == 2 ? y[i] / y[i]
                            : std::pow(y[i], static_cast<Real>(2 - alpha));
        if (!valid) s[i] = static_cast<Real>(kNaN);
      }
    } else {
      const bool nan =
          load_element(DType::i32, tensors.support_size, of_row(problem_.support_size, place)) < 0;
      for (std::size_t i = 0; i < s.size(); ++i) {
        const auto at =
            offset(steps_of_support(problem_.support), place, static_cast<std::int64_t>(i / 8));
        const auto bits = static_cast<const std::uint8_t*>(tensors.support)[at];
        s[i] = nan ? static_cast<Real>(kNaN) : static_cast<Real>(bits >> i % 8 & 1);
      }
    }
    backward_row(alpha, s, d_y, d_x);
    for (std::size_t i = 0; tensors.d_x && i < d_x.size(); ++i) {
      store(problem_.d_x, tensors.d_x, place, place.begin + static_cast<std::int64_t>(i), d_x[i]);
    }
    if (tensors.d_alpha) {
      const Real value =
          valid ? d_alpha_of_row(y, d_y, static_cast<Real>(alpha - 1)) : static_cast<Real>(kNaN);
      store_element(problem_.d_alpha.dtype, tensors.d_alpha, of_row(problem_.d_alpha, place),
                    static_cast<double>(value));
    }
  }

  EntmaxProblem problem_;
  Pass pass_;
};

}  // namespace

Body make_reference(const EntmaxProblem& problem, const Device&, Pass pass) {
  return std::make_unique<ReferencePlan<ExactArithmetic>>(problem, pass);
}

Body make_textbook(const EntmaxProblem& problem, const Device&, Pass pass) {
  return dispatch_floating(problem.x.dtype, [&]<class T>() -> Body {
    return std::make_unique<ReferencePlan<TextbookArithmetic<T>>>(problem, pass);
  });
}

}  // namespace pullback::entmax
