#include "driver/host_tensor.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <numeric>
#include <vector>

#include "core/check.hpp"
#include "core/element.hpp"
#include "core/threads.hpp"

namespace pullback::driver {
namespace {

constexpr std::size_t kMargin = 512;

std::byte* allocate(std::size_t bytes) {
  return static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kWorkspaceAlignment}));
}

// With all cores: a benchmark's tensors have gigabytes, and the first touch of a page is slow.
void fill(std::byte* memory, std::uint8_t value, std::size_t bytes) {
  constexpr std::size_t kPiece = std::size_t{4} << 20;
  const auto pieces = static_cast<std::int64_t>((bytes + kPiece - 1) / kPiece);
  const auto fill_piece = [&](std::int64_t piece, int) {
    const std::size_t begin = static_cast<std::size_t>(piece) * kPiece;
    std::memset(memory + begin, value, std::min(kPiece, bytes - begin));
  };
  if (pieces == 1) return fill_piece(0, 0);
  Threads(0).parallel_for(pieces, fill_piece);
}

struct Free {
  void operator()(const void* memory) const {
    ::operator delete(const_cast<void*>(memory), std::align_val_t{kWorkspaceAlignment});
  }
};

// Element offset of a row-major position.
std::int64_t offset_of(const TensorSpec& spec, std::int64_t flat) {
  if (spec.is_contiguous()) return flat;
  std::int64_t offset = 0;
  for (int dim = spec.rank - 1; dim >= 0; --dim) {
    offset += flat % spec.shape[dim] * spec.strides[dim];
    flat /= spec.shape[dim];
  }
  return offset;
}

// The elements of a tensor in row-major order, from the first or another one on, a row at a time:
// those along the last dimension that has more than one.
class Walk {
 public:
  explicit Walk(const HostTensor& tensor, std::int64_t flat = 0)
      : spec_(tensor.spec()),
        size_(static_cast<std::int64_t>(size_of(spec_.dtype))),
        last_(spec_.rank - 1),
        at_(static_cast<std::byte*>(tensor.data())) {
    while (last_ >= 0 && spec_.shape[last_] == 1) --last_;
    for (int dim = last_; dim >= 0; --dim) {
      const std::int64_t count = std::max<std::int64_t>(spec_.shape[dim], 1);
      std::int64_t& index = index_[static_cast<std::size_t>(dim)];
      index = flat % count;
      at_ += index * spec_.strides[dim] * size_;
      flat /= count;
    }
  }

  std::byte* at() const { return at_; }
  // Of the row, in elements.
  std::int64_t stride() const { return last_ < 0 ? 1 : spec_.strides[last_]; }
  // Elements of the row from here on.
  std::int64_t left() const {
    return last_ < 0 ? 1 : spec_.shape[last_] - index_[static_cast<std::size_t>(last_)];
  }
  // By so many elements, left() at most.
  void advance(std::int64_t count) {
    for (int dim = last_; dim >= 0; --dim) {
      std::int64_t& index = index_[static_cast<std::size_t>(dim)];
      at_ += count * spec_.strides[dim] * size_;
      index += count;
      if (index < spec_.shape[dim]) return;
      at_ -= spec_.strides[dim] * size_ * index;
      index = 0;
      count = 1;
    }
  }

 private:
  const TensorSpec& spec_;
  std::int64_t size_;
  int last_;
  std::byte* at_;
  std::array<std::int64_t, kMaxRank> index_{};
};

// Elements as numbers of their size, whatever they hold: body.operator()<Word>().
template <class Body>
auto with_word(DType dtype, const Body& body) {
  switch (size_of(dtype)) {
    case 1:
      return body.template operator()<std::uint8_t>();
    case 2:
      return body.template operator()<std::uint16_t>();
    case 4:
      return body.template operator()<std::uint32_t>();
    default:
      return body.template operator()<std::uint64_t>();
  }
}

