#include "core/check.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace pullback {

void fail(ErrorCode code, std::string_view op, std::string_view what, std::string_view expected,
          std::string_view got, std::string_view remedy) {
  std::string text = fmt::format("{}: {}: expected {}, got {}", op, what, expected, got);
  if (!remedy.empty()) text += fmt::format("; {}", remedy);
  throw Error(code, text);
}

std::string shape_text(std::span<const std::int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::span<const std::int64_t> shape_of(const TensorSpec& spec) {
  return {spec.shape.data(), static_cast<std::size_t>(std::clamp(spec.rank, 0, kMaxRank))};
}

namespace {

std::string dtype_list(std::initializer_list<DType> dtypes) {
  std::string text;
  for (DType dtype : dtypes) text += (text.empty() ? "" : " or ") + std::string(name_of(dtype));
  return text;
}

}  // namespace

void Checker::that(bool holds, std::string_view what, std::string_view expected,
                   std::string_view got, std::string_view remedy) const {
  if (!holds) fail(ErrorCode::invalid_argument, op_, what, expected, got, remedy);
}

void Checker::sane(std::string_view name, const TensorSpec& spec) const {
  if (!spec.given()) return;
  that(spec.rank <= kMaxRank, name, fmt::format("at most {} dimensions", kMaxRank),
       fmt::format("{}", spec.rank));
  that(size_of(spec.dtype) > 0, name, "a dtype", "none");
  for (std::int64_t size : shape_of(spec)) {
    that(size >= 0, name, "sizes of 0 or more", shape_text(shape_of(spec)));
  }
  const std::int64_t limit = kMaxTensorBytes / static_cast<std::int64_t>(size_of(spec.dtype));
  std::int64_t numel = 1, reach = 0;
  for (int dim = 0; dim < spec.rank; ++dim) {
    const std::int64_t size = spec.shape[dim], stride = spec.strides[dim];
    if (size == 1) continue;
    if (size > 0) {
      that(size <= limit / numel, name, "at most 2^50 bytes", spec.to_string());
      numel *= size;
    }
    const bool fits = stride > -limit && stride < limit &&
                      (size == 0 || std::abs(stride) <= (limit - reach) / (size - 1));
    that(fits, name, "strides that reach at most 2^50 bytes", spec.to_string());
    if (size > 0) reach += std::abs(stride) * (size - 1);
  }
}

void Checker::product(std::string_view what, std::initializer_list<std::int64_t> sizes) const {
  std::int64_t product = 1;
  for (std::int64_t size : sizes) {
    if (size == 0) continue;
    that(size <= kMaxTensorBytes / product, what, "a product of at most 2^50",
         shape_text({sizes.begin(), sizes.size()}));
    product *= size;
  }
}

void Checker::block(std::int64_t block) const {
  that(block >= 16 && block <= 128 && block % 16 == 0, "block", "16 to 128, a multiple of 16",
       fmt::format("{}", block));
}

void Checker::given(std::string_view name, const TensorSpec& spec) const {
  that(spec.given(), name, "a tensor", "none");
  sane(name, spec);
}

void Checker::rank(std::string_view name, const TensorSpec& spec, int rank) const {
  that(spec.rank == rank, name, fmt::format("rank {}", rank),
       fmt::format("rank {} {}", spec.rank, shape_text(shape_of(spec))));
}

void Checker::dtype(std::string_view name, const TensorSpec& spec,
                    std::initializer_list<DType> allowed) const {
  const bool ok = std::find(allowed.begin(), allowed.end(), spec.dtype) != allowed.end();
  that(ok, name, "dtype " + dtype_list(allowed), std::string(name_of(spec.dtype)),
       "convert the tensor first");
}

void Checker::shape(std::string_view name, const TensorSpec& spec,
                    std::span<const std::int64_t> expected) const {
  that(std::ranges::equal(shape_of(spec), expected), name, "shape " + shape_text(expected),
       shape_text(shape_of(spec)));
}

void Checker::shape(std::string_view name, const TensorSpec& spec,
                    std::initializer_list<std::int64_t> expected) const {
  shape(name, spec, std::span(expected.begin(), expected.size()));
}

void Checker::broadcast_shape(std::string_view name, const TensorSpec& spec,
                              std::initializer_list<std::int64_t> expected) const {
  rank(name, spec, static_cast<int>(expected.size()));
  const std::span<const std::int64_t> sizes(expected.begin(), expected.size());
  for (int dim = 0; dim < spec.rank; ++dim) {
    that(spec.shape[dim] == 1 || spec.shape[dim] == sizes[dim], name,
         "shape " + shape_text(sizes) + ", or 1 in any place", shape_text(shape_of(spec)));
  }
}

void Checker::writable(std::string_view name, const TensorSpec& spec) const {
  sane(name, spec);
  if (spec.numel() == 0) return;
  // Sorted by stride, each dimension has to step over all that the smaller ones reach.
  std::vector<int> order;
  for (int dim = 0; dim < spec.rank; ++dim) {
    if (spec.shape[dim] > 1) order.push_back(dim);
  }
  std::ranges::sort(order, {}, [&](int dim) { return std::abs(spec.strides[dim]); });
  std::int64_t reach = 0;
  for (int dim : order) {
    const std::int64_t stride = std::abs(spec.strides[dim]);
    that(stride > reach, name, "an output whose elements do not overlap", spec.to_string(),
         "pass a tensor without stride 0 and without interleaved dimensions");
    reach += stride * (spec.shape[dim] - 1);
  }
}

void Checker::derived(std::string_view name, TensorSpec& spec, Access access, DType dtype,
                      std::span<const std::int64_t> shape) const {
  if (!spec.given()) spec = TensorSpec::contiguous(dtype, shape);
  sane(name, spec);
  this->dtype(name, spec, {dtype});
  this->shape(name, spec, shape);
  if (access == output) writable(name, spec);
}

namespace {

struct ByteRange {
  std::uintptr_t begin, end;
};

ByteRange bytes_of(const TensorUse& use) {
  const auto [low, high] = use.spec->offset_range();
  const auto size = static_cast<std::int64_t>(size_of(use.spec->dtype));
  const auto base = reinterpret_cast<std::uintptr_t>(use.data);
  return {base + static_cast<std::uintptr_t>(low * size),
          base + static_cast<std::uintptr_t>((high + 1) * size)};
}

// Where elements lie modulo `period` bytes, when that is one stretch: dimensions whose stride is a
// multiple of the period do not count. Longer than the period: everywhere.
struct Residues {
  std::uintptr_t begin, length;
};

Residues residues_of(const TensorUse& use, std::uintptr_t period) {
  const auto size = static_cast<std::int64_t>(size_of(use.spec->dtype));
  std::int64_t low = 0, high = size;
  for (int dim = 0; dim < use.spec->rank; ++dim) {
    if (use.spec->shape[dim] == 1) continue;  // whatever its stride
    const std::int64_t stride = use.spec->strides[dim] * size;
    if (stride % static_cast<std::int64_t>(period) == 0) continue;
    (stride > 0 ? high : low) += stride * (use.spec->shape[dim] - 1);
  }
  const auto base = reinterpret_cast<std::uintptr_t>(use.data) + static_cast<std::uintptr_t>(low);
  return {base % period, static_cast<std::uintptr_t>(high - low)};
}

// True when the tensors take turns in memory without touching, as the parts of a packed
// [B,S,3,H,D] do. Some stride, here of `a`, is then a period within which each has a stretch of its
// own.
bool interleaved(const TensorUse& a, const TensorUse& b) {
  for (int dim = 0; dim < a.spec->rank; ++dim) {
    if (a.spec->shape[dim] == 1 || a.spec->strides[dim] == 0) continue;
    const auto period = static_cast<std::uintptr_t>(std::abs(a.spec->strides[dim])) *
                        static_cast<std::uintptr_t>(size_of(a.spec->dtype));
    const Residues x = residues_of(a, period), y = residues_of(b, period);
    // Going up from each one's begin, the other must begin behind its end.
    const std::uintptr_t x_to_y = (y.begin + period - x.begin) % period;
    const std::uintptr_t y_to_x = (x.begin + period - y.begin) % period;
    if (x.length <= x_to_y && y.length <= y_to_x) return true;
  }
  return false;
}

// Whether the same index is the same element of both: strides that nobody steps along do not count.
bool same_elements(const TensorSpec& a, const TensorSpec& b) {
  if (a.dtype != b.dtype || a.rank != b.rank || a.shape != b.shape) return false;
  for (int dim = 0; dim < a.rank; ++dim) {
    if (a.shape[dim] != 1 && a.strides[dim] != b.strides[dim]) return false;
  }
  return true;
}

}  // namespace

bool finite_for(DType dtype, double value) {
  return std::abs(value) <= (dtype == DType::f64 ? std::numeric_limits<double>::max()
                                                 : std::numeric_limits<float>::max());
}

void check_device(std::string_view op, const Device& device) {
  constexpr int kMaxThreads = 4096;
  Checker(op).that(device.threads >= 0 && device.threads <= kMaxThreads, "threads",
                   fmt::format("0 (all that the process may use) to {}", kMaxThreads),
                   fmt::format("{}", device.threads));
}

void check_run(std::string_view op, std::span<const TensorUse> uses, std::size_t workspace_needed,
               const Workspace& workspace) {
  // Messages are made only for a failure: a run that succeeds allocates nothing.
  const auto refuse = [op](const TensorUse& use, std::string_view expected, std::string_view got,
                           std::string_view remedy = {}) {
    fail(ErrorCode::invalid_argument, op, use.name, expected, got, remedy);
  };
  for (const TensorUse& use : uses) {
    if (use.data == nullptr) {
      const bool needed = use.required && use.spec->given() && use.spec->numel() > 0;
      if (needed) refuse(use, "a data pointer", "null");
      continue;
    }
    if (!use.spec->given()) {
      refuse(use, "null, as the problem has no such tensor", "a pointer",
             "describe the tensor in the problem before making the plan");
    }
    const auto size = size_of(use.spec->dtype);
    if (reinterpret_cast<std::uintptr_t>(use.data) % size != 0) {
      refuse(use, fmt::format("a pointer aligned to its {}-byte elements", size),
             fmt::format("{}", use.data));
    }
  }
  for (const TensorUse& out : uses) {
    if (out.access != TensorUse::write || out.data == nullptr || out.spec->numel() == 0) continue;
    const ByteRange a = bytes_of(out);
    for (const TensorUse& other : uses) {
      if (&other == &out || other.data == nullptr || other.spec->numel() == 0) continue;
      const ByteRange b = bytes_of(other);
      if (a.end <= b.begin || b.end <= a.begin || interleaved(out, other) ||
          interleaved(other, out)) {
        continue;
      }
      const bool in_place = (out.may_alias == other.name || other.may_alias == out.name) &&
                            out.data == other.data && same_elements(*out.spec, *other.spec);
      if (!in_place) refuse(out, "memory of its own", fmt::format("overlap with {}", other.name));
    }
  }
  if (workspace_needed == 0) return;
  if (workspace.data == nullptr || workspace.bytes < workspace_needed) {
    fail(ErrorCode::workspace_too_small, op, "workspace", fmt::format("{} bytes", workspace_needed),
         fmt::format("{} bytes", workspace.data == nullptr ? 0 : workspace.bytes),
         "allocate plan.workspace_bytes()");
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(workspace.data);
  if (begin % kWorkspaceAlignment != 0) {
    fail(ErrorCode::invalid_argument, op, "workspace",
         fmt::format("alignment to {} bytes", kWorkspaceAlignment),
         fmt::format("{}", workspace.data));
  }
  // Inputs too: the run would overwrite them while it reads them.
  for (const TensorUse& use : uses) {
    if (use.data == nullptr || use.spec->numel() == 0) continue;
    const ByteRange bytes = bytes_of(use);
    if (begin < bytes.end && bytes.begin < begin + workspace_needed) {
      refuse(use, "memory of its own", "overlap with the workspace");
    }
  }
}

}  // namespace pullback
