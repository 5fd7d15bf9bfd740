// The epilogues of gmm_epilogue, tokens in rows, 16-bit D. The product is rounded to D's dtype first, so that what
// comes out is what separate kernels for product and activation would give. Their arithmetic stands once, in a loop
// over blocks of 16 tokens: unrolled over the accumulators it is 60 KB of code for the backward of a full tile.
#pragma once

#include "cutlass/sm90/descriptor_array/store.cuh"

namespace gmm::sm90::descriptor_array {

// A thread's part of 16 tokens x 64 columns: as the accumulators, value v is token v / 4 * 8 + lane % 4 * 2 + v % 2 and
// row v / 2 % 2 * 8 + lane / 4 of its warp's 16 of P.
template <class Out>
using Block = cutlass::Array<Out, 8>;

CUTLASS_DEVICE int token_of(int v) { return v / 4 * 8 + threadIdx.x % 4 * 2 + v % 2; }

// The accumulators of a tile, rounded.
template <class Out, int Q>
struct Rounded {
  Block<Out> blocks[2][Q / 16];

  CUTLASS_DEVICE explicit Rounded(const float (&acc)[2][Q / 2]) {
    cutlass::NumericArrayConverter<Out, float, 8> convert;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int b = 0; b < Q / 16; ++b) {
        cutlass::Array<float, 8> values;
        CUTE_UNROLL
        for (int v = 0; v < 8; ++v) values[v] = acc[i][b * 8 + v];
        blocks[i][b] = convert(values);
      }
    }
  }

  // Registers have no index that is known only at run time: a binary search.
  template <int Begin = 0, int End = Q / 16>
  CUTLASS_DEVICE Block<Out> block(int mma, int index) const {
    if constexpr (End - Begin == 1) {
      return mma ? blocks[1][Begin] : blocks[0][Begin];
    } else {
      constexpr int kMiddle = (Begin + End) / 2;
      return index < kMiddle ? block<Begin, kMiddle>(mma, index) : block<kMiddle, End>(mma, index);
    }
  }
};

// Where the thread's line of a block lies in a box of 64 columns: the lanes of each eight have the lines of one 8 x 8
// matrix, (P, token), (P + 8, token), (P, token + 8), (P + 8, token + 8).
template <class Out>
CUTLASS_DEVICE uint128_t &line_of_block(Out *box, int token) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, matrix = lane / 8;
  return *reinterpret_cast<uint128_t *>(swizzled(box, token + matrix / 2 * 8 + lane % 8, warp * 16 + matrix % 2 * 8));
}

template <class Out>
CUTLASS_DEVICE void write_block(Out *box, int token, const Block<Out> &block) {
  const uint32_t *bits = reinterpret_cast<const uint32_t *>(&block);
  SM90_U16x8_STSM_T::copy(bits[0], bits[1], bits[2], bits[3], line_of_block(box, token));
}

template <class Out>
CUTLASS_DEVICE Block<Out> read_block(Out *box, int token) {
  Block<Out> block;
  uint32_t *bits = reinterpret_cast<uint32_t *>(&block);
  SM75_U16x8_LDSM_T::copy(line_of_block(box, token), bits[0], bits[1], bits[2], bits[3]);
  return block;
}

CUTLASS_DEVICE float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

// The routing weight of row `token` of the tile, 1 without any. Rows of the tile alone are read.
template <class Params>
CUTLASS_DEVICE float weight_of(const Params &params, const Tile &tile, int token) {
  const float *weights = params.swiglu.weights;
  return weights && tile.q + token < tile.q_end ? __ldg(weights + tile.q + token) : 1.f;
}

// A box of the tile's rows from `token` on. Stores see Encoder::store_rows(): rows after its last fall outside. No box
// may do so altogether: a cluster's second tile that is empty has nothing to store.
struct RowBoxes {
  const Tile &tile;
  int total;  // rows of the map

  CUTLASS_DEVICE void store(const CUtensorMap &map, const void *box, int column, int token) const {
    SM90_TMA_STORE_3D::copy(&map, box, column, total - (tile.q_end - tile.q) + token, tile.q_end);
  }
  // Rows after its last, of the next group, are read as well.
  CUTLASS_DEVICE void load(const CUtensorMap &map, TmaBarrier &full, void *box, int column, int token) const {
    SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t *>(&full), kHint, box, column, tile.q + token);
  }
};

