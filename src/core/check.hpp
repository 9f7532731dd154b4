// Checks of problems and pointers, all with one shape of message:
//   "attention: d_out: expected shape [2, 8, 4, 64], got [2, 8, 4, 32]; pass the gradient of out"
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <new>
#include <span>
#include <string>
#include <string_view>

#include "pullback/device.hpp"
#include "pullback/error.hpp"
#include "pullback/tensor.hpp"

namespace pullback {

// `what` is the tensor or option. `remedy` may be empty.
[[noreturn]] void fail(ErrorCode code, std::string_view op, std::string_view what,
                       std::string_view expected, std::string_view got,
                       std::string_view remedy = {});

std::string shape_text(std::span<const std::int64_t> shape);

// Its sizes, of kMaxRank dimensions at most; none where it is not given.
std::span<const std::int64_t> shape_of(const TensorSpec& spec);

// Whether a number is finite where tensors of that dtype are computed: those of 16 bits in f32.
bool finite_for(DType dtype, double value);

// f(), where memory running out is an Error like any other.
template <class F>
decltype(auto) with_memory(std::string_view op, const F& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    fail(ErrorCode::device, op, "memory", "enough for the tables of this problem", "none left");
  }
}

// Every check of one op's problem starts from here, so that messages name the op. For plans: texts
// are made whether a check fails or not.
class Checker {
 public:
  explicit Checker(std::string_view op) : op_(op) {}

  // Rank within limits, a dtype, no negative size, and the bounds of tensor.hpp: products of a
  // tensor's sizes, and sums of its offsets, cannot overflow then.
  void sane(std::string_view name, const TensorSpec& spec) const;
  // For sizes that no single tensor has: their product, those of 0 left out, is at most 2^50.
  void product(std::string_view what, std::initializer_list<std::int64_t> sizes) const;
  void given(std::string_view name, const TensorSpec& spec) const;
  // The side of a layout's blocks.
  void block(std::int64_t block) const;
  void rank(std::string_view name, const TensorSpec& spec, int rank) const;
  void dtype(std::string_view name, const TensorSpec& spec,
             std::initializer_list<DType> allowed) const;
  void shape(std::string_view name, const TensorSpec& spec,
             std::initializer_list<std::int64_t> expected) const;
  void shape(std::string_view name, const TensorSpec& spec,
             std::span<const std::int64_t> expected) const;
  // Each dimension is the expected size or 1.
  void broadcast_shape(std::string_view name, const TensorSpec& spec,
                       std::initializer_list<std::int64_t> expected) const;
  // An output: no two indices may reach the same element.
  void writable(std::string_view name, const TensorSpec& spec) const;
  // A tensor that follows from others: row-major where none is given, else checked.
  enum Access { input, output };
  void derived(std::string_view name, TensorSpec& spec, Access access, DType dtype,
               std::span<const std::int64_t> shape) const;
  void derived(std::string_view name, TensorSpec& spec, Access access,
               const TensorSpec& model) const {
    derived(name, spec, access, model.dtype, shape_of(model));
  }
  // `holds` or a failure built from the texts.
  void that(bool holds, std::string_view what, std::string_view expected, std::string_view got,
            std::string_view remedy = {}) const;

 private:
  std::string op_;
};

inline constexpr DType kFloatingDTypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16};

// One pointer of a run, as run() sees it.
struct TensorUse {
  enum Access { read, write };
  std::string_view name = {};
  const TensorSpec* spec = nullptr;
  const void* data = nullptr;
  Access access = read;
  bool required = true;             // null is an error, unless the tensor is empty or not given
  std::string_view may_alias = {};  // name of a tensor that may be the very same memory (in place)
};

// The pointers of one run, without allocation.
class TensorUses {
 public:
  void read(std::string_view name, const TensorSpec& spec, const void* data, bool required = true) {
    uses_[count_++] = {name, &spec, data, TensorUse::read, required, {}};
  }
  void write(std::string_view name, const TensorSpec& spec, const void* data, bool required = false,
             std::string_view may_alias = {}) {
    uses_[count_++] = {name, &spec, data, TensorUse::write, required, may_alias};
  }
  std::span<const TensorUse> all() const { return {uses_.data(), count_}; }

 private:
  std::array<TensorUse, 24> uses_{};
  std::size_t count_ = 0;
};

// A number of threads that makes sense.
void check_device(std::string_view op, const Device& device);

// Null and misaligned pointers, outputs that overlap other tensors, a workspace that is small,
// misaligned or overlaps a tensor. Touches no element, and allocates nothing unless it throws.
void check_run(std::string_view op, std::span<const TensorUse> uses, std::size_t workspace_needed,
               const Workspace& workspace);

}  // namespace pullback
