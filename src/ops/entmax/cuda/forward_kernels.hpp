// The forward kernels: what there is, by the way a row is worked on, and how each is called.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <vector>

#include "cuda/op_kernel.hpp"
#include "ops/entmax/cuda/forward_params.cuh"
#include "ops/entmax/cuda/tuning.hpp"

namespace pullback::entmax {

using cuda::OpKernel;

inline std::string_view name_of(Family family) {
  switch (family) {
    case Family::softmax:
      return "softmax";
    case Family::near_one:
      return "near_one";
    case Family::entmax15:
      return "entmax15";
    case Family::general:
      return "general";
    case Family::sparsemax:
      return "sparsemax";
    case Family::steep:
      return "steep";
    default:
      return "invalid";
  }
}

inline constexpr Family kFamilies[] = {Family::softmax, Family::near_one,  Family::entmax15,
                                       Family::general, Family::sparsemax, Family::steep};

// Where rows begin: at whole vectors, and are whole ones, or anywhere, with some elements beside
// the vectors (smxx_edge.cuh).
enum class Begin { aligned, anywhere };

constexpr std::string_view suffix_of(Begin begin) {
  return begin == Begin::anywhere ? "_edges" : "";
}
constexpr std::string_view argument_of(Begin begin) {
  return begin == Begin::anywhere ? ", true" : "";
}

// --- smxx_forward_any.cuh ---

inline OpKernel any_kernel(DType dtype, Family family, int warps) {
  const auto type = cuda::device_type(dtype);
  const bool each = family == Family::invalid;
  return {.name = fmt::format("entmax_forward_any_{}_{}_{}", type,
                              each ? "alpha_per_row" : name_of(family), warps),
          .file = "ops/entmax/cuda/smxx_forward_any.cuh",
          .function = fmt::format("entmax::forward_any<{}, entmax::Family::{}, {}>", type,
                                  name_of(family), warps),
          .parameters = "entmax::ForwardParams",
          .threads = 32 * kAnyWarps,
          .constants = {{"entmax::kAnyWarps", kAnyWarps}}};
}

// Rows of more elements are worth a block each.
inline constexpr std::int64_t kWarpLength = 1024;

// --- smxx_forward_lanes.cuh ---

struct Lanes {
  int lanes, vectors;  // of a row; of a lane

  std::int64_t capacity(DType dtype) const {
    return lanes * vectors * 16 / static_cast<std::int64_t>(size_of(dtype));
  }
  int rows() const { return kLanesWarps * 32 / lanes; }  // of a block
};
inline constexpr Lanes kLanes[] = {{8, 1}, {8, 4}, {16, 4}};

inline OpKernel lanes_kernel(DType dtype, Family family, const Lanes& shape) {
  const auto type = cuda::device_type(dtype);
  // What takes more registers.
  const bool powers = family == Family::general || family == Family::near_one;
  const bool wide =
      (powers && dtype != DType::f32) || (family == Family::sparsemax && dtype == DType::f16);
  return {.name = fmt::format("entmax_forward_lanes_{}_{}_{}_{}", type, name_of(family),
                              shape.lanes, shape.vectors),
          .file = "ops/entmax/cuda/smxx_forward_lanes.cuh",
          .function = fmt::format("entmax::forward_lanes<{}, entmax::Family::{}, {}, {}>", type,
                                  name_of(family), shape.lanes, shape.vectors),
          .parameters = "entmax::ForwardParams",
          .threads = 32 * kLanesWarps,
          .blocks = shape.vectors == 1 ? 10
                    : wide             ? 7
                                       : 8,
          .fewer_blocks_on = {100, 120},
          .constants = {{"entmax::kLanesWarps", kLanesWarps}}};
}

// --- smxx_forward_registers.cuh ---

struct Registers {
  int warps, elements;  // of a row; of a lane
  int blocks[2];        // that a multiprocessor holds at least: of f32, of the 16-bit types

