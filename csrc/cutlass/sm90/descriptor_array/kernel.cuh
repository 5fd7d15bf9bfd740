// The descriptor-array kernel: D = A @ B for the groups of a call, persistent, warp-specialised, pingpong. A CTA is
//   warps 0, 2            producers: TMA loads of P and of Q into a ring of stages (load.cuh)
//   warp 1                scheduler: finds the next tile and hands it to the others (schedule.cuh)
//   warp 3                runs the scheduler's way to the first tile ahead of it, as code that runs once costs most in
//                         being fetched (0.7 us of a call, H200); then loads D, where it is added to in registers, or
//                         writes zeros where no product is (zeros.cuh)
//   warpgroups 1 and 2    take turns; one multiplies (multiply.cuh) while the other stores its tile (store.cuh)
// Two CTAs of a cluster take neighbouring tiles of P and share Q by multicast.
#pragma once

#include "cutlass/sm90/descriptor_array/multiply.cuh"
#include "cutlass/sm90/descriptor_array/schedule.cuh"
#include "cutlass/sm90/descriptor_array/zeros.cuh"

namespace gmm::sm90::descriptor_array {

template <class C, class Params>
CUTLASS_DEVICE void schedule(const Params &params, SharedStorage<C> &shared, int rank, bool rehearses) {
  if (params.ragged.offs) {
    if (!rehearses) cutlass::arch::wait_on_dependent_grids();  // an earlier kernel may have written the offsets
    RaggedFinder<C, Params> finder(params, rehearses);
    schedule(params, shared, rank, finder, rehearses);
  } else {
    ListFinder<C, Params> finder(params);
    schedule(params, shared, rank, finder, rehearses);
  }
}

template <class C, class Params>
__global__ void __launch_bounds__(C::kThreads, 1) kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage<C> &shared = *reinterpret_cast<SharedStorage<C> *>(memory);
  const int warp = cutlass::canonical_warp_idx_sync(), warpgroup = warp / 4;
  const int rank = C::Cluster > 1 ? block_rank_in_cluster() : 0;
  if (threadIdx.x == 32) prefetch_maps(params, 0);  // on their way while the barriers are set up
  if (threadIdx.x == 0) shared.init_barriers();
  cluster_arrive_relaxed();
  if (warp != 1 && warp != 3) cluster_wait();

  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<C::kFewRegisters>();
    if (warp == 1 || warp == 3) schedule(params, shared, rank, warp == 3);
    if (threadIdx.x == 0) produce<C, true>(params, shared, rank);
    if (threadIdx.x == 64) produce<C, false>(params, shared, rank);
    if constexpr (C::kLoadsD) {
      if (threadIdx.x == 96) load_d(params, shared);
    } else {
      if (warp == 3) write_zeros<C>(params);
    }
  }
  // Not `else`: the compiler would put the consumers' code first, which is up to 90 KB long. Behind it, the way to the
  // first tile took 8.7 us, before it 3.5 (H200, rows).
  if (opaque(warpgroup) != 0) {
    cutlass::arch::warpgroup_reg_alloc<C::kManyRegisters>();
    consume(params, shared, warpgroup - 1);
  }
  if constexpr (C::Cluster > 1) {  // a CTA may not leave while its neighbour still multicasts into it
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace gmm::sm90::descriptor_array
