// The descriptor-array kernel: D = A @ B for a list of groups, persistent, warp-specialised, pingpong.
//
// wgmma's M side is B's columns (the expert's weights, TileN of them) and its N side is A's rows (the tokens): a tile
// takes exactly as many rows as it needs, in steps of 16, and no group pays for padding. A CTA is
//   warp 0     producer:  TMA loads of A and B into a ring of stages
//   warp 1     scheduler: finds the next tile and hands it to the producer and to one of the warpgroups
//   warpgroups 1 and 2:   take turns; one multiplies while the other stores its tile
// Two CTAs of a cluster take neighbouring column tiles of the same rows and share A by multicast.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // wgmma N of 48, 80, 112, ... : must come before CuTe's headers

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/grid_dependency_control.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_conversion.h>

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/builders/sm90_common.inl>
#include <utility>

#include "cutlass/sm90/descriptor_array/params.h"

namespace gmm::sm90::descriptor_array {

using namespace cute;

template <class Element_, bool BColumnMajor, int TileM_, int TileN_, int Stages_, int Cluster_, int Chunks_>
struct Config {
  using Element = Element_;
  static constexpr bool kBColumnMajor = BColumnMajor;
  static constexpr int TileM = TileM_, TileN = TileN_;  // rows of D at most, columns of D
  static constexpr int Stages = Stages_, Cluster = Cluster_, Chunks = Chunks_;
  static constexpr int kThreads = 384;
  static constexpr int kMmas = TileN / 64;  // wgmmas side by side in a warpgroup
  static constexpr int kChunkRows = TileM < kChunk ? TileM : kChunk;

  static constexpr auto kMajorB = BColumnMajor ? GMMA::Major::K : GMMA::Major::MN;
  template <int Rows>
  using Mma = decltype(GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<Rows>, Int<kBlockK>>, kMajorB,
                                            GMMA::Major::K>());
  using LayoutA =
      decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<TileM>, Int<kBlockK>, Int<Stages>>{}));
  using LayoutB =
      std::conditional_t<BColumnMajor,
                         decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{},
                                                Shape<Int<TileN>, Int<kBlockK>, Int<Stages>>{})),
                         decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{},
                                                Shape<Int<TileN>, Int<kBlockK>, Int<Stages>>{}, Step<_2, _1, _3>{}))>;
};

// A tile as the scheduler hands it on. group < 0: no more tiles.
struct alignas(16) Tile {
  int row_begin, row_end, col, group;  // rows of the group's map of D
  int k_blocks, k_begin;  // blocks of the tile; blocks of all tiles before it, which is its place in the ring of stages
  int shares_a, unused;   // the CTAs of the cluster have the same rows (else the same columns)
};

using Barrier = cutlass::arch::ClusterBarrier;
using TmaBarrier = cutlass::arch::ClusterTransactionBarrier;
using cutlass::arch::NamedBarrier;

constexpr int kTileRing = 2;
constexpr int kBandTiles = 12;

template <class C>
struct alignas(1024) SharedStorage {
  alignas(1024) typename C::Element a[C::Stages * C::TileM * kBlockK];
  alignas(1024) typename C::Element b[C::Stages * C::TileN * kBlockK];
  alignas(1024) typename C::Element d[C::Chunks * C::kChunkRows * kChunk];  // the warpgroups use it one after the other
  Tile tiles[kTileRing];
  TmaBarrier full[C::Stages];
  Barrier empty[C::Stages];
  Barrier tile_full[kTileRing];
  Barrier tile_empty[kTileRing];
};

// CUTLASS's barrier operations order memory in hardware, but do not keep the compiler from moving ordinary accesses.
CUTLASS_DEVICE void compiler_fence() { asm volatile("" ::: "memory"); }

// Named barriers of the consumers; the indexed ones take + warpgroup.
enum BarrierId : uint32_t { kEpilogue = 0, kMmaTurn = 2, kStoreTurn = 4 };

// ---------------------------------------------------------------------------------------------------- scheduler