  std::int64_t capacity() const { return std::int64_t{32} * warps * elements; }
  int threads() const { return 32 * (warps == 1 ? kSingleWarps : warps); }
};
inline constexpr Registers kRegisters[] = {
    {1, 16, {5, 5}}, {1, 32, {3, 3}}, {4, 16, {9, 9}}, {4, 32, {6, 6}}, {8, 32, {3, 3}}};

// Shorter rows that lie as vectors are for kernels of smxx_forward_lanes.cuh.
inline bool has_registers(const Registers& shape, DType dtype, Begin begin) {
  return begin == Begin::anywhere || shape.capacity() > std::end(kLanes)[-1].capacity(dtype);
}

inline OpKernel registers_kernel(DType dtype, Family family, const Registers& shape, Begin begin) {
  const auto type = cuda::device_type(dtype);
  const auto vectors = shape.elements * static_cast<int>(size_of(dtype)) / 16;
  // What needs fewer registers than the rest.
  const bool slim =
      family == Family::sparsemax || (family == Family::softmax && dtype != DType::f32);
  const int fewer = !slim && shape.warps == 1 && shape.elements < 32 ? 1 : 0;
  // Warps hide what the special functions take; here one block more costs no spills.
  const int more = family == Family::general && shape.warps == 4 && shape.elements == 32 ? 1 : 0;
  return {.name = fmt::format("entmax_forward_registers_{}_{}_{}_{}{}", type, name_of(family),
                              shape.warps, vectors, suffix_of(begin)),
          .file = "ops/entmax/cuda/smxx_forward_registers.cuh",
          .function = fmt::format("entmax::forward_registers<{}, entmax::Family::{}, {}, {}{}>",
                                  type, name_of(family), shape.warps, vectors, argument_of(begin)),
          .parameters = "entmax::ForwardParams",
          .threads = shape.threads(),
          .blocks = shape.blocks[dtype == DType::f32 ? 0 : 1] - fewer + more,
          .fewer_blocks_on = more == 0             ? std::vector<int>{}
                             : dtype == DType::f32 ? std::vector{80, 86, 89, 100, 120}
                                                   : std::vector{100, 120}};
}

// --- smxx_forward_resident.cuh ---

struct Resident {
  int warps;  // of a block
  bool clustered;

