// The CUDA driver, opened at run time, and the devices it shows.
#pragma once

#include <string>

#include "cuda/driver_api.hpp"

namespace pullback::cuda {

struct Driver {
#define PULLBACK_DECLARE(name, version, parameters) CUresult(*name) parameters = nullptr;
  PULLBACK_DRIVER_FUNCTIONS(PULLBACK_DECLARE)
#undef PULLBACK_DECLARE
  int version = 0;  // 13000 for CUDA 13.0
};

// Opened and initialised on first use. Throws Error(device) saying why there is none: no library,
// no device, too old, or a fork after initialisation.
const Driver& driver();

// Empty when driver() works; else the reason.
std::string driver_problem();

// Throws Error(device) naming the call and the driver's own words.
void check(CUresult result, const char* call);

struct DeviceInfo {
  int ordinal;
  CUdevice handle;
  std::string name;
  int major, minor;  // compute capability
  int multiprocessors;
  int l2_bytes;
  int max_shared_bytes;  // per block, opted in
  std::size_t memory_bytes;

  int arch() const { return major * 10 + minor; }  // 90 for sm_90
};

int device_count();
// Throws Error(invalid_argument) for an ordinal that does not exist.
const DeviceInfo& device_info(int ordinal);

// Makes the device's primary context current, unless a context of that device is current already,
// and restores what was current before.
class DeviceGuard {
 public:
  explicit DeviceGuard(const DeviceInfo& device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  bool pushed_ = false;
};

// While one lives, this thread may allocate, free and load although some stream is being captured
// into a graph, whose capture that would end otherwise. What it does has nothing to do with the
// captured work.
class CaptureGuard {
 public:
  CaptureGuard();
  ~CaptureGuard();
  CaptureGuard(const CaptureGuard&) = delete;
  CaptureGuard& operator=(const CaptureGuard&) = delete;

 private:
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED; then what the thread had
};

}  // namespace pullback::cuda
