#include "core/device.h"

#include "core/error.h"

#if GMM_WITH_CUDA
#include <cuda_runtime_api.h>

#include <array>
#include <mutex>
#endif

namespace gmm {

Device what_if_device(const gmm_device &device) {
  GMM_CHECK(device.sm >= 10 && device.sm < 10000, "device.sm: expected major * 10 + minor, for instance 90; got %d",
            device.sm);
  GMM_CHECK(device.sm_count >= 0, "device.sm_count: expected >= 0 (0: typical), got %d", device.sm_count);
  int sm_count = device.sm_count;
  if (sm_count == 0) {  // the largest data-centre or workstation part of each architecture
    switch (device.sm) {
      case 70:
        sm_count = 80;
        break;  // V100
      case 75:
        sm_count = 72;
        break;  // RTX 8000
      case 80:
        sm_count = 108;
        break;  // A100
      case 86:
        sm_count = 82;
        break;  // RTX 3090
      case 89:
        sm_count = 128;
        break;  // RTX 4090
      case 90:
        sm_count = 132;
        break;  // H100 SXM, H200
      case 100:
        sm_count = 148;
        break;  // B200
      case 120:
        sm_count = 170;
        break;  // RTX 5090
      default:
        sm_count = 132;
    }
  }
  return Device{device.sm, sm_count, true};
}

#if GMM_WITH_CUDA

const Device &device_properties(int ordinal) {
  constexpr int kMaxDevices = 64;
  static std::array<Device, kMaxDevices> devices;
  static std::array<std::once_flag, kMaxDevices> once;
  GMM_CHECK(ordinal >= 0 && ordinal < kMaxDevices, "device: expected 0 <= ordinal < %d, got %d", kMaxDevices, ordinal);
  std::call_once(once[ordinal], [&] {  // a throw leaves the flag unset: the next call asks again
    int major = 0, minor = 0, sm_count = 0;
    GMM_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal));
    GMM_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal));
    GMM_CUDA_CHECK(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, ordinal));
    devices[ordinal] = Device{major * 10 + minor, sm_count, false};
  });
  return devices[ordinal];
}

DeviceGuard::DeviceGuard(int ordinal) : previous_(ordinal) {
  GMM_CUDA_CHECK(cudaGetDevice(&previous_));
  GMM_CUDA_CHECK(cudaSetDevice(ordinal));
}

DeviceGuard::~DeviceGuard() { cudaSetDevice(previous_); }

#else

const Device &device_properties(int) {
  throw Error(GMM_ERROR_UNSUPPORTED,
              "this build of gmm has no CUDA backends (GMM_CUDA=0, or no nvcc when it was built)");
}

DeviceGuard::DeviceGuard(int ordinal) : previous_(ordinal) {}
DeviceGuard::~DeviceGuard() = default;

#endif

}  // namespace gmm