  int threads() const { return 32 * warps; }
  int blocks() const { return 16 / warps; }  // of a multiprocessor
  constexpr bool large_cluster() const { return clustered && warps > 8; }
  int row_bytes() const { return threads() * kResidentVectors * 16; }  // of a block
};
inline constexpr Resident kResident[] = {{8, false}, {16, false}, {8, true}, {16, true}};
// Of rows longer than a small cluster's registers the alphas above this one are for
// smxx_forward_stream.cuh.
inline constexpr double kFewSurvive = 1.4;
// Where few elements of a long row survive a first look, smxx_forward_stream.cuh is as fast as a
// cluster, whose blocks wait for each other in every step.
constexpr bool serves(const Resident& shape, Family family, DType dtype) {
  if (shape.large_cluster() && dtype != DType::f32) return false;  // timed in f32
  return !shape.clustered || family == Family::softmax ||
         collects(family, static_cast<int>(size_of(dtype)), true) ||
         (family == Family::entmax15 && dtype != DType::f32);
}

// Dynamic shared memory of forward_resident: the next row, and lists or counts that leave room for
// the blocks that the registers allow; 0 if a block may have too little.
inline int resident_shared(const Resident& shape, Family family, DType dtype,
                           int max_shared_bytes) {
  const bool has_list = collects(family, static_cast<int>(size_of(dtype)), shape.clustered);
  const int statics = shape.clustered ? 2816 * shape.warps : 5376;  // at most
  constexpr int kReserved = 1024;                                   // of every block
  constexpr int kListBytes = 160;  // of a thread at most, or of counts
  for (const int blocks : {shape.blocks(), 1}) {
    const int room = (max_shared_bytes + kReserved) / blocks - kReserved - statics;
    const int left = room - shape.row_bytes();
    if (left < 0) continue;
    const int list = std::min(left / shape.threads() / 16 * 16, kListBytes);
    return shape.row_bytes() + (has_list ? list * shape.threads() : 0);
  }
  return 0;
}
// What every device has that runs the code of an architecture.
constexpr int max_shared_bytes(int arch) {
  if (arch / 10 == 9 || arch / 10 == 10) return 227 << 10;
  return arch == 86 || arch == 89 || arch / 10 == 12 ? 99 << 10 : 163 << 10;
}

inline OpKernel resident_kernel(DType dtype, Family family, const Resident& shape, Begin begin) {
  const auto type = cuda::device_type(dtype);
  return {
      .name = fmt::format("entmax_forward_resident_{}_{}_{}{}{}", type, name_of(family),
                          shape.warps, shape.clustered ? "_cluster" : "", suffix_of(begin)),
      .file = "ops/entmax/cuda/smxx_forward_resident.cuh",
      .function = fmt::format("entmax::forward_resident<{}, entmax::Family::{}, {}, {}{}>", type,
                              name_of(family), shape.warps, shape.clustered, argument_of(begin)),
      .parameters = "entmax::ForwardParams",
      .threads = shape.threads(),
      .blocks = shape.blocks(),
      .constants = {{"entmax::kResidentVectors", kResidentVectors},
                    {"entmax::kMaxBlocks", kMaxBlocks}}};
}

// --- smxx_forward_stream.cuh ---

// Warps that work on a row, in blocks of their own; single warps share blocks.
inline constexpr int kStreamGroups[] = {1, 2, 4, 8};
constexpr int stream_block(int warps) { return warps == 1 ? kStreamWarps : warps; }
constexpr int stream_shared(int warps) { return stream_block(warps) * kSurvivors * 32 * 8; }
// Of a multiprocessor, by registers and shared memory.
inline constexpr int kStreamResidentWarps = 16;

// All rows take the same time: what counts is how full the last wave of warps is. A row is worth
// more warps than one only where that gains something.
inline int stream_group(std::int64_t rows, int multiprocessors) {
  int best = 1;
  double most = 0;
  for (const int warps : kStreamGroups) {
    const double waves = static_cast<double>(rows) * warps /
                         (static_cast<double>(kStreamResidentWarps) * multiprocessors);
    const double full = waves / std::ceil(waves) * (1 - 0.02 * (warps - 1));
    if (full > most) {
      most = full;
      best = warps;
    }
  }
  return best;
}

inline OpKernel stream_kernel(DType dtype, Family family, int warps, Begin begin) {
  const auto type = cuda::device_type(dtype);
  const bool spills = (family == Family::general && stream_block(warps) == kStreamWarps) ||
                      (family == Family::near_one && dtype == DType::f32 && warps == 1);
  const bool tight =
      begin == Begin::anywhere && family == Family::near_one && dtype == DType::f32 && warps > 1;
  // Registers are dealt out to four warps at a time: it takes two blocks of two warps to have more.
  const bool small = tight && warps == 2;
  return {
      .name = fmt::format("entmax_forward_stream_{}_{}_{}{}", type, name_of(family), warps,
                          suffix_of(begin)),
      .file = "ops/entmax/cuda/smxx_forward_stream.cuh",
      .function = fmt::format("entmax::forward_stream<{}, entmax::Family::{}, {}{}>", type,
                              name_of(family), warps, argument_of(begin)),
      .parameters = "entmax::ForwardParams",
      .threads = 32 * stream_block(warps),
      .blocks = kStreamResidentWarps / stream_block(warps) - (spills || small ? 1 : 0),
      .fewer_blocks_on = tight ? std::vector{80} : std::vector<int>{},
      .constants = {{"entmax::kSurvivors", kSurvivors}, {"entmax::kStreamWarps", kStreamWarps}}};
}

inline OpKernel softmax_kernel(DType dtype, Begin begin) {
  const auto type = cuda::device_type(dtype);
  return {.name = fmt::format("entmax_forward_softmax_{}{}", type, suffix_of(begin)),
          .file = "ops/entmax/cuda/smxx_forward_softmax.cuh",
          .function = fmt::format("entmax::forward_softmax<{}{}>", type, argument_of(begin)),
          .parameters = "entmax::ForwardParams",
          .threads = 32 * kSoftmaxWarps,
          .blocks = 4,
          .constants = {{"entmax::kSoftmaxWarps", kSoftmaxWarps}}};
}

}  // namespace pullback::entmax
