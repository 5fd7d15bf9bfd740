// The producer warps: TMA loads of P and Q into the ring of stages, and of D where it is added to in registers.
#pragma once

#include "cutlass/sm90/descriptor_array/config.cuh"

namespace gmm::sm90::descriptor_array {

constexpr uint64_t kHint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);

// Base of the third and fourth coordinates of a tail map, see encode.h.
constexpr int kTailBase = 1 << 30;

// A TMA copy to this CTA; with kMulticast to the same place in every CTA of the cluster.
template <class C, bool kMulticast, class... Coordinates>
CUTLASS_DEVICE void copy_box(const CUtensorMap *map, TmaBarrier &full, typename C::Element *to, Coordinates... at) {
  uint64_t *bits = reinterpret_cast<uint64_t *>(&full);
  if constexpr (kMulticast)
    SM90_TMA_LOAD_MULTICAST::copy(map, bits, uint16_t((1 << C::Cluster) - 1), kHint, to, at...);
  else
    SM90_TMA_LOAD::copy(map, bits, kHint, to, at...);
}

// Runs copy(stage, k) for each block of the tile once its stage is free; `bytes` of it come into this CTA.
template <class C, class Copy>
CUTLASS_DEVICE void fill_stages(SharedStorage<C> &shared, const Tile &tile, uint32_t bytes, const Copy &copy) {
  int stage = tile.k_blocks_before % C::Stages, phase = tile.k_blocks_before / C::Stages & 1;
  for (int k = tile.k; k < tile.k_end; k += kBlockK) {
    shared.empty[stage].wait(phase ^ 1);
    shared.full[stage].arrive_and_expect_tx(bytes);
    copy(stage, k);
    if (++stage == C::Stages) stage = 0, phase ^= 1;
  }
}

template <class C>
CUTLASS_DEVICE constexpr uint32_t bytes_of_lines(int lines) {
  return lines * kBlockK * sizeof(typename C::Element);
}

// In what follows kShared: the CTAs of the cluster need the same, and each loads a part of it for all. With tokens in K
// P is never shared: only a last tile without a neighbour could be.

// ------------------------------------------------------------------------------------------------- tokens in rows

template <class C, bool kShared, class Params>
CUTLASS_DEVICE void load_rows(const Params &params, SharedStorage<C> &shared, const Tile &tile, int rank) {
  const CUtensorMap *map = map_a(params, tile.group);
  int row = tile.q;
  if (!params.ragged.offs) row += params.shapes[tile.group].row_a - params.shapes[tile.group].row_d;
  const int boxes = max((tile.q_end - tile.q + kBoxRowsA - 1) / kBoxRowsA, 1);
  constexpr int kBox = kBoxRowsA * kBlockK, kStep = kShared ? C::Cluster : 1;
  fill_stages(shared, tile, bytes_of_lines<C>(boxes * kBoxRowsA), [&](int stage, int k) {
    typename C::Element *to = shared.q + stage * C::TileQ * kBlockK;
    for (int box = kShared ? rank : 0; box < boxes; box += kStep)
      copy_box<C, kShared>(map, shared.full[stage], to + box * kBox, k, row + box * kBoxRowsA);
  });
}

// Where box `at` of the tile begins along N. With SwiGLU a tile is a box of the gate and the one of the same columns of
// the up half, so that both are in the same thread.
template <class C, class Params>
CUTLASS_DEVICE int weights_of_box(const Params &params, const Tile &tile, int at) {
  if constexpr (C::kEpilogue == GMM_EPILOGUE_SWIGLU)
    return tile.p / 2 + at * (params.ragged.n / 2);
  else
    return tile.p + at * kBoxRowsB;
}

template <class C, bool kShared, class Params>
CUTLASS_DEVICE void load_weights(const Params &params, SharedStorage<C> &shared, const Tile &tile, int rank) {
  const CUtensorMap *map = map_b(params, tile.group);
  const int weights = batch(params, tile.group);
  constexpr int kBox = kBoxRowsB * kBlockK, kParts = C::TileP / kBoxRowsB;
  fill_stages(shared, tile, bytes_of_lines<C>(C::TileP), [&](int stage, int k) {
    CUTE_UNROLL
    for (int part = 0; part < (kShared ? kParts / C::Cluster : kParts); ++part) {
      const int at = kShared ? part * C::Cluster + rank : part;
      const int p = weights_of_box<C>(params, tile, at);
      typename C::Element *to = shared.p + stage * C::TileP * kBlockK + at * kBox;
      if constexpr (C::kPMajorK)
        copy_box<C, kShared>(map, shared.full[stage], to, k, p, weights);
      else
        copy_box<C, kShared>(map, shared.full[stage], to, p, k, weights);
    }
  });
}

// --------------------------------------------------------------------------------------------------- tokens in K