template <class Params>
CUTLASS_DEVICE void prefetch_maps(const Params &params, int group) {
  const GroupShape &shape = params.shapes[group];
  prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor *>(&params.maps[shape.map_a]));
  prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor *>(&params.maps[shape.map_b]));
  prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor *>(&params.maps[shape.map_d]));
}

// Tile number `t` of the launch. Called by a whole warp with rising t; `window` is the first group it looks at.
template <class C, class Params>
CUTLASS_DEVICE bool find_tile(const Params &params, int t, int rank, int &window, Tile &tile) {
  const int lane = threadIdx.x % 32;
  int first = 0;
  for (;; window += 32) {
    if (window >= params.groups) return false;
    const int g = window + lane;
    const uint32_t after = __ballot_sync(~0u, g < params.groups && params.shapes[g].tiles_end > t);
    first = window + __ffs(after) - 1;
    if (after) break;
  }
  const GroupShape shape = params.shapes[first];
  int i = t - (first ? params.shapes[first - 1].tiles_end : 0);
  const int m_tiles = (shape.m + params.tile_rows - 1) / params.tile_rows;
  const int n_tiles = (shape.n + C::TileN - 1) / C::TileN;
  const int pairs = n_tiles / C::Cluster;  // column tiles are taken Cluster at a time
  int m, n;
  if (i < m_tiles * pairs) {
    // Bands of rows: the tiles that run at the same time are about as high as wide, so that they share both operands in
    // L2.
    const int bands = (m_tiles + kBandTiles - 1) / kBandTiles, band_tiles = (m_tiles + bands - 1) / bands;
    const int band = i / (band_tiles * pairs), height = min(band_tiles, m_tiles - band * band_tiles);
    i -= band * band_tiles * pairs;
    m = band * band_tiles + i % height;
    n = i / height * C::Cluster + rank;
    tile.shares_a = 1;
  } else {  // a last column tile without a neighbour: the CTAs take two row tiles of it and share B
    m = (i - m_tiles * pairs) * C::Cluster + rank;
    n = n_tiles - 1;
    tile.shares_a = 0;
  }
  // Equal tiles, in units of 16 rows: full tiles and a short one would cost up to 6 %. Where they cannot be equal, the
  // longer ones come at other places in each group, because a CTA often meets the same place m in every group.
  const int units = (shape.m + 15) / 16, each = units / m_tiles, longer = units - each * m_tiles;
  const int turn = first * longer % m_tiles;
  const auto longer_before = [&](int place) {  // of the first `place` tiles, with the turn counted in
    return place < m_tiles ? min(place, longer) : longer + min(place - m_tiles, longer);
  };
  const auto begin = [&](int tile_m) {
    return min((tile_m * each + longer_before(tile_m + turn) - longer_before(turn)) * 16, shape.m);
  };
  tile.row_begin = shape.row_d + begin(min(m, m_tiles));
  tile.row_end = shape.row_d + begin(min(m + 1, m_tiles));
  tile.col = n * C::TileN;
  tile.group = first;
  tile.k_blocks = (shape.k + kBlockK - 1) / kBlockK;
  return true;
}

template <class C, class Params>
CUTLASS_DEVICE void schedule(const Params &params, SharedStorage<C> &shared, int rank) {
  const bool leader = threadIdx.x % 32 == 0;
  int window = 0, k_begin = 0, group = -1;
  int ends = 0;  // each warpgroup gets its own
  for (int pos = 0, t = blockIdx.x / C::Cluster; ends < 2; ++pos, t += gridDim.x / C::Cluster) {
    Tile tile{};
    if (ends > 0 || !find_tile<C>(params, t, rank, window, tile)) {
      tile.group = -1;
      ++ends;
    } else if (tile.group != group) {
      group = tile.group;
      if (leader) prefetch_maps(params, group);
    }
    tile.k_begin = k_begin;
    k_begin += tile.k_blocks;
    const int slot = pos % kTileRing;
    shared.tile_empty[slot].wait((pos / kTileRing & 1) ^ 1);
    if (leader) {
      shared.tiles[slot] = tile;
      compiler_fence();
      shared.tile_full[slot].arrive();
    }
  }
}

