// What the library knows of a device, asked once and kept.
#pragma once

#include "gmm/gmm.h"

namespace gmm {

struct Device {
  int sm;        // compute capability, major * 10 + minor
  int sm_count;  // multiprocessors
  bool what_if;  // not a device of this machine: plan as if every backend were built
};

// Properties of CUDA device `ordinal`. Throws GMM_ERROR_CUDA without a driver or such a device, and
// GMM_ERROR_UNSUPPORTED in a build without CUDA.
const Device &device_properties(int ordinal);

// The device that a caller of gmm_plan() describes.
Device what_if_device(const gmm_device &device);

// Makes `ordinal` the current device until the end of the scope, with its context current for driver calls, which in a
// new thread it is not.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard &) = delete;
  DeviceGuard &operator=(const DeviceGuard &) = delete;

 private:
  int previous_;
};

}  // namespace gmm