// `columns` of an operand from `at` on, in boxes of kBox tokens, a block of up to 64 tokens at a time, into stages of
// Extent columns. Rows at and after k_end must come as zeros: the next group's tokens lie there. Where a map holds one
// group, it does that by itself; else tail_map does.
template <class C, bool kShared, int Extent, int kBox>
CUTLASS_DEVICE void load_tokens(const CUtensorMap *map, const CUtensorMap *tail_map, SharedStorage<C> &shared,
                                typename C::Element *stages, const Tile &tile, int at, int columns, int rank) {
  constexpr int kBoxes = kBlockK / kBox, kEach = kShared ? 1 : kBoxes;
  static_assert(!kShared || C::Cluster == kBoxes);
  fill_stages(shared, tile, bytes_of_lines<C>(columns), [&](int stage, int k) {
    const bool tail = tail_map && tile.k_end - k < kBlockK;
    CUTE_UNROLL
    for (int i = 0; i < Extent / 64 * kEach; ++i) {
      if (i / kEach * 64 >= columns) break;
      const int part = kShared ? i : i / kBoxes, box = kShared ? rank : i % kBoxes;
      typename C::Element *to = stages + stage * Extent * kBlockK + (part * kBlockK + box * kBox) * 64;
      const int x = at + part * 64, token = k + box * kBox;
      if (tail)
        copy_box<C, kShared>(tail_map, shared.full[stage], to, x, kTailBase - (tile.k_end - token), tile.k_end,
                             +kTailBase);
      else
        copy_box<C, kShared>(map, shared.full[stage], to, x, token);
    }
  });
}

// --------------------------------------------------------------------------------------------------------- warps

template <class C, bool kShared, class Params>
CUTLASS_DEVICE void load_tile_p(const Params &params, SharedStorage<C> &shared, const Tile &tile, int rank) {
  if constexpr (C::kTokensInK) {
    const CUtensorMap *tail = params.ragged.offs ? &params.maps[kMapTailA] : nullptr;
    load_tokens<C, false, C::TileP, kBoxTokensA>(map_a(params, tile.group), tail, shared, shared.p, tile, tile.p,
                                                 C::TileP, rank);
  } else {
    load_weights<C, kShared>(params, shared, tile, rank);
  }
}

template <class C, bool kShared, class Params>
CUTLASS_DEVICE void load_tile_q(const Params &params, SharedStorage<C> &shared, const Tile &tile, int rank) {
  if constexpr (C::kTokensInK) {
    const CUtensorMap *tail = params.ragged.offs ? &params.maps[kMapTailB] : nullptr;
    load_tokens<C, kShared, C::TileQ, kBoxTokensB>(map_b(params, tile.group), tail, shared, shared.q, tile, tile.q,
                                                   tile.is_wide() ? 192 : 128, rank);
  } else {
    load_rows<C, kShared>(params, shared, tile, rank);
  }
}

// The warp that loads P (kOperandP), or Q: one for both would need longer for the copies of a block than the tensor
// cores for the block.
template <class C, bool kOperandP, class Params>
CUTLASS_DEVICE void produce(const Params &params, SharedStorage<C> &shared, int rank) {
  // In the list form the scheduler is at work before this, as the parameters depend on no earlier kernel. Stores follow
  // loads, and need no wait of their own.
  cutlass::arch::wait_on_dependent_grids();
  for (int pos = 0;; ++pos) {
    const Tile tile = read_tile(shared, pos);
    shared.tile_empty[pos % kTileRing].arrive();
    if (tile.group < 0) break;
    if constexpr (kOperandP) {
      if (C::Cluster > 1 && !tile.shares_q && !C::kTokensInK)
        load_tile_p<C, (C::Cluster > 1)>(params, shared, tile, rank);
      else
        load_tile_p<C, false>(params, shared, tile, rank);
    } else {
      if (C::Cluster > 1 && tile.shares_q)
        load_tile_q<C, (C::Cluster > 1)>(params, shared, tile, rank);
      else
        load_tile_q<C, false>(params, shared, tile, rank);
    }
  }
  cutlass::arch::launch_dependent_grids();
}

// ------------------------------------------------------------------------------------------------------------- D

// Hands out the chunks in the order in which the epilogues take them, filled with D for those that add in registers.
template <class C, class Params>
CUTLASS_DEVICE void load_d(const Params &params, SharedStorage<C> &shared) {
  constexpr int kColumns = C::DChunk::kColumns, kPerRow = C::TileQ / kColumns, kAll = C::kMmas * kPerRow;
  cutlass::arch::wait_on_dependent_grids();
  for (int pos = 0, it = 0;; ++pos) {
    const Tile tile = read_tile(shared, pos);
    shared.tile_empty[pos % kTileRing].arrive();
    if (tile.group < 0) break;
    if (!params.accumulate) continue;
    const CUtensorMap *map = map_d(params, tile.group);
    const bool loads = adds_in_registers(params, tile);
    for (int c = 0; c < kAll; ++c, ++it) {
      const int slot = it % C::Chunks;
      shared.d_empty[slot].wait((it / C::Chunks & 1) ^ 1);
      if (!loads || c % kPerRow * kColumns >= tile.q_end - tile.q) {
        shared.d_full[slot].arrive();
        continue;
      }
      shared.d_full[slot].arrive_and_expect_tx(sizeof(shared.d[slot]));
      SM90_TMA_LOAD_3D::copy(map, reinterpret_cast<uint64_t *>(&shared.d_full[slot]), kHint, shared.d[slot],
                             tile.q + c % kPerRow * kColumns, tile.p + c / kPerRow * 64, batch(params, tile.group));
    }
  }
}

}  // namespace gmm::sm90::descriptor_array
