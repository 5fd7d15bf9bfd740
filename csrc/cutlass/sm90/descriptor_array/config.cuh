// The types that the parts of the kernel share: configuration, shared memory, tiles and barriers.
//
// wgmma multiplies a P operand (its M side, in steps of 64) with a Q operand (its N side, in steps of 8):
//   tokens in rows (forward, dgrad): P is B, the expert's weights; Q is A, the tokens. A tile takes exactly as many
//     rows as it needs, in steps of 16, and no group pays for padding. D is P along its rows.
//   tokens in K (wgrad): P is A (dy), Q is B (x): both are contiguous along their own dimension, not along K.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/grid_dependency_control.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_conversion.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/builders/sm90_common.inl>
#include <type_traits>
#include <utility>

#include "cutlass/sm90/descriptor_array/params.h"

namespace gmm::sm90::descriptor_array {

using namespace cute;

using Barrier = cutlass::arch::ClusterBarrier;
using TmaBarrier = cutlass::arch::ClusterTransactionBarrier;
using cutlass::arch::NamedBarrier;

template <class Element_, class Out_, bool TokensInK, bool PMajorK, int TileP_, int TileQ_, int Stages_, int Cluster_,
          int Chunks_, bool Accumulates = false, gmm_epilogue Epilogue = GMM_EPILOGUE_NONE>
struct Config {
  using Element = Element_;
  using Out = Out_;
  static constexpr bool kTokensInK = TokensInK, kPMajorK = PMajorK;
  static constexpr int TileP = TileP_, TileQ = TileQ_, Stages = Stages_, Cluster = Cluster_, Chunks = Chunks_;
  static constexpr gmm_epilogue kEpilogue = Epilogue;
  static constexpr int kThreads = 384;
  // Registers of a thread of the first warpgroup, whose scheduler spills with 40, and of the others, which spill with
  // 224 where D is loaded.
  static constexpr int kFewRegisters = Accumulates ? 40 : 56, kManyRegisters = Accumulates ? 232 : 224;
  static constexpr int kMmas = TileP / 64;  // wgmmas side by side in a warpgroup
  // How an accumulating call adds to D in registers, so that the sum is rounded once: a warp brings D (tokens in K,
  // fp32, the gradients that matter for speed), or the epilogue does for itself (16-bit). Compiled only where it is
  // asked for: the branch alone would cost other calls up to 5 %. fp32 with tokens in rows needs neither: the L2 adds.
  static constexpr bool kLoadsD = Accumulates && TokensInK && std::is_same_v<Out, float>;
  static constexpr bool kAdds16 = Accumulates && !std::is_same_v<Out, float>;
  static constexpr bool kAddsInL2 = std::is_same_v<Out, float> && (Accumulates || !TokensInK);  // TMA reductions

  using DChunk = Chunk<sizeof(Out), TokensInK>;

  static constexpr auto kMajorP = PMajorK ? GMMA::Major::K : GMMA::Major::MN;
  static constexpr auto kMajorQ = TokensInK ? GMMA::Major::MN : GMMA::Major::K;
  // For its shared-memory descriptors; the kernel multiplies with wgmma.cuh.
  using Mma =
      decltype(GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<TileQ>, Int<kBlockK>>, kMajorP, kMajorQ>());
  template <GMMA::Major Major, int Extent>
  using Layout =
      std::conditional_t<Major == GMMA::Major::K,
                         decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                                Shape<Int<Extent>, Int<kBlockK>, Int<Stages>>{})),
                         decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                                                Shape<Int<Extent>, Int<kBlockK>, Int<Stages>>{}, Step<_2, _1, _3>{}))>;
  using LayoutP = Layout<kMajorP, TileP>;
  using LayoutQ = Layout<kMajorQ, TileQ>;
};

// A tile as the scheduler hands it on. group < 0: no more tiles.
struct alignas(16) Tile {
  int p;         // first column of D; with tokens in K, first row
  int q, q_end;  // rows of the group's map of D; with tokens in K, columns
  int group;
  int k, k_end;         // tokens in K: those of the group. Otherwise 0 and K
  int k_blocks_before;  // of all tiles of this CTA: the tile's place in the ring of stages
  int shares_q;         // the CTAs of the cluster have the same q (else the same p)

  CUTLASS_DEVICE int k_blocks() const { return (k_end - k + kBlockK - 1) / kBlockK; }
  CUTLASS_DEVICE bool is_wide() const { return q_end - q > 128; }  // tokens in K: 192 columns, not 128
};