template <class Word>
Word word_at(const std::byte* row, std::int64_t index) {
  Word word;
  std::memcpy(&word, row + index * static_cast<std::int64_t>(sizeof word), sizeof word);
  return word;
}
template <class Word>
void set_word(std::byte* row, std::int64_t index, Word word) {
  std::memcpy(row + index * static_cast<std::int64_t>(sizeof word), &word, sizeof word);
}

}  // namespace

void for_stretches(std::int64_t numel,
                   const std::function<void(std::int64_t first, std::int64_t count)>& body) {
  const std::int64_t stretches = (numel + kStretch - 1) / kStretch;
  const auto stretch = [&](std::int64_t i, int) {
    body(i * kStretch, std::min(kStretch, numel - i * kStretch));
  };
  if (stretches <= 1) {
    if (stretches == 1) stretch(0, 0);
    return;
  }
  Threads(0).parallel_for(stretches, stretch, 16);
}

HostTensor::HostTensor(const TensorSpec& spec) : spec_(spec) {
  Checker("HostTensor").sane("spec", spec);
  const auto [low, high] = spec.offset_range();
  const std::size_t size = size_of(spec.dtype);
  storage_bytes_ = static_cast<std::size_t>(high - low + 1) * size + 2 * kMargin;
  storage_ = allocate(storage_bytes_);
  owner_ = std::shared_ptr<const void>(storage_, Free());
  fill(storage_, kGuard, storage_bytes_);
  data_ = storage_ + kMargin - low * static_cast<std::int64_t>(size);
}

HostTensor HostTensor::borrow(const TensorSpec& spec, const void* data,
                              std::shared_ptr<const void> owner) {
  HostTensor tensor;
  tensor.spec_ = spec;
  tensor.data_ = const_cast<void*>(data);
  tensor.owner_ = std::move(owner);
  return tensor;
}

std::span<std::byte> HostTensor::memory() const {
  if (owns_memory()) return {storage_, storage_bytes_};
  const auto [low, high] = spec_.offset_range();
  const auto size = static_cast<std::int64_t>(size_of(spec_.dtype));
  return {static_cast<std::byte*>(data_) + low * size,
          static_cast<std::size_t>((high - low + 1) * size)};
}

double HostTensor::get(std::int64_t flat) const {
  return load_element(spec_.dtype, data_, offset_of(spec_, flat));
}

void HostTensor::set(std::int64_t flat, double value) const {
  store_element(spec_.dtype, data_, offset_of(spec_, flat), value);
}

void HostTensor::load(std::int64_t flat, std::span<double> values) const {
  if (is_floating(spec_.dtype) && spec_.is_contiguous()) {
    dispatch_floating(spec_.dtype, [&]<class T>() {
      std::transform(static_cast<const T*>(data_) + flat,
                     static_cast<const T*>(data_) + flat + values.size(), values.begin(),
                     to_double<T>);
    });
    return;
  }
  Walk walk(*this, flat);
  while (!values.empty()) {
    const auto count = std::min(walk.left(), static_cast<std::int64_t>(values.size()));
    for (std::int64_t i = 0; i < count; ++i) {
      values[static_cast<std::size_t>(i)] = load_element(spec_.dtype, walk.at(), i * walk.stride());
    }
    walk.advance(count);
    values = values.subspan(static_cast<std::size_t>(count));
  }
}

void HostTensor::store(std::int64_t flat, std::span<const double> values) const {
  if (is_floating(spec_.dtype) && spec_.is_contiguous()) {
    dispatch_floating(spec_.dtype, [&]<class T>() {
      std::ranges::transform(values, static_cast<T*>(data_) + flat, from_double<T>);
    });
    return;
  }
  Walk walk(*this, flat);
  while (!values.empty()) {
    const auto count = std::min(walk.left(), static_cast<std::int64_t>(values.size()));
    for (std::int64_t i = 0; i < count; ++i) {
      store_element(spec_.dtype, walk.at(), i * walk.stride(), values[static_cast<std::size_t>(i)]);
    }
    walk.advance(count);
    values = values.subspan(static_cast<std::size_t>(count));
  }
}