template <class C>
CUTLASS_DEVICE Tile read_tile(SharedStorage<C> &shared, int pos) {
  shared.tile_full[pos % kTileRing].wait(pos / kTileRing & 1);
  compiler_fence();
  return shared.tiles[pos % kTileRing];
}

// ----------------------------------------------------------------------------------------------------- producer

// One block of B, TileN columns; with shares_b each CTA of the cluster loads half of it for both.
template <class C>
CUTLASS_DEVICE void load_b(const CUtensorMap *map, TmaBarrier *full, typename C::Element *b, int col, int k,
                           bool shares_b, int rank) {
  constexpr uint64_t kHint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
  CUTE_UNROLL
  for (int part = 0; part < C::TileN / kBoxRowsB; ++part) {
    typename C::Element *to = b + part * kBoxRowsB * kBlockK;
    const int x = C::kBColumnMajor ? k : col + part * kBoxRowsB, y = C::kBColumnMajor ? col + part * kBoxRowsB : k;
    if (!shares_b)
      SM90_TMA_LOAD_2D::copy(map, reinterpret_cast<uint64_t *>(full), kHint, to, x, y);
    else if (part % C::Cluster == rank)
      SM90_TMA_LOAD_MULTICAST_2D::copy(map, reinterpret_cast<uint64_t *>(full), uint16_t((1 << C::Cluster) - 1), kHint,
                                       to, x, y);
  }
}

template <class C, class Params>
CUTLASS_DEVICE void produce(const Params &params, SharedStorage<C> &shared, int rank) {
  constexpr uint64_t kHint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr uint16_t kAllCtas = (1 << C::Cluster) - 1;
  // The parameters depend on no earlier kernel, so the scheduler is at work before this. Stores follow loads, and need
  // no wait of their own.
  cutlass::arch::wait_on_dependent_grids();
  for (int pos = 0;; ++pos) {
    const Tile tile = read_tile(shared, pos);
    shared.tile_empty[pos % kTileRing].arrive();
    if (tile.group < 0) break;
    const GroupShape &shape = params.shapes[tile.group];
    const CUtensorMap *map_a = &params.maps[shape.map_a], *map_b = &params.maps[shape.map_b];
    const int row_a = tile.row_begin - shape.row_d + shape.row_a;
    const int boxes = max((tile.row_end - tile.row_begin + kBoxRowsA - 1) / kBoxRowsA, 1);
    const uint32_t bytes = (boxes * kBoxRowsA + C::TileN) * kBlockK * sizeof(typename C::Element);
    const bool multicast_a = C::Cluster > 1 && tile.shares_a;
    for (int block = 0; block < tile.k_blocks; ++block) {
      const int it = tile.k_begin + block, stage = it % C::Stages;
      shared.empty[stage].wait((it / C::Stages & 1) ^ 1);
      TmaBarrier *full = &shared.full[stage];
      uint64_t *full_bits = reinterpret_cast<uint64_t *>(full);
      full->arrive_and_expect_tx(bytes);
      typename C::Element *a = shared.a + stage * C::TileM * kBlockK;
      const int k = block * kBlockK;
      for (int box = multicast_a ? rank : 0; box < boxes; box += multicast_a ? C::Cluster : 1) {
        typename C::Element *to = a + box * kBoxRowsA * kBlockK;
        const int row = row_a + box * kBoxRowsA;
        if (multicast_a)
          SM90_TMA_LOAD_MULTICAST_2D::copy(map_a, full_bits, kAllCtas, kHint, to, k, row);
        else
          SM90_TMA_LOAD_2D::copy(map_a, full_bits, kHint, to, k, row);
      }
      load_b<C>(map_b, full, shared.b + stage * C::TileN * kBlockK, tile.col, k, C::Cluster > 1 && !tile.shares_a,
                rank);
    }
  }
  cutlass::arch::launch_dependent_grids();
}

// ---------------------------------------------------------------------------------------------------- consumers

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