// Tiles that have been found and not all taken up: two, so that the clusters' last ones even out; four of those that
// end before the scheduler has found another.
constexpr int kTileRing = 4, kTilesAhead = 2, kShortBlocks = 4;

template <class C>
struct alignas(1024) SharedStorage {
  alignas(1024) typename C::Element p[C::Stages * C::TileP * kBlockK];
  alignas(1024) typename C::Element q[C::Stages * C::TileQ * kBlockK];
  // The warpgroups use the chunks one after the other.
  alignas(1024) typename C::Out d[C::Chunks][C::DChunk::kRows * C::DChunk::kColumns];
  Tile tiles[kTileRing];
  TmaBarrier full[C::Stages];
  Barrier empty[C::Stages];
  Barrier tile_full[kTileRing];
  Barrier tile_empty[kTileRing];
  TmaBarrier d_full[C::Chunks];
  Barrier d_empty[C::Chunks];
  uint32_t tickets[kTileRing];  // numbers of tiles, from the cluster's first CTA
  TmaBarrier ticket_full[kTileRing];
  Barrier ticket_empty[kTileRing];
  int d_phases;  // of d_full, a bit a chunk, where the epilogue loads D by itself

  CUTLASS_DEVICE void init_barriers() {
    for (int i = 0; i < C::Stages; ++i) {
      full[i].init(2);                // the producers of P and Q
      empty[i].init(C::Cluster * 4);  // the four warps of a warpgroup in each CTA
    }
    for (int i = 0; i < kTileRing; ++i) {
      tile_full[i].init(1);
      tile_empty[i].init(2 + C::kLoadsD + 128);  // the loading threads and those of a warpgroup
      ticket_full[i].init(1);
      ticket_empty[i].init(C::Cluster);
    }
    for (int i = 0; i < C::Chunks; ++i) {
      d_full[i].init(1);
      d_empty[i].init(1);
    }
    d_phases = 0;
    cutlass::arch::fence_barrier_init();
  }
};

// CUTLASS's barrier operations order memory in hardware, but do not keep the compiler from moving ordinary accesses.
CUTLASS_DEVICE void compiler_fence() { asm volatile("" ::: "memory"); }

// The value, of which the compiler then knows nothing. A branch on it stays behind the branch before: so the code of
// what happens first stands first.
CUTLASS_DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Named barriers of the consumers; the indexed ones take + warpgroup.
enum BarrierId : uint32_t { kEpilogue = 0, kMmaTurn = 2, kStoreTurn = 4 };

template <class C>
CUTLASS_DEVICE Tile read_tile(SharedStorage<C> &shared, int pos) {
  shared.tile_full[pos % kTileRing].wait(pos / kTileRing & 1);
  compiler_fence();
  return shared.tiles[pos % kTileRing];
}

// ------------------------------------------------------------------------------ what a group's matrices are in the
// maps

template <class Params>
CUTLASS_DEVICE const CUtensorMap *map_a(const Params &params, int group) {
  return &params.maps[params.ragged.offs ? kMapA : params.shapes[group].map_a];
}

template <class Params>
CUTLASS_DEVICE const CUtensorMap *map_b(const Params &params, int group) {
  return &params.maps[params.ragged.offs ? kMapB : params.shapes[group].map_b];
}

template <class Params>
CUTLASS_DEVICE const CUtensorMap *map_d(const Params &params, int group) {
  return &params.maps[params.ragged.offs ? kMapD : params.shapes[group].map_d];
}

// The index of the group in the batch dimension of a map; the list form has a map for each.
template <class Params>
CUTLASS_DEVICE int batch(const Params &params, int group) {
  return params.ragged.offs ? group : 0;
}

// Whether the kernel adds the tile's product to D in registers: chunks of D come by TMA and go back by TMA. Else the L2
// adds (a TMA reduction), which costs the SM nothing, but the L2 more time than the tile takes when it has few tokens.
template <class Params>
CUTLASS_DEVICE bool adds_in_registers(const Params &params, const Tile &tile) {
  return params.accumulate && tile.k_end - tile.k < params.add_in_l2;
}

template <class Params>
CUTLASS_DEVICE void prefetch_maps(const Params &params, int group) {
  prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor *>(map_a(params, group)));
  prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor *>(map_b(params, group)));
  prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor *>(map_d(params, group)));
}

}  // namespace gmm::sm90::descriptor_array