bool HostTensor::guards_intact() const {
  if (storage_ == nullptr) return true;
  // A copy in which all elements hold what guards do.
  std::vector<std::byte> copy(storage_, storage_ + storage_bytes_);
  with_word(spec_.dtype, [&]<class Word>() {
    Word guard;
    std::memset(&guard, kGuard, sizeof guard);
    Walk walk(*this);
    for (std::int64_t left = numel(); left > 0;) {
      const std::int64_t count = walk.left(), stride = walk.stride();
      std::byte* const to = copy.data() + (walk.at() - storage_);
      for (std::int64_t i = 0; i < count; ++i) set_word(to, i * stride, guard);
      walk.advance(count);
      left -= count;
    }
  });
  // All bytes are equal if the first one is right and each is like the one behind it.
  return copy[0] == std::byte{kGuard} &&
         std::memcmp(copy.data(), copy.data() + 1, copy.size() - 1) == 0;
}

HostTensor contiguous_copy(const HostTensor& tensor) {
  return relaid(tensor, TensorSpec::contiguous(tensor.spec().dtype, shape_of(tensor.spec())));
}

namespace {

HostTensor in_double(const HostTensor& tensor) {
  HostTensor copy(TensorSpec::contiguous(DType::f64, shape_of(tensor.spec())));
  for_stretches(tensor.numel(), [&](std::int64_t first, std::int64_t count) {
    std::array<double, kStretch> buffer;
    const std::span values(buffer.data(), static_cast<std::size_t>(count));
    tensor.load(first, values);
    copy.store(first, values);
  });
  return copy;
}

}  // namespace

TensorMap in_double(const TensorMap& tensors) {
  TensorMap result;
  for (const auto& [name, tensor] : tensors) {
    result[name] = is_floating(tensor.spec().dtype) ? in_double(tensor) : tensor;
  }
  return result;
}

TensorSpec random_layout(const TensorSpec& spec, Random& random) {
  TensorSpec layout = spec;
  std::vector<int> order(static_cast<std::size_t>(spec.rank));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1],
              order[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(i) - 1))]);
  }
  std::int64_t stride = random.integer(1, 2);
  for (int dim : order) {
    layout.strides[dim] = random.chance(0.25) ? -stride : stride;
    stride = stride * std::max<std::int64_t>(spec.shape[dim], 1) + random.integer(0, 3);
  }
  return layout;
}

HostTensor relaid(const HostTensor& tensor, const TensorSpec& layout) {
  HostTensor copy(layout);
  with_word(layout.dtype, [&]<class Word>() {
    Walk from(tensor), to(copy);
    for (std::int64_t left = tensor.numel(); left > 0;) {
      const std::int64_t count = from.left();
      for (std::int64_t i = 0; i < count; ++i) {
        set_word(to.at(), i * to.stride(), word_at<Word>(from.at(), i * from.stride()));
      }
      from.advance(count);
      to.advance(count);
      left -= count;
    }
  });
  return copy;
}

bool same_bits(const HostTensor& a, const HostTensor& b) {
  if (a.spec().dtype != b.spec().dtype || a.spec().shape != b.spec().shape) return false;
  return with_word(a.spec().dtype, [&]<class Word>() {
    Walk x(a), y(b);
    for (std::int64_t left = a.numel(); left > 0;) {
      const std::int64_t count = x.left();
      for (std::int64_t i = 0; i < count; ++i) {
        if (word_at<Word>(x.at(), i * x.stride()) != word_at<Word>(y.at(), i * y.stride())) {
          return false;
        }
      }
      x.advance(count);
      y.advance(count);
      left -= count;
    }
    return true;
  });
}

WorkspaceBuffer::WorkspaceBuffer(std::size_t bytes) : bytes_(bytes) {
  if (bytes > 0) data_ = std::shared_ptr<std::byte>(allocate(bytes), Free());
}

}  // namespace pullback::driver
