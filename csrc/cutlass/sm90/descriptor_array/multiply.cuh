// The mainloop of a warpgroup: one tile, from the ring of stages into accumulators, and on to the epilogue.
#pragma once

#include "cutlass/sm90/descriptor_array/store.cuh"
#include "cutlass/sm90/descriptor_array/swiglu.cuh"
#include "cutlass/sm90/descriptor_array/wgmma.cuh"

namespace gmm::sm90::descriptor_array {

// Frees a stage for the producers of every CTA of the cluster: a multicast writes into all of them.
template <class C>
CUTLASS_DEVICE void release(SharedStorage<C> &shared, int stage) {
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (C::Cluster == 1) {
    if (lane == 0) shared.empty[stage].arrive();
  } else {
    shared.empty[stage].arrive(lane, lane < C::Cluster);
  }
}

// A tile of up to Q columns of Q.
template <class C, int Q, class Params>
CUTLASS_DEVICE void compute_tile(const Params &params, SharedStorage<C> &shared, const Tile &tile, int warpgroup,
                                 int pos) {
  // Shared-memory descriptors say where a block starts and how its lines follow, not how many there are: those of the
  // full tile serve every Q.
  auto mma = make_tiled_mma(typename C::Mma{}).get_slice(0);
  auto blocks_p = mma.make_fragment_A(mma.partition_A(make_tensor(make_smem_ptr(shared.p), typename C::LayoutP{})));
  auto blocks_q = mma.make_fragment_B(mma.partition_B(make_tensor(make_smem_ptr(shared.q), typename C::LayoutQ{})));
  float acc[C::kMmas][Q / 2];
  const auto fence_acc = [&]() __attribute__((always_inline)) {
    CUTE_UNROLL
    for (int i = 0; i < C::kMmas; ++i) {
      CUTE_UNROLL
      for (int v = 0; v < Q / 2; ++v) warpgroup_fence_operand(acc[i][v]);
    }
  };

  // Whether it is the tile's first block is known at compile time: a predicate would make the accumulators live before.
  const auto multiply = [&](auto first, auto steps, int stage) __attribute__((always_inline)) {
    constexpr bool kPMn = C::kMajorP == GMMA::Major::MN, kQMn = C::kMajorQ == GMMA::Major::MN;
    warpgroup_arrive();
    for_each(make_int_sequence<decltype(steps)::value>{}, [&](auto k) __attribute__((always_inline)) {
      CUTE_UNROLL
      for (int i = 0; i < C::kMmas; ++i)
        wgmma<typename C::Element, kPMn, kQMn, !(decltype(first)::value && k == 0), Q>(
            acc[i], uint64_t(blocks_p(_0{}, i, k, stage)), uint64_t(blocks_q(_0{}, _0{}, k, stage)));
    });
    warpgroup_commit_batch();
  };
  // With tokens in K a group's last block may be short, and is often the only one: no steps over zeros.
  const auto multiply_last = [&](auto first, int stage) __attribute__((always_inline)) {
    const int rest = (tile.k_end - tile.k - 1) % kBlockK;
    if (!C::kTokensInK || rest >= 48)
      multiply(first, _4{}, stage);
    else if (rest >= 32)
      multiply(first, _3{}, stage);
    else if (rest >= 16)
      multiply(first, _2{}, stage);
    else
      multiply(first, _1{}, stage);
  };

  int stage = tile.k_blocks_before % C::Stages, phase = tile.k_blocks_before / C::Stages & 1;
  const auto advance = [&]() __attribute__((always_inline)) {
    if (++stage == C::Stages) stage = 0, phase ^= 1;
  };
  const int blocks = tile.k_blocks();
  NamedBarrier::sync(256, kMmaTurn + warpgroup);
  fence_acc();
  shared.full[stage].wait(phase);
  if (C::kTokensInK && blocks == 1)
    multiply_last(true_type{}, stage);
  else
    multiply(true_type{}, _4{}, stage);
  int previous = stage;
  CUTE_NO_UNROLL
  for (int block = 1; block < blocks; ++block) {
    advance();
    shared.full[stage].wait(phase);
    if (C::kTokensInK && block == blocks - 1)
      multiply_last(false_type{}, stage);
    else
      multiply(false_type{}, _4{}, stage);
    warpgroup_wait<1>();  // the block before has been read
    release(shared, previous);
    previous = stage;
  }
  NamedBarrier::arrive(256, kMmaTurn + (warpgroup ^ 1));
  warpgroup_wait<0>();
  fence_acc();
  release(shared, previous);

  NamedBarrier::sync(256, kStoreTurn + warpgroup);
  if constexpr (C::kEpilogue == GMM_EPILOGUE_SWIGLU)
    store_swiglu<C, Q>(params, shared, tile, warpgroup, acc);
  else if constexpr (C::kEpilogue == GMM_EPILOGUE_SWIGLU_BACKWARD)
    store_swiglu_backward<C, Q>(params, shared, tile, warpgroup, acc);
  else
    store_tile<C, Q>(params, shared, tile, warpgroup, pos, acc);
  __syncwarp();
  NamedBarrier::arrive(256, kStoreTurn + (warpgroup ^ 1));
  if (!C::kEpilogue && threadIdx.x % 128 == 0) free_last_chunks<C, Q>(shared, pos);
}

// The kernel has code for every multiple of 16 rows; each has accumulators of its own, because sharing them between
// wgmma shapes serialises wgmma.
// The way to it is a binary search, with the long tiles first: a chain of 12 comparisons, each with a tile's code
// behind it, delayed the first tile by 3 us (H200).
template <class C, int Below, int Most, class Params>
CUTLASS_DEVICE void compute_rows(const Params &params, SharedStorage<C> &shared, const Tile &tile, int warpgroup,
                                 int pos) {
  if constexpr (Most - Below == 1) {
    compute_tile<C, Most * 16>(params, shared, tile, warpgroup, pos);
  } else {
    constexpr int kMiddle = (Below + Most) / 2;
    const int rows = tile.q_end - tile.q;
    if (rows > kMiddle * 16) compute_rows<C, kMiddle, Most>(params, shared, tile, warpgroup, pos);
    if (opaque(rows) <= kMiddle * 16) compute_rows<C, Below, kMiddle>(params, shared, tile, warpgroup, pos);
  }
}

template <class C, class Params>
CUTLASS_DEVICE void consume(const Params &params, SharedStorage<C> &shared, int warpgroup) {
  if (warpgroup == 1) {  // warpgroup 0 goes first
    NamedBarrier::arrive(256, kMmaTurn);
    NamedBarrier::arrive(256, kStoreTurn);
  }
  for (int pos = warpgroup;; pos += 2) {
    const Tile tile = read_tile(shared, pos);
    shared.tile_empty[pos % kTileRing].arrive();
    if (tile.group < 0) break;
    if constexpr (C::kTokensInK) {
      if (tile.is_wide())
        compute_tile<C, 192>(params, shared, tile, warpgroup, pos);
      else
        compute_tile<C, 128>(params, shared, tile, warpgroup, pos);
    } else {
      compute_rows<C, 0, C::TileQ / 16>(params, shared, tile, warpgroup, pos);
    }
  }
}

}  // namespace gmm::sm90::descriptor_array
