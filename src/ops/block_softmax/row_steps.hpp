// The launches of one pass over the rows of a layout, forward or backward.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "ops/block_softmax/schedule.hpp"

namespace pullback::block_softmax {

// Params is ForwardParams or BackwardParams.
template <class Params>
class RowSteps {
 public:
  struct Step {
    cuda::PlannedKernel<Params> kernel;
    Params params;
  };
  struct Kernels {
    cuda::OpKernel rows, ring, stream;
  };

  // A kernel of smxx_stream.cuh for all rows; `vectors` make up one row of a block.
  void add_stream(const cuda::OpKernel& kernel, const BlockLayout& layout, std::int64_t vectors,
                  Params params, DeviceTables& tables, const cuda::DeviceInfo& device) {
    params.piece = divisor_of(vectors);
    const UnitShapes shapes = unit_shapes(vectors);
    params.schedule = make_schedule(
        layout, params.block, vectors, shapes,
        [&](std::int64_t row) { return std::max(shape_for(shapes, row, kStreamVectors, 1), 0); },
        tables);
    add(kernel, params, 1, device);
  }

  // For each row the kernel that `chooser` names; the longest rows first. False, and no launches,
  // where one of them is not to be had.
  bool add_by_length(const Kernels& kernels, const BlockLayout& layout, std::int64_t vectors,
                     const RowChooser& chooser, Params params, DeviceTables& tables,
                     const cuda::DeviceInfo& device) {
    params.piece = divisor_of(vectors);
    const UnitShapes unit = unit_shapes(vectors);
    for (const RowKernel kernel : {RowKernel::stream, RowKernel::cluster_ring,
                                   RowKernel::large_ring, RowKernel::ring, RowKernel::registers}) {
      const bool ring = kernel != RowKernel::stream && kernel != RowKernel::registers;
      const std::span<const UnitShape> shapes =
          ring ? std::span<const UnitShape>(kRingShapes) : std::span<const UnitShape>(unit);
      params.ring = ring ? ring_of(kernel) : 0;
      params.schedule = make_schedule(
          layout, params.block, vectors, shapes,
          [&](std::int64_t row) {
            const RowChoice choice = chooser.choose(row);
            return choice.kernel == kernel ? choice.shape : -1;
          },
          tables);
      const cuda::OpKernel& chosen = ring                          ? kernels.ring
                                     : kernel == RowKernel::stream ? kernels.stream
                                                                   : kernels.rows;
      if (params.schedule.ctas > 0 && !cuda::can_have<Params>(chosen, device)) {
        steps_.clear();
        return false;
      }
      add(chosen, params, cluster_of(kernel), device);
    }
    return true;
  }

  void resolve(const DeviceTables& tables) {
    for (Step& step : steps_) tables.resolve(step.params.schedule.block_rows);
  }

  auto begin() const { return steps_.begin(); }
  auto end() const { return steps_.end(); }

 private:
  void add(const cuda::OpKernel& kernel, const Params& params, int cluster,
           const cuda::DeviceInfo& device) {
    if (params.schedule.ctas == 0) return;
    const bool ring = params.ring > 0;
    cuda::PlannedKernel<Params> planned(kernel, device, ring ? ring_bytes(params.ring) : 0);
    cuda::LaunchShape& shape = planned.shape;
    shape.cluster = static_cast<unsigned>(cluster);
    if (ring) {  // it walks over its units and the batch
      const std::int64_t units = std::int64_t{params.schedule.ctas} * params.batches;
      shape.grid[0] = static_cast<unsigned>(
          std::min<std::int64_t>(units, planned.clusters_on_device(device)) * cluster);
    } else {
      constexpr std::int64_t kMaxGridY = 65535;
      shape.grid = {params.schedule.ctas,
                    static_cast<unsigned>(std::min(params.batches, kMaxGridY)), 1};
    }
    // They write different rows, and the device code knows: smxx_teams.cuh, begin_rows().
    shape.programmatic = !steps_.empty() && device.major >= 9;
    steps_.push_back({planned, params});
  }

  std::vector<Step> steps_;
};

}  // namespace pullback::block_softmax