// The first accumulators are the gate, the second the up half of the same columns. Chunks of 64 tokens: of gate, up and
// D, or D alone.
template <class C, int Q, class Params>
CUTLASS_DEVICE void store_swiglu(const Params &params, SharedStorage<C> &shared, const Tile &tile, int warpgroup,
                                 const float (&acc)[C::kMmas][Q / 2]) {
  using Out = typename C::Out;
  static_assert(C::kMmas == 2 && C::Chunks == 3 && C::TileQ <= 192 && C::DChunk::kRows == 64);
  if (tile.q == tile.q_end) return;
  const bool leader = threadIdx.x % 128 == 0, keeps = params.swiglu.h;
  const int lane = threadIdx.x % 32;
  const RowBoxes boxes{tile, params.ragged.total};
  const Rounded<Out, Q> product(acc);
  float weights[2];  // of the chunk's tokens `lane` and 32 + `lane`
  CUTE_NO_UNROLL
  for (int b = 0; b < Q / 16; ++b) {
    const int chunk = b / 4, token = b % 4 * 16;
    if (token == 0) {
      weights[0] = weight_of(params, tile, chunk * 64 + lane);
      weights[1] = weight_of(params, tile, chunk * 64 + 32 + lane);
      if (keeps && chunk > 0) {
        if (leader) tma_store_wait<0>();  // the chunks have been read
        NamedBarrier::sync(128, kEpilogue + warpgroup);
      }
    }
    const Block<Out> gate = product.block(0, b), up = product.block(1, b);
    const float half = token < 32 ? weights[0] : weights[1];
    cutlass::Array<float, 8> values;
    CUTE_UNROLL
    for (int v = 0; v < 8; ++v) {
      const float x = float(gate[v]);
      values[v] = x * sigmoid(x) * float(up[v]) * __shfl_sync(~0u, half, token % 32 + token_of(v));
    }
    cutlass::NumericArrayConverter<Out, float, 8> convert;
    Out *d = shared.d[keeps ? 2 : chunk];
    write_block(d, token, convert(values));
    if (keeps) {
      write_block(shared.d[0], token, gate);
      write_block(shared.d[1], token, up);
    }
    if (token < 48 && b < Q / 16 - 1) continue;
    tma_store_fence();
    NamedBarrier::sync(128, kEpilogue + warpgroup);
    if (leader) {
      boxes.store(params.maps[kMapD], d, tile.p / 2, chunk * 64);
      if (keeps) {
        boxes.store(params.maps[kMapGate], shared.d[0], tile.p / 2, chunk * 64);
        boxes.store(params.maps[kMapUp], shared.d[1], tile.p / 2, chunk * 64);
      }
      tma_store_arrive();
    }
  }
  if (leader) tma_store_wait<0>();  // chunks are free for the other warpgroup
}

// Writes the sums over a warp's 16 rows of P, of 32 tokens; value i of `sums` is token_of(i) of block i / 4.
template <class C, class Params>
CUTLASS_DEVICE void write_sums(const Params &params, const Tile &tile, int first, const float (&sums)[8]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  // The eight lanes of equal lane % 4 have the same tokens: each step adds two halves of them and keeps one of values.
  float four[4], two[2];
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const bool high = lane & 16;
    four[i] = (high ? sums[4 + i] : sums[i]) + __shfl_xor_sync(~0u, high ? sums[i] : sums[4 + i], 16);
  }
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    const bool high = lane & 8;
    two[i] = (high ? four[2 + i] : four[i]) + __shfl_xor_sync(~0u, high ? four[i] : four[2 + i], 8);
  }
  const bool high = lane & 4;
  const float sum = (high ? two[1] : two[0]) + __shfl_xor_sync(~0u, high ? two[0] : two[1], 4);
  const int index = (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
  const int token = tile.q + first + index / 4 * 16 + token_of(index % 4 / 2 * 4 + index % 2);
  if (token < tile.q_end) params.swiglu.sums[int64_t(tile.p / C::TileP * 4 + warp) * params.ragged.total + token] = sum;
}

