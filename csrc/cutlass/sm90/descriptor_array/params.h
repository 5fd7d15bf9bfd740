// What a launch is given, all by value: it stays in constant memory, so nothing is copied and nothing can be
// overwritten.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cutlass/sm90/descriptor_array/heuristics.h"

namespace gmm::sm90::descriptor_array {

// Boxes of one TMA copy, in elements: inner extent x rows.
inline constexpr int kBlockK = 64;    // 128 bytes, one swizzle atom
inline constexpr int kBoxRowsA = 32;  // a tile loads as many boxes as its rows need
inline constexpr int kBoxRowsB = 64;
inline constexpr int kChunk = 64;  // D leaves in chunks of up to 64 rows x 64 columns

struct GroupShape {
  int m, n, k;
  int tiles_end;     // cluster tiles of this launch up to and with this group
  int row_a, row_d;  // where the group's rows begin in its maps of A and D
  int rows_d;        // rows of its map of D
  uint16_t map_a, map_b, map_d;
};

// Maps, by operand: A (K, rows); B (K, N), or (N, K) when B is row-major; D (N, rows, rows + 1), see
// descriptor_array.cpp. Groups whose rows follow one another in one buffer share a map.
template <int kMaps, int kGroups>
struct ParamsOf {
  CUtensorMap maps[kMaps];
  GroupShape shapes[kGroups];
  int groups;
  int tile_rows;  // rows of D of a tile at most, a multiple of 16
};
using SmallParams = ParamsOf<kSmall.maps, kSmall.groups>;
using LargeParams = ParamsOf<kLarge.maps, kLarge.groups>;
static_assert(sizeof(SmallParams) <= 4096 && sizeof(LargeParams) <= 32764, "kernel parameters");

// Launches one kernel over params.groups groups; defined for each dtype in instantiations/.
template <gmm_dtype, class Params>
void launch(const Kernel &kernel, bool b_column_major, const Params &params, int sm_count, cudaStream_t stream);

}  // namespace gmm::sm90::descriptor_array