// Accumulators (columns of D along wgmma's M) to D: transposed into shared memory in chunks, then TMA stores that the
// descriptor clips at row_end.
template <class C, int Rows, class Params, class Accumulators>
CUTLASS_DEVICE void store_tile(const Params &params, SharedStorage<C> &shared, const Tile &tile, int warpgroup,
                               const Accumulators &acc) {
  using Element = typename C::Element;
  constexpr int kRowChunks = (Rows + C::kChunkRows - 1) / C::kChunkRows, kAll = C::kMmas * kRowChunks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool leader = threadIdx.x % 128 == 0;
  const int rows = tile.row_end - tile.row_begin;
  const GroupShape &shape = params.shapes[tile.group];
  const CUtensorMap *map = &params.maps[shape.map_d];
  CUTE_UNROLL
  for (int c = 0; c < kAll; ++c) {
    const int mma = c / kRowChunks, row_chunk = c % kRowChunks;
    Element *chunk = shared.d + c % C::Chunks * C::kChunkRows * kChunk;
    if (c >= C::Chunks) {  // the chunk's earlier store must have been read
      if (leader) tma_store_wait<C::Chunks - 1>();
      NamedBarrier::sync(128, kEpilogue + warpgroup);
    }
    CUTE_UNROLL
    for (int j = 0; j < C::kChunkRows / 8; j += 2) {  // two 8 x 8 blocks of rows, two of columns at a time
      const int block = row_chunk * (C::kChunkRows / 8) + j;
      if (block >= Rows / 8) continue;
      cutlass::NumericArrayConverter<Element, float, 8> convert;
      cutlass::Array<float, 8> values;
      CUTE_UNROLL
      for (int v = 0; v < 8; ++v) values[v] = acc(block * 4 + v, mma);
      const cutlass::Array<Element, 8> out = convert(values);
      const uint32_t *bits = reinterpret_cast<const uint32_t *>(&out);
      const int matrix = lane / 8, row = (j + matrix / 2) * 8 + lane % 8, column_block = warp * 2 + matrix % 2;
      auto *to = reinterpret_cast<uint128_t *>(chunk + row * kChunk) + (column_block ^ (row & 7));
      SM90_U16x8_STSM_T::copy(bits[0], bits[1], bits[2], bits[3], *to);
    }
    tma_store_fence();
    NamedBarrier::sync(128, kEpilogue + warpgroup);
    if (leader) {
      const int row = row_chunk * C::kChunkRows, col = tile.col + mma * 64;
      // Row r of the tile is (r - rows) + row_end in the map's two row dimensions: r >= rows falls outside.
      if (row < rows && col < shape.n)
        SM90_TMA_STORE_3D::copy(map, chunk, col, shape.rows_d - rows + row, tile.row_end);
      tma_store_arrive();
    }
  }
  if (leader) tma_store_wait<0>();  // chunks are free for the other warpgroup
}

