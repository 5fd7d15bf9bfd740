// CUTLASS's SM90 grouped GEMM ("pointer array": shapes, pointers and strides in device memory; every CTA rewrites its
// tensor maps where it enters a new group).
#pragma once

#include <array>
#include <mutex>

#include "core/error.h"
#include "cutlass/arch/grid_dependency_control.h"
#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/sm90/pointer_array/gemm.h"
#include "cutlass/sm90/pointer_array/heuristics.h"

namespace gmm::sm90::pointer_array {

template <gmm_dtype kDtype>
using ElementOf = std::conditional_t<kDtype == GMM_BF16, cutlass::bfloat16_t,
                                     std::conditional_t<kDtype == GMM_FP16, cutlass::half_t, float>>;

template <bool kColumnMajor>
using LayoutOf = std::conditional_t<kColumnMajor, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;

using ProblemShape = cutlass::gemm::GroupProblemShape<cute::Shape<int32_t, int32_t, int32_t>>;

template <int kTileM, int kTileN, int kTileK, int kClusterM, int kClusterN, bool kPingpong, class Element,
          class ElementD, class LayoutA, class LayoutB>
struct Config {
  using TileShape = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<kTileK>>;
  using ClusterShape = cute::Shape<cute::Int<kClusterM>, cute::Int<kClusterN>, cute::_1>;
  using MainloopSchedule = std::conditional_t<kPingpong, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong,
                                              cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>;
  using EpilogueSchedule = std::conditional_t<kPingpong, cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong,
                                              cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative>;
  static constexpr int kAlignment = 16 / sizeof(Element);  // TMA: pointers and strides are multiples of 16 bytes
  static constexpr int kAlignmentD = 16 / sizeof(ElementD);

  // C has D's type, so that one kernel serves all: D itself (accumulate), a bias (row stride 0), or not read (beta 0).
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float,  //
      ElementD, cutlass::layout::RowMajor *, kAlignmentD,             // C
      ElementD, cutlass::layout::RowMajor *, kAlignmentD,             // D
      EpilogueSchedule, cutlass::epilogue::fusion::LinearCombination<ElementD, float>>::CollectiveOp;

  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,  //
      Element, LayoutA *, kAlignment, Element, LayoutB *, kAlignment, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>,
      MainloopSchedule>::CollectiveOp;
};

// CUTLASS's kernel, started before the set-up kernel ends. Its first statements read problem shapes, so the wait is the
// very first; what overlaps is the launch itself.
template <class Mainloop, class Epilogue>
struct GroupedGemm : cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue> {
  using Base = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue>;

