// The epilogue of a warpgroup: accumulators to D through chunks in shared memory and TMA stores, which the maps clip at
// the end of the group (tokens in rows) and of D.
#pragma once

#include "cutlass/sm90/descriptor_array/load.cuh"

namespace gmm::sm90::descriptor_array {

// An accumulator of a wgmma, acc[v]: v = 8-column block * 4 + {0, 1: row lane / 4, 2, 3: eight rows below},
// columns lane % 4 * 2 + {0, 1}. Rows are P, columns Q.

// Where chunk c of a tile goes, and sends it there. `rows`: of the tile (tokens in rows).
template <class C>
struct Destination {
  using Chunk = typename C::DChunk;
  const CUtensorMap *map;
  int n, batch, rows_d;  // columns of D; index in the map's batch (tokens in K); rows of the map (tokens in rows)
  bool add;

  CUTLASS_DEVICE void store(const typename C::Out *from, int x, int y, int z) const {
    if (add)
      SM90_TMA_REDUCE_ADD_3D::copy(map, from, x, y, z);
    else
      SM90_TMA_STORE_3D::copy(map, from, x, y, z);
  }

  // The chunk at P = p and Q = q of the tile.
  CUTLASS_DEVICE void store_chunk(const typename C::Out *from, const Tile &tile, int p, int q) const {
    if constexpr (C::kTokensInK) {
      if (tile.q + q < tile.q_end) store(from, tile.q + q, tile.p + p, batch);
    } else {
      // Row r of the tile is (r - rows) + q_end in the map's two row dimensions: r >= rows falls outside.
      const int rows = tile.q_end - tile.q;
      if (q >= rows) return;
      CUTE_UNROLL
      for (int box = 0; box < Chunk::kColumns / Chunk::kBoxColumns; ++box) {
        const int column = tile.p + p + box * Chunk::kBoxColumns;
        if (column < n) store(from + box * Chunk::kBoxColumns * Chunk::kRows, column, rows_d - rows + q, tile.q_end);
      }
    }
  }
};

template <class C, class Params>
CUTLASS_DEVICE Destination<C> destination(const Params &params, const Tile &tile, bool add) {
  const bool ragged = params.ragged.offs;
  return {map_d(params, tile.group), ragged ? params.ragged.n : params.shapes[tile.group].n, batch(params, tile.group),
          ragged ? params.ragged.total : params.shapes[tile.group].rows_d, add};
}

// The element at (line, column) of a chunk's box, whose lines of 128 bytes are swizzled in units of 16.
template <class Out>
CUTLASS_DEVICE Out *swizzled(Out *box, int line, int column) {
  constexpr int kUnit = 16 / sizeof(Out);
  return box + line * (8 * kUnit) + ((column / kUnit) ^ (line & 7)) * kUnit + column % kUnit;
}

// 16-bit D: two 8 x 8 blocks along P and two along Q at a time. acc: of the two blocks along Q, eight values.
template <class C, class Block>
CUTLASS_DEVICE void write_block_16(typename C::Out *chunk, int q, const Block &values) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, matrix = lane / 8;
  cutlass::NumericArrayConverter<typename C::Out, float, 8> convert;
  const cutlass::Array<typename C::Out, 8> out = convert(values);
  const uint32_t *bits = reinterpret_cast<const uint32_t *>(&out);
  if constexpr (C::kTokensInK) {  // matrices: (P, Q), (P + 8, Q), (P, Q + 8), (P + 8, Q + 8)
    auto *to =
        reinterpret_cast<uint128_t *>(swizzled(chunk, warp * 16 + matrix % 2 * 8 + lane % 8, q + matrix / 2 * 8));
    SM90_U32x4_STSM_N::copy(bits[0], bits[1], bits[2], bits[3], *to);
  } else {
    auto *to =
        reinterpret_cast<uint128_t *>(swizzled(chunk, q + matrix / 2 * 8 + lane % 8, warp * 16 + matrix % 2 * 8));
    SM90_U16x8_STSM_T::copy(bits[0], bits[1], bits[2], bits[3], *to);
  }
}

// fp32 D, tokens in rows: the chunk is two boxes of 32 columns. Neighbouring P lie side by side, so that the eight
// lanes of equal lane % 4 write 32 bytes, and the four rows (Q) of a warp fall into different banks.
template <class C, class Block>
CUTLASS_DEVICE void write_block_32_by_rows(float *chunk, int q, const Block &values) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float *box = chunk + warp / 2 * (C::DChunk::kBoxColumns * C::DChunk::kRows);
  CUTE_UNROLL
  for (int v = 0; v < 8; ++v) {
    const int line = q + v / 4 * 8 + lane % 4 * 2 + v % 2, column = warp % 2 * 16 + lane / 4 + v / 2 % 2 * 8;
    *swizzled(box, line, column) = values[v];
  }
}

// fp32 D, tokens in K: a chunk of 32 columns, in pairs. Odd lines (P) begin with the block two further than even ones:
// else the swizzle would lay lines into the same banks. With `add` the old values come out of the chunk.
CUTLASS_DEVICE void write_chunk_32_by_tokens(float *chunk, const float *values, bool add) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool odd = lane / 4 % 2;
  const auto at = [&](int i) {
    const int block = odd ? i / 2 ^ 2 : i / 2;
    return reinterpret_cast<float2 *>(swizzled(chunk, warp * 16 + lane / 4 + i % 2 * 8, block * 8 + lane % 4 * 2));
  };
  float2 old[8] = {};
  if (add) {
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) old[i] = *at(i);
  }
  CUTE_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int even = i / 2 * 4 + i % 2 * 2, swapped = (i / 2 ^ 2) * 4 + i % 2 * 2;
    *at(i) = {old[i].x + (odd ? values[swapped] : values[even]),
              old[i].y + (odd ? values[swapped + 1] : values[even + 1])};
  }
}

