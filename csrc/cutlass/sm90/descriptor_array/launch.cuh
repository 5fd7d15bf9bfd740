// From a kernel's name to its launch. Included by the instantiations only.
#pragma once

#include <mutex>

#include "core/error.h"
#include "cutlass/sm90/descriptor_array/kernel.cuh"

namespace gmm::sm90::descriptor_array {

template <class C, class Params>
void launch_config(const Params &params, int sm_count, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(SharedStorage<C>);
  static_assert(kSharedBytes <= 232448, "shared memory of an SM90 CTA");
  constexpr int kMaxDevices = 64;
  static std::once_flag once[kMaxDevices];  // the attribute belongs to the function on one device
  int device = 0;
  GMM_CUDA_CHECK(cudaGetDevice(&device));
  std::call_once(once[device], [] {
    GMM_CUDA_CHECK(cudaFuncSetAttribute(kernel<C, Params>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  });

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;  // our prologue overlaps the kernel before
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = C::Cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(sm_count / C::Cluster * C::Cluster);
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  GMM_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel<C, Params>, params));
}

template <class Element, bool BColumnMajor, class Params>
void launch_kernel(const Kernel &kernel, const Params &params, int sm_count, cudaStream_t stream) {
  // Tile rows x columns, stages, cluster, chunks of D. Five stages and three chunks beat four and six by up to 9 %.
  if (&kernel == &k192x128)
    launch_config<Config<Element, BColumnMajor, 192, 128, 5, 2, 3>>(params, sm_count, stream);
  else if (&kernel == &k128x64)
    launch_config<Config<Element, BColumnMajor, 128, 64, 8, 1, 2>>(params, sm_count, stream);
  else
    throw Error(GMM_ERROR_INTERNAL, format("no kernel named %s here", kernel.name));
}

template <gmm_dtype Dtype, class Params>
void launch(const Kernel &kernel, bool b_column_major, const Params &params, int sm_count, cudaStream_t stream) {
  using Element = std::conditional_t<Dtype == GMM_BF16, cutlass::bfloat16_t, cutlass::half_t>;
  if (b_column_major)
    launch_kernel<Element, true>(kernel, params, sm_count, stream);
  else
    launch_kernel<Element, false>(kernel, params, sm_count, stream);
}

}  // namespace gmm::sm90::descriptor_array
