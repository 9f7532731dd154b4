#include "ops/block_softmax/schedule.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "pullback/error.hpp"

namespace pullback::block_softmax {
namespace {

// The largest magic quotient that is exact (params.cuh: divisors are 2^shift · 1, 3, 5 or 7).
constexpr std::int64_t kMaxUnits = std::int64_t{1} << 29;

RowClass class_of(UnitShape shape, std::int64_t block, std::int64_t vectors) {
  RowClass row_class{};
  row_class.warps = static_cast<std::uint8_t>(shape.warps);
  row_class.row_shift = static_cast<std::uint8_t>(shape.row_shift);
  row_class.units_shift = static_cast<std::uint8_t>(
      shape.warps < kWarps ? std::countr_zero(static_cast<unsigned>(kWarps / shape.warps)) : 0);
  const int divides = std::countr_zero(static_cast<std::uint64_t>(vectors));
  row_class.segment_shift = static_cast<std::uint8_t>(std::min(divides, 5 - shape.row_shift));
  row_class.units_per_block_row = divisor_of(block >> shape.row_shift);
  return row_class;
}

}  // namespace

Divisor divisor_of(std::int64_t value) {
  const int shift = std::countr_zero(static_cast<std::uint64_t>(value));
  const std::int64_t odd = value >> shift;
  const std::int64_t magic = odd == 1 ? 0 : ((std::int64_t{1} << 32) + odd - 1) / odd;
  return {static_cast<std::uint32_t>(value), static_cast<std::uint32_t>(shift),
          static_cast<std::uint32_t>(magic)};
}

Schedule make_schedule(const BlockLayout& layout, std::int64_t block, std::int64_t vectors,
                       std::span<const UnitShape> shapes,
                       const std::function<int(std::int64_t)>& choose, DeviceTables& tables) {
  std::vector<std::vector<BlockRow>> by_shape(shapes.size());
  for (std::int64_t head = 0; head < layout.heads(); ++head) {
    for (std::int64_t row = 0; row < layout.rows(); ++row) {
      const auto blocks = layout.row(head, row);
      if (blocks.empty()) continue;
      const int shape = choose(static_cast<std::int64_t>(blocks.size()) * vectors);
      if (shape < 0) continue;
      by_shape[static_cast<std::size_t>(shape)].push_back(
          {blocks[0].rank, static_cast<std::int32_t>(blocks.size()),
           static_cast<std::int32_t>(head * layout.rows() + row)});
    }
  }
  Schedule schedule{};
  std::vector<BlockRow> table;
  std::int64_t ctas = 0;
  for (std::size_t s = 0; s < shapes.size(); ++s) {
    std::vector<BlockRow>& rows = by_shape[s];
    if (rows.empty()) continue;
    // Within a class, too, the longest first.
    std::stable_sort(rows.begin(), rows.end(),
                     [](const BlockRow& a, const BlockRow& b) { return a.blocks > b.blocks; });
    RowClass row_class = class_of(shapes[s], block, vectors);
    const std::int64_t units =
        static_cast<std::int64_t>(rows.size()) * row_class.units_per_block_row.value;
    if (units > kMaxUnits) {
      throw Error(ErrorCode::unsupported,
                  fmt::format("block_softmax: layout: expected at most {} groups of rows for CUDA, "
                              "got {} heads of {} block rows",
                              kMaxUnits, layout.heads(), layout.rows()));
    }
    row_class.first_cta = static_cast<std::uint32_t>(ctas);
    row_class.first_block_row = static_cast<std::uint32_t>(table.size());
    row_class.units = static_cast<std::uint32_t>(units);
    ctas += ((units - 1) >> row_class.units_shift) + 1;
    table.insert(table.end(), rows.begin(), rows.end());
    schedule.classes[schedule.class_count++] = row_class;
  }
  schedule.ctas = static_cast<std::uint32_t>(ctas);
  schedule.block_rows = tables.add(std::span<const BlockRow>(table));
  return schedule;
}

UnitShapes unit_shapes(std::int64_t piece) {
  constexpr int kMostRowShift = 4;  // rows of the smallest block
  const int wanted = std::clamp(
      5 - static_cast<int>(std::bit_width(static_cast<std::uint64_t>(piece))), 0, kMostRowShift);
  UnitShapes shapes;
  int team = 32 * kWarps;
  for (UnitShape& shape : shapes) {
    shape.warps = std::clamp((team << wanted) / 32, 1, kWarps);
    shape.row_shift = std::countr_zero(static_cast<unsigned>(32 * shape.warps / team));
    team /= 2;
  }
  return shapes;
}

int shape_for(std::span<const UnitShape> shapes, std::int64_t row_vectors, std::int64_t per_thread,
              std::int64_t piece, int row_shift) {
  for (std::size_t shape = shapes.size(); shape-- > 0;) {
    if (shapes[shape].row_shift >= row_shift &&
        row_vectors <= shapes[shape].team() / piece * piece * per_thread) {
      return static_cast<int>(shape);
    }
  }
  return -1;
}

constexpr int kMostRowShift = static_cast<int>(std::size(kRingShapes)) - 1;

RowChooser::RowChooser(std::int64_t vectors, int per_thread, int tensors, bool ring,
                       const cuda::DeviceInfo& device)
    : vectors_(vectors),
      shapes_(unit_shapes(vectors)),
      per_thread_(per_thread),
      tensors_(tensors),
      ring_(ring) {
  // As many rows together as fill a 128-byte line.
  line_shift_ = vectors <= 2 ? 2 : vectors < 8 ? 1 : 0;
  constexpr int kStatic = 2048;
  large_ = ring_bytes(kRings[1]) + kStatic <= device.max_shared_bytes;
  clusters_ = large_ && (device.major == 9 || device.major == 10);
}

RowChoice RowChooser::choose(std::int64_t row_vectors) const {
  const auto capacity = [&](RowKernel kernel, int row_shift) {
    const std::int64_t team =
        kRingShapes[row_shift].team() * cluster_of(kernel) / vectors_ * vectors_;
    return team * (ring_of(kernel) * kRingBatch / tensors_);
  };
  // In registers half a line is enough: other warps ask for the rest at about the same time.
  int shape = shape_for(shapes_, row_vectors, per_thread_, vectors_, std::max(line_shift_ - 1, 0));
  if (shape < 0 && !ring_) shape = shape_for(shapes_, row_vectors, per_thread_, vectors_);
  if (shape >= 0) return {RowKernel::registers, shape};
  if (!ring_) return {RowKernel::stream, 0};
  for (int row_shift = kMostRowShift; row_shift > line_shift_; --row_shift) {
    if (row_vectors <= capacity(RowKernel::ring, row_shift)) return {RowKernel::ring, row_shift};
  }
  // Whole lines are worth some reading twice, or a cluster.
  for (int row_shift = line_shift_; row_shift >= (clusters_ ? line_shift_ : 0); --row_shift) {
    if (row_vectors <= capacity(RowKernel::ring, row_shift)) return {RowKernel::ring, row_shift};
    if (large_ && row_vectors <= capacity(RowKernel::large_ring, row_shift) * 5 / 4) {
      return {RowKernel::large_ring, row_shift};
    }
  }
  if (!clusters_) return {large_ ? RowKernel::large_ring : RowKernel::ring, 0};
  int row_shift = kMostRowShift;
  while (row_shift > line_shift_ &&
         row_vectors > capacity(RowKernel::cluster_ring, row_shift) * 5 / 4) {
    --row_shift;
  }
  return {RowKernel::cluster_ring, row_shift};
}

bool vector_layout(const TensorSpec& spec) {
  const std::int64_t block = spec.shape[3];
  const auto length = static_cast<std::int64_t>(16 / size_of(spec.dtype));
  return spec.strides[3] == 1 && spec.strides[2] == block && spec.strides[1] == block * block &&
         spec.strides[0] % length == 0;
}

BlockTensor block_tensor(const TensorSpec& spec) {
  return {nullptr, spec.strides[0], spec.strides[1], spec.strides[2], spec.strides[3]};
}

}  // namespace pullback::block_softmax