// The accumulators are the gradient of what store_swiglu() stored. Steps of 32 tokens x 64 columns: gate and up come by
// TMA into a chunk, and their gradients go back from it.
template <class C, int Q, class Params>
CUTLASS_DEVICE void store_swiglu_backward(const Params &params, SharedStorage<C> &shared, const Tile &tile,
                                          int warpgroup, const float (&acc)[C::kMmas][Q / 2]) {
  using Out = typename C::Out;
  constexpr int kTokens = kBoxRowsBackward, kSteps = (Q + kTokens - 1) / kTokens * 2, kBox = kTokens * 64;
  static_assert(C::kMmas == 2 && kTokens == 32 && sizeof(shared.d[0]) == 2 * kBox * sizeof(Out));
  if (tile.q == tile.q_end) return;
  const bool leader = threadIdx.x % 128 == 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const RowBoxes boxes{tile, params.ragged.total};
  const auto load = [&](int step) {
    TmaBarrier &full = shared.d_full[step % C::Chunks];
    Out *chunk = shared.d[step % C::Chunks];
    const int column = tile.p + step % 2 * 64, token = step / 2 * kTokens;
    full.arrive_and_expect_tx(2 * kBox * sizeof(Out));
    boxes.load(params.maps[kMapGate], full, chunk, column, token);
    boxes.load(params.maps[kMapUp], full, chunk + kBox, column, token);
  };
  compiler_fence();
  const int phases = shared.d_phases;
  compiler_fence();
  if (leader)
    for (int step = 0; step < min(C::Chunks, kSteps); ++step) load(step);
  const Rounded<Out, Q> product(acc);
  float sums[8] = {};
  CUTE_NO_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    const int slot = step % C::Chunks, mma = step % 2, first = step / 2 * kTokens, p = tile.p + mma * 64;
    const float weight = weight_of(params, tile, first + lane);
    const bool in_n[2] = {p + warp * 16 + lane / 4 < params.ragged.n, p + warp * 16 + 8 + lane / 4 < params.ragged.n};
    Out *gates = shared.d[slot], *ups = gates + kBox;
    shared.d_full[slot].wait((phases >> slot ^ step / C::Chunks) & 1);
    compiler_fence();
    CUTE_UNROLL
    for (int b = 0; b < 2; ++b) {
      if (first + b * 16 >= Q) continue;
      const Block<Out> gradient = product.block(mma, first / 16 + b);
      Block<Out> gate = read_block(gates, b * 16), up = read_block(ups, b * 16);
      cutlass::Array<float, 8> to_gate, to_up;
      CUTE_UNROLL
      for (int v = 0; v < 8; ++v) {
        const float x = float(gate[v]), y = float(up[v]), s = sigmoid(x), silu = x * s;
        const float dy = float(gradient[v]);
        // Columns after the last: the product is 0, or NaN of a row that has Inf.
        sums[b * 4 + v / 4 * 2 + v % 2] += in_n[v / 2 % 2] ? dy * silu * y : 0.f;
        const float weighted = dy * __shfl_sync(~0u, weight, b * 16 + token_of(v));
        to_up[v] = weighted * silu;
        to_gate[v] = weighted * (s * (1.f + x * (1.f - s))) * y;
      }
      cutlass::NumericArrayConverter<Out, float, 8> convert;
      write_block(gates, b * 16, convert(to_gate));
      write_block(ups, b * 16, convert(to_up));
    }
    if (mma == 1) {
      if (params.swiglu.sums) write_sums<C>(params, tile, first, sums);
      CUTE_UNROLL
      for (float &sum : sums) sum = 0.f;
    }
    tma_store_fence();
    NamedBarrier::sync(128, kEpilogue + warpgroup);
    if (leader) {
      if (p < params.ragged.n) {
        boxes.store(params.maps[kMapD], gates, p, first);
        boxes.store(params.maps[kMapUpD], ups, p, first);
      }
      tma_store_arrive();
      if (step > 0 && step + 2 < kSteps) {
        tma_store_wait<1>();  // the chunk of the step before has been read
        load(step + 2);
      }
    }
  }
  if (leader) {
    int used = 0;  // a bit a chunk: whether the tile has used it an odd number of times
    for (int slot = 0; slot < C::Chunks; ++slot) used |= ((kSteps - slot + C::Chunks - 1) / C::Chunks & 1) << slot;
    shared.d_phases = phases ^ used;
    compiler_fence();
    tma_store_wait<0>();  // chunks are free for the other warpgroup
  }
}

}  // namespace gmm::sm90::descriptor_array