  CUTLASS_DEVICE void operator()(const typename Base::Params &params, char *shared_memory) {
    cutlass::arch::wait_on_dependent_grids();
    Base::operator()(params, shared_memory);
  }
};

// The tensor maps among the parameters are patterns: address, extents and strides in them are replaced on the device
// for each group. They are encoded once, as four encodings with their look-up of the driver's entry cost microseconds a
// call.
template <class Op>
const typename Op::Params &parameter_pattern() {
  static const typename Op::Params pattern = [] {
    typename Op::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    arguments.hw_info.sm_count = 1;  // else the device is asked
    // Any aligned address will do; drivers before 12.6 refuse to encode nullptr.
    const auto some_address = [](auto &pointer) { pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(256); };
    some_address(arguments.mainloop.ptr_A);
    some_address(arguments.mainloop.ptr_B);
    some_address(arguments.epilogue.ptr_C);
    some_address(arguments.epilogue.ptr_D);
    return Op::to_underlying_arguments(arguments, nullptr);
  }();
  return pattern;
}

template <class Op>
typename Op::Params make_params(const Gemm &gemm) {
  const Workspace &w = gemm.workspace;
  typename Op::Params params = parameter_pattern<Op>();

  static_assert(sizeof(Workspace::Shape) == sizeof(ProblemShape::UnderlyingProblemShape));
  params.problem_shape.num_groups = gemm.products;
  params.problem_shape.problem_shapes = reinterpret_cast<ProblemShape::UnderlyingProblemShape *>(w.shape);
  params.hw_info = cutlass::KernelHardwareInfo{gemm.device, gemm.sm_count};

  // A stride type of CuTe stores its one dynamic member only: an array of them is an array of leading dimensions.
  auto &mainloop = params.mainloop;
  static_assert(sizeof(*mainloop.dA) == sizeof(*w.ld_a) && sizeof(*mainloop.dB) == sizeof(*w.ld_b));
  mainloop.ptr_A = reinterpret_cast<decltype(mainloop.ptr_A)>(w.a);
  mainloop.ptr_B = reinterpret_cast<decltype(mainloop.ptr_B)>(w.b);
  mainloop.dA = reinterpret_cast<decltype(mainloop.dA)>(w.ld_a);
  mainloop.dB = reinterpret_cast<decltype(mainloop.dB)>(w.ld_b);

  auto &epilogue = params.epilogue;
  static_assert(sizeof(*epilogue.dC) == sizeof(*w.ld_c) && sizeof(*epilogue.dD) == sizeof(*w.ld_d));
  typename Op::CollectiveEpilogue::FusionCallbacks::Arguments alpha_beta{};
  alpha_beta.beta = gemm.add_c ? 1.0f : 0.0f;  // 0: the load warp of the epilogue never starts
  epilogue.thread =
      Op::CollectiveEpilogue::FusionCallbacks::to_underlying_arguments(params.problem_shape, alpha_beta, nullptr);
  epilogue.ptr_C = reinterpret_cast<decltype(epilogue.ptr_C)>(w.c);
  epilogue.ptr_D = reinterpret_cast<decltype(epilogue.ptr_D)>(w.d);
  epilogue.dC = reinterpret_cast<decltype(epilogue.dC)>(w.ld_c);
  epilogue.dD = reinterpret_cast<decltype(epilogue.dD)>(w.ld_d);

  typename Op::Arguments sizes{};
  const size_t epilogue_bytes =
      Op::CollectiveEpilogue::get_workspace_size(params.problem_shape, sizes.epilogue, gemm.sm_count);
  const size_t mainloop_bytes =
      Op::CollectiveMainloop::get_workspace_size(params.problem_shape, sizes.mainloop, gemm.sm_count);
  if (epilogue_bytes + mainloop_bytes > gemm.sm_count * kTensorMapBytesPerSm)
    throw Error(GMM_ERROR_INTERNAL, format("CUTLASS needs %zu bytes for tensor maps, reserved are %zu",
                                           epilogue_bytes + mainloop_bytes, gemm.sm_count * kTensorMapBytesPerSm));
  epilogue.tensormaps = reinterpret_cast<cute::TmaDescriptor *>(w.tensor_maps);
  mainloop.tensormaps = w.tensor_maps + epilogue_bytes;

  using Scheduler = typename Op::TileScheduler;
  typename Scheduler::Arguments order{};
  order.raster_order =
      gemm.raster_along_m ? Scheduler::RasterOrderOptions::AlongM : Scheduler::RasterOrderOptions::AlongN;
  params.scheduler = Scheduler::to_underlying_arguments(params.problem_shape, typename Op::TileShape{},
                                                        typename Op::ClusterShape{}, params.hw_info, order);
  return params;
}

// More than 48 KB of shared memory must be asked for, once a kernel and device.
template <class Op>
void allow_shared_memory(int device) {
  constexpr int kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> once;
  GMM_CHECK(device >= 0 && device < kMaxDevices, "device: expected 0 <= ordinal < %d, got %d", kMaxDevices, device);
  std::call_once(once[device], [] {
    GMM_CUDA_CHECK(cudaFuncSetAttribute(cutlass::device_kernel<Op>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        Op::SharedStorageSize));
  });
}

template <class Config>
void launch(const Gemm &gemm, cudaStream_t stream) {
  using Op = GroupedGemm<typename Config::Mainloop, typename Config::Epilogue>;
  using Cluster = typename Config::ClusterShape;
  allow_shared_memory<Op>(gemm.device);
  typename Op::Params params = make_params<Op>(gemm);

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {cute::size<0>(Cluster{}), cute::size<1>(Cluster{}), 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;

  cudaLaunchConfig_t config{};
  config.gridDim = Op::get_grid_shape(params);
  config.blockDim = Op::get_block_shape();
  config.dynamicSmemBytes = Op::SharedStorageSize;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  GMM_CUDA_CHECK(cudaLaunchKernelEx(&config, cutlass::device_kernel<Op>, params));
}

template <const Kernel &kKernel, gmm_dtype kDtype, gmm_dtype kDtypeD, bool kAColumnMajor, bool kBColumnMajor>
using ConfigOf =
    Config<kKernel.tile_m, kKernel.tile_n, kKernel.tile_k, kKernel.cluster_m, kKernel.cluster_n, kKernel.pingpong,
           ElementOf<kDtype>, ElementOf<kDtypeD>, LayoutOf<kAColumnMajor>, LayoutOf<kBColumnMajor>>;

template <const Kernel &kKernel, gmm_dtype kDtype, gmm_dtype kDtypeD>
void launch_layouts(const Gemm &gemm, cudaStream_t stream) {
  if (gemm.a_column_major) {
    if (gemm.b_column_major) return launch<ConfigOf<kKernel, kDtype, kDtypeD, true, true>>(gemm, stream);
    return launch<ConfigOf<kKernel, kDtype, kDtypeD, true, false>>(gemm, stream);
  }
  if (gemm.b_column_major) return launch<ConfigOf<kKernel, kDtype, kDtypeD, false, true>>(gemm, stream);
  return launch<ConfigOf<kKernel, kDtype, kDtypeD, false, false>>(gemm, stream);
}

template <const Kernel &kKernel, gmm_dtype kDtype>
void launch_gemm(const Gemm &gemm, cudaStream_t stream) {
  if (gemm.d_dtype == GMM_FP32) return launch_layouts<kKernel, kDtype, GMM_FP32>(gemm, stream);
  return launch_layouts<kKernel, kDtype, kDtype>(gemm, stream);
}

}  // namespace gmm::sm90::pointer_array
