// What the problem and the rows' layout say of the ways through backward.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>

#include "ops/entmax/cpu/family.hpp"
#include "ops/entmax/cuda/backward_kernels.hpp"
#include "ops/entmax/problem.hpp"

namespace pullback::entmax {

inline Weights weights_of(const EntmaxProblem& problem) {
  if (problem.alpha_per_row.given()) return Weights::power;
  switch (family_of(problem.alpha)) {
    case Family::softmax:
      return Weights::softmax;
    case Family::sparsemax:
      return Weights::sparsemax;
    case Family::entmax15:
      return Weights::entmax15;
    default:
      return Weights::power;
  }
}

class BackwardPaths {
 public:
  BackwardPaths(const EntmaxProblem& problem, const BackwardParams& params,
                const cuda::DeviceInfo& device)
      : problem_(problem), params_(params), device_(device) {}

  // Whose sums cancel: any_ alone takes care of that.
  bool is_steep() const { return !problem_.alpha_per_row.given() && problem_.alpha > 2; }

  // 16-byte pieces of a row begin at the same positions in all three tensors, as far as the steps
  // tell; enqueue() looks at the pointers.
  bool pieces_match(const RowTensor& tensor) const {
    const auto length = static_cast<std::int64_t>(16 / size_of(problem_.x.dtype));
    bool match = tensor.axis == 1;
    for (int dim = 0; dim < params_.rows.rank; ++dim) {
      match &= (tensor.outer[dim] - params_.d_x.outer[dim]) % length == 0;
    }
    return match;
  }

  bool rows_begin_on_16_bytes() const {
    const auto bytes = static_cast<std::int64_t>(size_of(problem_.x.dtype));
    bool all = true;
    for (int dim = 0; dim < rows().rank; ++dim) {
      all &= params_.d_x.outer[dim] * bytes % 16 == 0 && params_.d_y.outer[dim] * bytes % 16 == 0 &&
             params_.support.outer[dim] % 16 == 0;
    }
    return all;
  }

  bool rows_side_by_side() const {
    return rows().rank == 0 ||
           (rows().rank == 1 && params_.d_x.outer[0] == rows().length &&
            params_.d_y.outer[0] == rows().length && params_.support.outer[0] == rows().length / 8);
  }

  std::int64_t pieces() const {
    return rows().length * static_cast<std::int64_t>(size_of(problem_.x.dtype)) / 16;
  }
  bool has_clusters() const { return device_.major == 9 || device_.major == 10; }
  // Long rows, too few to fill the device.
  bool few_rows() const {
    return !problem_.offsets.given() && pieces() > kBlockPieces &&
           tasks() * (has_clusters() ? kMaxCluster : 1) < device_.multiprocessors;
  }
  // Whether a thread's pieces wait for memory alone.
  static bool waits_for_memory(Weights weights) {
    return weights == Weights::softmax || weights == Weights::sparsemax ||
           weights == Weights::entmax15;
  }
  // Blocks of a row.
  int cluster_of(Weights weights) const {
    if (!has_clusters() || problem_.offsets.given()) return 1;
    const std::int64_t fits = waits_for_memory(weights) ? kSlicePieces * cluster_threads(weights)
                                                        : 2 * kSlicePieces * kBlockThreads;
    int cluster = 1;
    while (cluster < kMaxCluster && pieces() > cluster * fits) cluster *= 2;
    return cluster;
  }
  // More blocks of fewer threads hide the waits better, while the row is on chip all the same.
  int cluster_threads(Weights weights) const {
    const bool small = pieces() > kSlicePieces * kBlockThreads &&
                       pieces() <= kSlicePieces * kMaxCluster * kBlockThreads / 2;
    return waits_for_memory(weights) && small ? kBlockThreads / 2 : kBlockThreads;
  }
  // The same where a cluster's registers are to hold the row; nothing where they do not.
  std::optional<cuda::LaunchShape> cluster_of_registers(Weights weights) const {
    const DType dtype = problem_.x.dtype;
    if (!serves_clusters_of_registers(dtype, weights) || !has_clusters() ||
        problem_.offsets.given()) {
      return std::nullopt;
    }
    for (int threads = 256; threads <= cluster_registers_threads(dtype); threads *= 2) {
      const std::int64_t of_block = kBlockVectors * threads;
      for (unsigned cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
        if (pieces() > cluster * of_block) continue;
        return cuda::LaunchShape{.block = static_cast<unsigned>(threads), .cluster = cluster};
      }
    }
    return std::nullopt;
  }
  Path best_path(Weights weights) const {
    if (pieces() <= 64) return Path::warp2;
    if (pieces() <= 128) return Path::warp4;
    if (pieces() <= kBlockPieces && !problem_.offsets.given()) return Path::block;
    if (cluster_of_registers(weights)) return Path::cluster_registers;
    if (few_rows()) return Path::chunks;
    return cluster_of(weights) > 1 ? Path::cluster : Path::whole;
  }

  // Of smxx_any_row.cuh: neighbouring threads go along the axis where it is the fastest
  // dimension. leaves_rows: rows that have kernels of their own are passed over, which warps do.
  Mapping mapping_of_any(bool wide, bool leaves_rows) const {
    if (!leaves_rows && (across_memory() || very_short(16))) return Mapping::across;
    if (wide) return average_length() <= kWarpLength ? Mapping::warp : Mapping::block;
    return very_short(128) ? Mapping::across : Mapping::block;
  }
  // Of ragged rows some may be long where most are short.
  Mapping mapping_of_d_alpha() const {
    if (across_memory()) return Mapping::across;
    if (!problem_.offsets.given()) {
      if (rows().length <= 16) return Mapping::thread;
      if (rows().length <= 256) return Mapping::lanes;
    }
    return average_length() <= 2 * kWarpLength ? Mapping::warp : Mapping::block;
  }

 private:
  // Of a thread, where a cluster can share the row: it then stays on chip between the first look
  // and the second, in shared memory, L1 and L2.
  static constexpr std::int64_t kSlicePieces = 8;

  static constexpr std::int64_t kWarpLength = 1024;

  const Rows& rows() const { return params_.rows; }
  bool across_memory() const {
    const std::int64_t next = rows().rank == 0 ? 0 : std::abs(params_.d_x.outer[rows().rank - 1]);
    return !problem_.offsets.given() && next > 0 && std::abs(params_.d_x.axis) > next;
  }
  bool very_short(std::int64_t length) const {
    return !problem_.offsets.given() && rows().length < length;
  }
  std::int64_t average_length() const {
    return rows().length / std::max<std::int64_t>(1, rows().groups);
  }
  std::int64_t tasks() const { return rows().count * rows().groups; }

  const EntmaxProblem& problem_;
  const BackwardParams& params_;
  const cuda::DeviceInfo& device_;
};

}  // namespace pullback::entmax
