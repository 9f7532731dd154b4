// The part of the CUDA driver API that Pullback uses, declared here so that building needs no
// toolkit. Names, values and layouts are those of cuda.h; the driver keeps them stable.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/tensor_map.cuh"

namespace pullback::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = std::uint64_t;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;
using CUgraph = struct CUgraph_st*;
using CUgraphExec = struct CUgraphExec_st*;

inline constexpr CUresult kSuccess = 0;

enum DeviceAttribute : int {
  kMaxSharedMemoryPerBlockOptin = 97,
  kMultiprocessorCount = 16,
  kL2CacheSize = 38,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMemoryPoolsSupported = 115,
};

enum FunctionAttribute : int {
  kNumRegisters = 4,
  kLocalSizeBytes = 3,
  kMaxDynamicSharedSizeBytes = 8,
  kPreferredSharedMemoryCarveout = 9,
  kNonPortableClusterSizeAllowed = 14,
};

// CUlaunchAttribute: an id, padding to 8 bytes, and a 64-byte union.
struct LaunchAttribute {
  enum Id : int { cluster_dimension = 4, programmatic_stream_serialization = 6 };
  Id id;
  char padding[4] = {};
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int programmatic_stream_serialization_allowed;
  } value = {};
};
static_assert(sizeof(LaunchAttribute) == 72);

// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  CUstream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

// name, first driver version (cuda.h's CUDA_VERSION) with this signature, parameters.
#define PULLBACK_DRIVER_FUNCTIONS(F)                                                            \
  F(cuInit, 2000, (unsigned flags))                                                             \
  F(cuDriverGetVersion, 2020, (int* version))                                                   \
  F(cuGetErrorName, 6000, (CUresult error, const char** text))                                  \
  F(cuGetErrorString, 6000, (CUresult error, const char** text))                                \
  F(cuDeviceGetCount, 2000, (int* count))                                                       \
  F(cuDeviceGet, 2000, (CUdevice * device, int ordinal))                                        \
  F(cuDeviceGetName, 2000, (char* name, int length, CUdevice device))                           \
  F(cuDeviceGetAttribute, 2000, (int* value, int attribute, CUdevice device))                   \
  F(cuDeviceTotalMem, 3020, (std::size_t * bytes, CUdevice device))                             \
  F(cuDevicePrimaryCtxRetain, 7000, (CUcontext * context, CUdevice device))                     \
  F(cuDevicePrimaryCtxRelease, 11000, (CUdevice device))                                        \
  F(cuCtxGetCurrent, 4000, (CUcontext * context))                                               \
  F(cuCtxGetDevice, 2000, (CUdevice * device))                                                  \
  F(cuCtxPushCurrent, 4000, (CUcontext context))                                                \
  F(cuCtxPopCurrent, 4000, (CUcontext * context))                                               \
  F(cuCtxSynchronize, 2000, ())                                                                 \
  F(cuLibraryLoadData, 12000,                                                                   \
    (CUlibrary * library, const void* code, int* jit_options, void** jit_values,                \
     unsigned jit_count, int* library_options, void** library_values, unsigned library_count))  \
  F(cuLibraryUnload, 12000, (CUlibrary library))                                                \
  F(cuLibraryGetKernel, 12000, (CUkernel * kernel, CUlibrary library, const char* name))        \
  F(cuKernelGetFunction, 12000, (CUfunction * function, CUkernel kernel))                       \
  F(cuKernelGetAttribute, 12000, (int* value, int attribute, CUkernel kernel, CUdevice device)) \
  F(cuKernelSetAttribute, 12000, (int attribute, int value, CUkernel kernel, CUdevice device))  \
  F(cuLaunchKernelEx, 11060,                                                                    \
    (const LaunchConfig* config, CUfunction function, void** parameters, void** extra))         \
  F(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050,                                          \
    (int* blocks, CUfunction function, int block_size, std::size_t shared_bytes))               \
  F(cuOccupancyMaxActiveClusters, 11080,                                                        \
    (int* clusters, CUfunction function, const LaunchConfig* config))                           \
  F(cuMemAlloc, 3020, (CUdeviceptr * memory, std::size_t bytes))                                \
  F(cuMemFree, 3020, (CUdeviceptr memory))                                                      \
  F(cuMemAllocAsync, 11020, (CUdeviceptr * memory, std::size_t bytes, CUstream stream))         \
  F(cuMemFreeAsync, 11020, (CUdeviceptr memory, CUstream stream))                               \
  F(cuMemcpyHtoDAsync, 3020,                                                                    \
    (CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream))                     \
  F(cuMemcpyDtoHAsync, 3020, (void* to, CUdeviceptr from, std::size_t bytes, CUstream stream))  \
  F(cuMemcpyDtoDAsync, 3020,                                                                    \
    (CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream))                     \
  F(cuMemsetD8Async, 3020,                                                                      \
    (CUdeviceptr memory, unsigned char value, std::size_t count, CUstream stream))              \
  F(cuStreamCreate, 2000, (CUstream * stream, unsigned flags))                                  \
  F(cuStreamDestroy, 4000, (CUstream stream))                                                   \
  F(cuStreamSynchronize, 2000, (CUstream stream))                                               \
  F(cuStreamBeginCapture, 10010, (CUstream stream, int mode))                                   \
  F(cuThreadExchangeStreamCaptureMode, 10010, (int* mode))                                      \
  F(cuStreamEndCapture, 10000, (CUstream stream, CUgraph * graph))                              \
  F(cuGraphInstantiateWithFlags, 11040,                                                         \
    (CUgraphExec * executable, CUgraph graph, unsigned long long flags))                        \
  F(cuGraphLaunch, 10000, (CUgraphExec executable, CUstream stream))                            \
  F(cuGraphExecDestroy, 10000, (CUgraphExec executable))                                        \
  F(cuGraphDestroy, 10000, (CUgraph graph))                                                     \
  F(cuEventCreate, 2000, (CUevent * event, unsigned flags))                                     \
  F(cuEventDestroy, 4000, (CUevent event))                                                      \
  F(cuEventRecord, 2000, (CUevent event, CUstream stream))                                      \
  F(cuEventSynchronize, 2000, (CUevent event))                                                  \
  F(cuEventElapsedTime, 2000, (float* milliseconds, CUevent start, CUevent end))                \
  F(cuTensorMapEncodeTiled, 12000,                                                              \
    (device::TensorMap * map, int dtype, std::uint32_t rank, void* address,                     \
     const std::uint64_t* sizes, const std::uint64_t* strides, const std::uint32_t* box,        \
     const std::uint32_t* element_strides, int interleave, int swizzle, int l2_promotion,       \
     int out_of_bounds_fill))

}  // namespace pullback::cuda
