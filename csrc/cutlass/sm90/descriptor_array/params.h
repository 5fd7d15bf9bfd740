// What a launch is given, all by value: it stays in constant memory, so nothing is copied and nothing can be
// overwritten.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cutlass/sm90/descriptor_array/heuristics.h"

namespace gmm::sm90::descriptor_array {

// Boxes of one TMA copy, in elements: inner extent x lines. A box is 64 of K wide, one swizzle atom of 128 bytes; or,
// where K is not the contiguous dimension, 64 of the other.
inline constexpr int kBlockK = 64;
inline constexpr int kBoxRowsA = 32;                          // tokens: a tile loads as many boxes as its rows need
inline constexpr int kBoxRowsB = 64;                          // weights
inline constexpr int kBoxTokensA = 64;                        // tokens in K
inline constexpr int kTokensCluster = k128x192.cluster_m;     // tokens in K
inline constexpr int kBoxTokensB = kBlockK / kTokensCluster;  // so that each CTA of a cluster can load one for all

// Rows of the boxes in which the backward epilogue reads h and writes its gradient: a box of each half is 8 KB.
inline constexpr int kBoxRowsBackward = 32;

// D leaves in chunks of 8 KB.
template <int ElementBytes, bool TokensInK>
struct Chunk {
  static constexpr int kBoxColumns = 128 / ElementBytes;  // one swizzle atom
  // Tokens in rows: 64 columns, in one box or two. Tokens in K: 64 rows, of one box.
  static constexpr int kColumns = TokensInK ? kBoxColumns : 64;
  static constexpr int kRows = 8192 / ElementBytes / kColumns;
};

// A group of the list form. Its matrices are rows of a map's: groups whose rows follow one another share one.
struct GroupShape {
  int m, n, k;
  int tiles_end;     // cluster tiles of this launch up to and with this group
  int row_a, row_d;  // where the group's rows begin in its maps of A and D
  int rows_d;        // rows of its map of D
  uint16_t map_a, map_b, map_d;
  const void *bias;
};

// The ragged forms: one map an operand, at fixed places, and the groups' ends in device memory.
struct RaggedGroups {
  const void *offs;  // null: the list form
  int32_t offs_int64;
  int total;    // tokens, T
  int m, n, k;  // of all groups; the ragged one is unused
  const void *bias;
  int64_t stride_bias;  // elements
};
// With an epilogue's D of two halves, kMapD is the first.
enum RaggedMap { kMapA, kMapB, kMapD, kMapOldD, kMapTailA, kMapTailB, kMapUpD, kMapGate, kMapUp, kRaggedMaps };

// Rows of D, of 16-byte pieces, for those that have no product (zeros.cuh). In bytes.
struct RowsOfD {
  char *data;
  int64_t ld, stride;  // between rows; between groups (tokens in K)
  int64_t bytes;       // of a row
};

// Of gmm_epilogue, in a ragged form.
struct SwigluParams {
  const float *weights;
  float *sums;
  char *h;       // what the forward one keeps, or null
  int64_t ld_h;  // bytes
};

// See counter.cuh.
struct TileCounter {
  uint64_t *workspace;  // kWorkspaceBytes
  uint64_t tag;         // no other launch's; not 0
};

// Maps, by operand. Tokens in rows: A (K, rows); B (K, N, batch), or (N, K, batch) when it is row-major; D (N, rows,
// rows + 1), see encode.h, and behind it D as it is read (N, rows), where it is added to in registers. Tokens in K: A
// (M, tokens), B (N, tokens), D (N, M, batch). What the scheduler needs first stands first: each line of constant
// memory is a miss of its own.
template <int kMaps, int kGroups>
struct ParamsOf {
  RaggedGroups ragged;
  TileCounter counter;
  int groups;
  int tile_q;  // list form: extent of a tile along Q at most: rows of D; with tokens in K columns
  int accumulate;
  int few_tokens;        // ragged forms: see heuristics.h
  int clusters_at_back;  // list form: see schedule.cuh
  int add_in_l2;         // tokens in K, accumulating: from so many tokens on D is added to by the L2, not by the kernel
  RowsOfD d;             // ragged forms
  CUtensorMap maps[kMaps];
  GroupShape shapes[kGroups];
  SwigluParams swiglu;
};
using SmallParams = ParamsOf<kSmall.maps, kSmall.groups>;
using LargeParams = ParamsOf<kLarge.maps, kLarge.groups>;
static_assert(sizeof(SmallParams) <= 4096 && sizeof(LargeParams) <= 32764, "kernel parameters");

// Launches one kernel over params.groups groups; defined for each dtype in instantiations/.
template <gmm_dtype, class Params>
void launch(const Kernel &kernel, bool b_column_major, bool d_fp32, const Params &params, int sm_count,
            cudaStream_t stream);

// The same for kernels with an epilogue: kSwiglu and kSwigluBackward.
template <gmm_dtype>
void launch_swiglu(const Kernel &kernel, bool b_column_major, const SmallParams &params, int sm_count,
                   cudaStream_t stream);

}  // namespace gmm::sm90::descriptor_array