template <class C, int Rows, class Params>
CUTLASS_DEVICE void compute_tile(const Params &params, SharedStorage<C> &shared, const Tile &tile, int warpgroup) {
  using Mma = typename C::template Mma<Rows>;
  auto mma = make_tiled_mma(Mma{});
  auto thread_mma = mma.get_slice(0);
  // Shared-memory descriptors say where a block starts and how its lines follow, not how many there are: those of
  // the full tile serve every number of rows.
  auto full_mma = make_tiled_mma(typename C::template Mma<C::TileM>{}).get_slice(0);
  auto frag_a =
      full_mma.make_fragment_B(full_mma.partition_B(make_tensor(make_smem_ptr(shared.a), typename C::LayoutA{})));
  auto frag_b =
      thread_mma.make_fragment_A(thread_mma.partition_A(make_tensor(make_smem_ptr(shared.b), typename C::LayoutB{})));
  auto acc = make_tensor<float>(Shape<Int<Rows / 2>, Int<C::kMmas>>{});

  const auto multiply = [&](int stage) __attribute__((always_inline)) {
    warpgroup_arrive();
    CUTE_UNROLL
    for (int k = 0; k < kBlockK / 16; ++k) {
      CUTE_UNROLL
      for (int i = 0; i < C::kMmas; ++i) cute::gemm(mma, frag_b(_, i, k, stage), frag_a(_, _0{}, k, stage), acc(_, i));
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  };

  int stage = tile.k_begin % C::Stages, phase = tile.k_begin / C::Stages & 1;
  const auto advance = [&]() __attribute__((always_inline)) {
    if (++stage == C::Stages) stage = 0, phase ^= 1;
  };
  NamedBarrier::sync(256, kMmaTurn + warpgroup);
  mma.accumulate_ = GMMA::ScaleOut::Zero;
  warpgroup_fence_operand(acc);
  shared.full[stage].wait(phase);
  multiply(stage);
  int previous = stage;
  advance();
  CUTE_NO_UNROLL
  for (int block = 1; block < tile.k_blocks; ++block) {
    shared.full[stage].wait(phase);
    multiply(stage);
    warpgroup_wait<1>();  // the block before has been read
    release(shared, previous);
    previous = stage;
    advance();
  }
  NamedBarrier::arrive(256, kMmaTurn + (warpgroup ^ 1));
  warpgroup_wait<0>();
  warpgroup_fence_operand(acc);
  release(shared, previous);

  NamedBarrier::sync(256, kStoreTurn + warpgroup);
  store_tile<C, Rows>(params, shared, tile, warpgroup, acc);
  __syncwarp();
  NamedBarrier::arrive(256, kStoreTurn + (warpgroup ^ 1));
}

// The kernel has code for every multiple of 16 rows; each has accumulators of its own, because sharing them between
// wgmma shapes serialises wgmma.
template <class C, class Params, int... Index>
CUTLASS_DEVICE void compute_rows(const Params &params, SharedStorage<C> &shared, const Tile &tile, int warpgroup,
                                 std::integer_sequence<int, Index...>) {
  const int units = max((tile.row_end - tile.row_begin + 15) / 16, 1);
  ((units == Index + 1 ? compute_tile<C, (Index + 1) * 16>(params, shared, tile, warpgroup) : void()), ...);
}

template <class C, class Params>
CUTLASS_DEVICE void consume(const Params &params, SharedStorage<C> &shared, int warpgroup) {
  if (warpgroup == 1) {  // warpgroup 0 goes first
    NamedBarrier::arrive(256, kMmaTurn);
    NamedBarrier::arrive(256, kStoreTurn);
  }
  for (int pos = warpgroup;; pos += 2) {
    const Tile tile = read_tile(shared, pos);
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.tile_empty[pos % kTileRing].arrive();
    if (tile.group < 0) break;
    compute_rows<C>(params, shared, tile, warpgroup, std::make_integer_sequence<int, C::TileM / 16>{});
  }
}

// -------------------------------------------------------------------------------------------------------- kernel

template <class C, class Params>
__global__ void __launch_bounds__(C::kThreads, 1) kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage<C> &shared = *reinterpret_cast<SharedStorage<C> *>(memory);
  const int warp = cutlass::canonical_warp_idx_sync(), warpgroup = warp / 4;
  const int rank = C::Cluster > 1 ? block_rank_in_cluster() : 0;
  if (warp == 1) {  // the first tile's maps and shape are on their way while the barriers are set up
    Tile tile;
    int window = 0;
    if (find_tile<C>(params, blockIdx.x / C::Cluster, rank, window, tile) && threadIdx.x % 32 == 0)
      prefetch_maps(params, tile.group);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::Stages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(C::Cluster * 4);  // the four warps of a warpgroup in each CTA
    }
    for (int i = 0; i < kTileRing; ++i) {
      shared.tile_full[i].init(1);
      shared.tile_empty[i].init(1 + 4);  // the producer and the four warps of a warpgroup
    }
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (C::Cluster > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  } else {
    __syncthreads();
  }

  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (warp == 0 && threadIdx.x == 0) produce(params, shared, rank);
    if (warp == 1) schedule(params, shared, rank);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume(params, shared, warpgroup - 1);
  }
  if constexpr (C::Cluster > 1) {  // a CTA may not leave while its neighbour still multicasts into it
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace gmm::sm90::descriptor_array