// bias[p] of this thread's rows of the accumulators: lane / 4 and eight below, for each wgmma.
template <class C, class Params>
CUTLASS_DEVICE void load_bias(const Params &params, const Tile &tile, int n, float (&bias)[C::kMmas][2]) {
  using Out = typename C::Out;
  const Out *from = static_cast<const Out *>(params.ragged.offs ? params.ragged.bias : params.shapes[tile.group].bias);
  if (from && params.ragged.offs) from += tile.group * params.ragged.stride_bias;
  const int p = tile.p + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  CUTE_UNROLL
  for (int i = 0; i < C::kMmas * 2; ++i) {
    const int at = p + i / 2 * 64 + i % 2 * 8;
    bias[i / 2][i % 2] = from && at < n ? float(from[at]) : 0.f;
  }
}

// Stores tile number `pos` of the CTA, Q columns of accumulators. The CTA's epilogues run one after the other.
template <class C, int Q, class Params>
CUTLASS_DEVICE void store_tile(const Params &params, SharedStorage<C> &shared, const Tile &tile, int warpgroup, int pos,
                               const float (&acc)[C::kMmas][Q / 2]) {
  using Chunk = typename C::DChunk;
  constexpr int kChunkQ = C::kTokensInK ? Chunk::kColumns : Chunk::kRows;
  constexpr int kPerMma = (Q + kChunkQ - 1) / kChunkQ, kAll = C::kMmas * kPerMma;
  const bool leader = threadIdx.x % 128 == 0;
  const bool handed_out = C::kLoadsD && params.accumulate;  // the chunks, by load_d()
  const bool add = C::kLoadsD && adds_in_registers(params, tile);
  const Destination<C> to = destination<C>(params, tile, params.accumulate && !add);
  float bias[C::kMmas][2] = {};
  if constexpr (!C::kTokensInK) load_bias<C>(params, tile, to.n, bias);
  CUTE_UNROLL
  for (int c = 0; c < kAll; ++c) {
    const int mma = c / kPerMma, first_q = c % kPerMma * kChunkQ;
    const int it = handed_out ? pos * kAll + c : c, slot = it % C::Chunks;
    typename C::Out *chunk = shared.d[slot];
    if (handed_out) {
      shared.d_full[slot].wait(it / C::Chunks & 1);
      compiler_fence();
    } else if (c >= C::Chunks) {  // the chunk's earlier store must have been read
      if (leader) tma_store_wait<C::Chunks - 1>();
      NamedBarrier::sync(128, kEpilogue + warpgroup);
    }
    if constexpr (C::kTokensInK && sizeof(typename C::Out) == 4) {
      static_assert(Q % kChunkQ == 0);
      write_chunk_32_by_tokens(chunk, &acc[mma][first_q / 2], add);
    } else {
      CUTE_UNROLL
      for (int q = 0; q < kChunkQ; q += 16) {
        if (first_q + q >= Q) continue;
        cutlass::Array<float, 8> values;
        CUTE_UNROLL
        for (int v = 0; v < 8; ++v) values[v] = acc[mma][(first_q + q) / 2 + v] + bias[mma][v / 2 % 2];
        if constexpr (sizeof(typename C::Out) == 2)
          write_block_16<C>(chunk, q, values);
        else
          write_block_32_by_rows<C>(chunk, q, values);
      }
    }
    tma_store_fence();
    NamedBarrier::sync(128, kEpilogue + warpgroup);
    if (leader) {
      to.store_chunk(chunk, tile, mma * 64, first_q);
      tma_store_arrive();
      if (handed_out && c > 0) {
        tma_store_wait<1>();
        shared.d_empty[(it - 1) % C::Chunks].arrive();
      }
    }
  }
  if (leader) {
    tma_store_wait<0>();  // chunks are free for the other warpgroup
    if (handed_out) shared.d_empty[(pos * kAll + kAll - 1) % C::Chunks].arrive();
  }
}

// A tile without a product: zeros, from one chunk.
template <class C, class Params>
CUTLASS_DEVICE void store_zeros(const Params &params, SharedStorage<C> &shared, const Tile &tile, int warpgroup) {
  using Chunk = typename C::DChunk;
  constexpr int kChunkQ = C::kTokensInK ? Chunk::kColumns : Chunk::kRows;
  auto *zeros = reinterpret_cast<uint128_t *>(shared.d[0]);
  for (int i = threadIdx.x % 128; i < int(sizeof(shared.d[0]) / 16); i += 128) zeros[i] = uint128_t{};
  tma_store_fence();
  NamedBarrier::sync(128, kEpilogue + warpgroup);
  if (threadIdx.x % 128 != 0) return;
  const Destination<C> to = destination<C>(params, tile, false);
  for (int p = 0; p < C::TileP; p += 64)
    for (int q = 0; q < tile.q_end - tile.q; q += kChunkQ) to.store_chunk(shared.d[0], tile, p, q);
  tma_store_arrive();
  tma_store_wait<0>();
}

}  // namespace gmm::sm90::descriptor_array
