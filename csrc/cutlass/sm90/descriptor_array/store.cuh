// The epilogue of a warpgroup: accumulators to D through chunks in shared memory and TMA stores, which the maps clip at
// the end of the group (tokens in rows) and of D.
#pragma once

#include "cutlass/sm90/descriptor_array/load.cuh"

namespace gmm::sm90::descriptor_array {

// An accumulator of a wgmma, acc[v]: v = 8-column block * 4 + {0, 1: row lane / 4, 2, 3: eight rows below},
// columns lane % 4 * 2 + {0, 1}. Rows are P, columns Q.

// Where the chunks of a tile lie in D.
template <class C>
struct Destination {
  using Chunk = typename C::DChunk;
  const CUtensorMap *map;
  int n, batch, rows_d;  // columns of D; index in the map's batch (tokens in K); rows of the map (tokens in rows)
  bool add;              // in the L2

  // Calls box(first element in the chunk, x, y, z) for the boxes of the chunk at P = p and Q = q of the tile.
  template <class Box>
  CUTLASS_DEVICE void boxes(const Tile &tile, int p, int q, const Box &box) const {
    if constexpr (C::kTokensInK) {
      if (tile.q + q < tile.q_end) box(0, tile.q + q, tile.p + p, batch);
    } else {
      // Row r of the tile is (r - rows) + q_end in the map's two row dimensions: r >= rows falls outside.
      const int rows = tile.q_end - tile.q;
      if (q >= rows) return;
      CUTE_UNROLL
      for (int i = 0; i < Chunk::kColumns / Chunk::kBoxColumns; ++i) {
        const int column = tile.p + p + i * Chunk::kBoxColumns;
        if (column < n) box(i * Chunk::kBoxColumns * Chunk::kRows, column, rows_d - rows + q, tile.q_end);
      }
    }
  }

  CUTLASS_DEVICE void store(const typename C::Out *chunk, const Tile &tile, int p, int q) const {
    boxes(tile, p, q, [&](int first, int x, int y, int z) {
      if (C::kAddsInL2 && add)
        SM90_TMA_REDUCE_ADD_3D::copy(map, chunk + first, x, y, z);
      else
        SM90_TMA_STORE_3D::copy(map, chunk + first, x, y, z);
    });
    tma_store_arrive();
  }

