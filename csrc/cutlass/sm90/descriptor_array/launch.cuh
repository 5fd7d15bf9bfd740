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

// P x Q tile, stages, cluster, chunks of D. Five stages and three chunks beat four and six by up to 9 %; but D that a
// warp loads needs chunks on their way in and out.
template <class Element, class Out, bool BColumnMajor, bool Accumulates = false>
using Rows192x128 = Config<Element, Out, false, BColumnMajor, 128, 192, 5, 2, 3, Accumulates>;
template <class Element, class Out, bool BColumnMajor>
using Rows128x64 = Config<Element, Out, false, BColumnMajor, 64, 128, 8, 1, 2>;
template <class Element, class Out, bool BColumnMajor>
using Rows128x128 = Config<Element, Out, false, BColumnMajor, 128, 128, 6, 1, 2>;
template <class Element, class Out, bool Accumulates = false>
using Tokens128x192 = Config<Element, Out, true, false, 128, 192, 5, kTokensCluster, 3, Accumulates>;
template <class Element>
using TokensAdd128x192 = Config<Element, float, true, false, 128, 192, 4, kTokensCluster, 8, true>;

template <class Element, bool BColumnMajor, gmm_epilogue Epilogue>
using RowsSwiglu = Config<Element, Element, false, BColumnMajor, 128, 192, 5, 2, 3, false, Epilogue>;

template <gmm_dtype Dtype>
using ElementOf = std::conditional_t<Dtype == GMM_BF16, cutlass::bfloat16_t, cutlass::half_t>;

// Which exist, heuristics.h says.
template <class Element, class Out, class Params>
void launch_kernel(const Kernel &kernel, bool b_column_major, const Params &params, int sm_count, cudaStream_t stream) {
  constexpr bool kSmallParams = std::is_same_v<Params, SmallParams>, kFp32 = std::is_same_v<Out, float>;
  if (&kernel == &k128x192) {
    if (!params.accumulate) return launch_config<Tokens128x192<Element, Out>>(params, sm_count, stream);
    if constexpr (kFp32)
      return launch_config<TokensAdd128x192<Element>>(params, sm_count, stream);
    else if constexpr (kSmallParams)
      return launch_config<Tokens128x192<Element, Out, true>>(params, sm_count, stream);
  } else if constexpr (kSmallParams || !kFp32) {
    if (&kernel == &k192x128) {
      if (kFp32 || !params.accumulate)
        return b_column_major ? launch_config<Rows192x128<Element, Out, true>>(params, sm_count, stream)
                              : launch_config<Rows192x128<Element, Out, false>>(params, sm_count, stream);
      if constexpr (kSmallParams && !kFp32)
        return b_column_major ? launch_config<Rows192x128<Element, Out, true, true>>(params, sm_count, stream)
                              : launch_config<Rows192x128<Element, Out, false, true>>(params, sm_count, stream);
    } else if (&kernel == &k128x128 && (kFp32 || !params.accumulate)) {
      return b_column_major ? launch_config<Rows128x128<Element, Out, true>>(params, sm_count, stream)
                            : launch_config<Rows128x128<Element, Out, false>>(params, sm_count, stream);
    } else if (kFp32 || !params.accumulate) {
      return b_column_major ? launch_config<Rows128x64<Element, Out, true>>(params, sm_count, stream)
                            : launch_config<Rows128x64<Element, Out, false>>(params, sm_count, stream);
    }
  }
  throw Error(GMM_ERROR_INTERNAL, format("no kernel %s for this call", kernel.name));
}

template <gmm_dtype Dtype>
void launch_swiglu(const Kernel &kernel, bool b_column_major, const SmallParams &params, int sm_count,
                   cudaStream_t stream) {
  using Element = ElementOf<Dtype>;
  if (&kernel == &kSwiglu)
    return b_column_major ? launch_config<RowsSwiglu<Element, true, GMM_EPILOGUE_SWIGLU>>(params, sm_count, stream)
                          : launch_config<RowsSwiglu<Element, false, GMM_EPILOGUE_SWIGLU>>(params, sm_count, stream);
  return b_column_major
             ? launch_config<RowsSwiglu<Element, true, GMM_EPILOGUE_SWIGLU_BACKWARD>>(params, sm_count, stream)
             : launch_config<RowsSwiglu<Element, false, GMM_EPILOGUE_SWIGLU_BACKWARD>>(params, sm_count, stream);
}

template <gmm_dtype Dtype, class Params>
void launch(const Kernel &kernel, bool b_column_major, bool d_fp32, const Params &params, int sm_count,
            cudaStream_t stream) {
  using Element = ElementOf<Dtype>;
  if (d_fp32)
    launch_kernel<Element, float>(kernel, b_column_major, params, sm_count, stream);
  else
    launch_kernel<Element, Element>(kernel, b_column_major, params, sm_count, stream);
}

}  // namespace gmm::sm90::descriptor_array