  // By one thread, which waits. Tokens in rows: rows after the group's are read as well.
  CUTLASS_DEVICE void load(typename C::Out *chunk, const Tile &tile, int p, int q, TmaBarrier &full, int phase) const {
    uint64_t *bits = reinterpret_cast<uint64_t *>(&full);
    if (q < tile.q_end - tile.q && (C::kTokensInK || tile.p + p < n)) {
      full.expect_transaction(Chunk::kBoxColumns * Chunk::kRows * sizeof(typename C::Out));
      if constexpr (C::kTokensInK)
        SM90_TMA_LOAD_3D::copy(map, bits, kHint, chunk, tile.q + q, tile.p + p, batch);
      else
        SM90_TMA_LOAD_2D::copy(map + 1, bits, kHint, chunk, tile.p + p, tile.q + q);
    }
    full.arrive();
    full.wait(phase);
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

// 16-bit D: two 8 x 8 blocks along P and two along Q at a time. The old values, where they are added, come out of the
// chunk.
template <class C>
CUTLASS_DEVICE void write_block_16(typename C::Out *chunk, int q, cutlass::Array<float, 8> values) {
  using Out = typename C::Out;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, matrix = lane / 8;
  // Matrices: (P, Q), (P + 8, Q), (P, Q + 8), (P + 8, Q + 8); a lane has the address of one of their lines.
  const int p = warp * 16 + matrix % 2 * 8, in_q = q + matrix / 2 * 8, line = lane % 8;
  auto &at =
      *reinterpret_cast<uint128_t *>(C::kTokensInK ? swizzled(chunk, p + line, in_q) : swizzled(chunk, in_q + line, p));
  if constexpr (C::kAdds16) {
    cutlass::Array<Out, 8> old;
    uint32_t *bits = reinterpret_cast<uint32_t *>(&old);
    if constexpr (C::kTokensInK)
      SM75_U32x4_LDSM_N::copy(at, bits[0], bits[1], bits[2], bits[3]);
    else
      SM75_U16x8_LDSM_T::copy(at, bits[0], bits[1], bits[2], bits[3]);
    CUTE_UNROLL
    for (int v = 0; v < 8; ++v) values[v] += float(old[v]);
  }
  cutlass::NumericArrayConverter<Out, float, 8> convert;
  const cutlass::Array<Out, 8> out = convert(values);
  const uint32_t *bits = reinterpret_cast<const uint32_t *>(&out);
  if constexpr (C::kTokensInK)
    SM90_U32x4_STSM_N::copy(bits[0], bits[1], bits[2], bits[3], at);
  else
    SM90_U16x8_STSM_T::copy(bits[0], bits[1], bits[2], bits[3], at);
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

// Adds bias[p]. A thread has rows lane / 4 and eight below of each accumulator.
template <class C, int Q, class Params>
CUTLASS_DEVICE void add_bias(const Params &params, const Tile &tile, int n, float (&acc)[C::kMmas][Q / 2]) {
  using Out = typename C::Out;
  const Out *from = static_cast<const Out *>(params.ragged.offs ? params.ragged.bias : params.shapes[tile.group].bias);
  if (!from) return;
  if (params.ragged.offs) from += tile.group * params.ragged.stride_bias;
  const int p = tile.p + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  CUTE_UNROLL
  for (int i = 0; i < C::kMmas * 2; ++i) {
    const int at = p + i / 2 * 64 + i % 2 * 8;
    const float bias = at < n ? float(from[at]) : 0.f;
    CUTE_UNROLL
    for (int v = 0; v < Q / 2; ++v)
      if (v / 2 % 2 == i % 2) acc[i / 2][v] += bias;
  }
}

// Chunks that are being read by the TMA unit while the epilogue writes the next one.
template <class C>
inline constexpr int kStoring = C::kLoadsD ? 2 : C::Chunks - 1;

// A tile's chunks: with Q columns of accumulators, or of a full tile where load_d() hands them out.
template <class C, int Q>
inline constexpr int kChunksOf =
    C::kMmas * (((C::kLoadsD ? C::TileQ : Q) + (C::kTokensInK ? C::DChunk::kColumns : C::DChunk::kRows) - 1) /
                (C::kTokensInK ? C::DChunk::kColumns : C::DChunk::kRows));

// The epilogue's way to get hold of a chunk: free to write, or with what D holds there.
template <class C>
struct ChunkTurn {
  SharedStorage<C> &shared;
  const Tile &tile;
  const Destination<C> &d;
  const int warpgroup;
  const int phases;

  CUTLASS_DEVICE void take(int c, int it, int slot, int p, int q) const {
    const bool leader = threadIdx.x % 128 == 0;
    if constexpr (C::kLoadsD) {
      shared.d_full[slot].wait(it / C::Chunks & 1);
      compiler_fence();
      return;
    }
    shared.d_empty[slot].wait((phases >> slot ^ c / C::Chunks ^ 1) & 1);
    if constexpr (C::kAdds16) {
      if (leader) d.load(shared.d[slot], tile, p, q, shared.d_full[slot], (phases >> slot ^ c / C::Chunks) & 1);
      NamedBarrier::sync(128, kEpilogue + warpgroup);
    }
  }
};

// For the warpgroup's first thread: the last stores of tile number `pos` have been read, and their chunks are free. The
// other warpgroup need not wait for that before it begins.
template <class C, int Q>
CUTLASS_DEVICE void free_last_chunks(SharedStorage<C> &shared, int pos) {
  constexpr int kAll = kChunksOf<C, Q>;
  for_each(make_int_sequence<kStoring<C>>{}, [&](auto i) {
    constexpr int kBehind = kStoring<C> - 1 - decltype(i)::value;
    if constexpr (kAll > kBehind) {
      tma_store_wait<kBehind>();
      shared.d_empty[((C::kLoadsD ? pos * kAll : 0) + kAll - 1 - kBehind) % C::Chunks].arrive();
    }
  });
}

// Stores tile number `pos` of the CTA, Q columns of accumulators. The CTA's epilogues run one after the other.
template <class C, int Q, class Params>
CUTLASS_DEVICE void store_tile(const Params &params, SharedStorage<C> &shared, const Tile &tile, int warpgroup, int pos,
                               float (&acc)[C::kMmas][Q / 2]) {
  using Chunk = typename C::DChunk;
  constexpr int kChunkQ = C::kTokensInK ? Chunk::kColumns : Chunk::kRows;
  // load_d() hands out the chunks of a tile of 192 columns, whatever this one has.
  constexpr int kAll = kChunksOf<C, Q>, kPerMma = kAll / C::kMmas;
  constexpr bool k16 = sizeof(typename C::Out) == 2;
  const bool leader = threadIdx.x % 128 == 0;
  const bool add = C::kAdds16 || (C::kLoadsD && adds_in_registers(params, tile));
  const Destination<C> to = destination<C>(params, tile, params.accumulate && !add);
  compiler_fence();
  const int phases = shared.d_phases;  // a bit a chunk: whether it has been used an odd number of times
  compiler_fence();
  const ChunkTurn<C> turn{shared, tile, to, warpgroup, phases};
  if constexpr (!C::kTokensInK) add_bias<C, Q>(params, tile, to.n, acc);
  CUTE_UNROLL
  for (int c = 0; c < kAll; ++c) {
    const int mma = c / kPerMma, first_q = c % kPerMma * kChunkQ;
    const int it = C::kLoadsD ? pos * kAll + c : c, slot = it % C::Chunks;
    typename C::Out *chunk = shared.d[slot];
    turn.take(c, it, slot, mma * 64, first_q);
    if constexpr (C::kTokensInK && !k16) {
      static_assert(Q % kChunkQ == 0);
      if (first_q < Q) write_chunk_32_by_tokens(chunk, &acc[mma][first_q < Q ? first_q / 2 : 0], add);
    } else {
      CUTE_UNROLL
      for (int q = 0; q < kChunkQ; q += 16) {
        if (first_q + q >= Q) continue;
        cutlass::Array<float, 8> values;
        CUTE_UNROLL
        for (int v = 0; v < 8; ++v) values[v] = acc[mma][(first_q + q) / 2 + v];
        if constexpr (k16)
          write_block_16<C>(chunk, q, values);
        else
          write_block_32_by_rows<C>(chunk, q, values);
      }
    }
    tma_store_fence();
    NamedBarrier::sync(128, kEpilogue + warpgroup);
    if (leader) {
      to.store(chunk, tile, mma * 64, first_q);
      if (c >= kStoring<C>) {
        tma_store_wait<kStoring<C>>();
        shared.d_empty[(it - kStoring<C>) % C::Chunks].arrive();
      }
    }
  }
  if (!C::kLoadsD && leader) {
    int used = 0;
    for (int slot = 0; slot < C::Chunks; ++slot) used |= ((kAll - slot + C::Chunks - 1) / C::Chunks & 1) << slot;
    shared.d_phases = phases ^ used;
    compiler_fence();
  }
}

}  // namespace gmm::sm90::descriptor_array
