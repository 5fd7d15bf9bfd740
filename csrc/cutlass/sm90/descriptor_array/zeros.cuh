// Zeros, where no product is: D of groups without tokens (tokens in K), and rows of no group. A warp that has nothing
// else to do writes them beside the products; as tiles of the schedule they came after these.
#pragma once

#include "cutlass/sm90/descriptor_array/ends.cuh"

namespace gmm::sm90::descriptor_array {

// One row, by a warp. The L2 need not keep it. The pauses leave the products their share of memory: into fp32, with all
// 65536 tokens in one group of 64, 2048 x 2048, the call took 1240 us without them, and 860 and 852 with ones of 200
// and 400 ns a row, where these are of 256 (H200).
CUTLASS_DEVICE void zero_row(char *row, int64_t bytes) {
  constexpr int kBytesPerNs = 32;
#pragma unroll 4
  for (int64_t at = threadIdx.x % 32 * 16; at < bytes; at += 32 * 16)
    __stcs(reinterpret_cast<int4 *>(row + at), int4{});
  __nanosleep(unsigned(min(bytes / kBytesPerNs, int64_t(1000))));
}

template <class Params>
CUTLASS_DEVICE void write_zeros_of_groups(const Params &params) {
  const RowsOfD &d = params.d;
  Ends ends(params);
  int row = blockIdx.x;  // of those of all groups without tokens, one after the other
  for (int window = 0; window < params.groups; window += 32) {
    ends.load(window);
    const int lane = threadIdx.x % 32;
    unsigned empty = __ballot_sync(~0u, window + lane < params.groups && ends.begin == ends.end);
    for (; empty; empty &= empty - 1) {
      char *matrix = d.data + (window + __ffs(empty) - 1) * d.stride;
      for (; row < params.ragged.m; row += gridDim.x) zero_row(matrix + row * d.ld, d.bytes);
      row -= params.ragged.m;
    }
  }
}

// Without a product at all, as K = 0, all rows are as those after the last group.
template <class C, class Params>
CUTLASS_DEVICE void write_zeros_after_groups(const Params &params) {
  const RowsOfD &d = params.d;
  const SwigluParams &swiglu = params.swiglu;
  const int total = params.ragged.total;
  Ends ends(params);
  if (params.ragged.k > 0)
    for (int window = 0; window < params.groups; window += 32) ends.load(window);
  const int first = __shfl_sync(~0u, ends.end, (params.groups - 1) & 31);
  for (int row = first + blockIdx.x; row < total; row += gridDim.x) {
    zero_row(d.data + row * d.ld, d.bytes);
    if (C::kEpilogue == GMM_EPILOGUE_SWIGLU && swiglu.h) zero_row(swiglu.h + row * swiglu.ld_h, 2 * d.bytes);
  }
  if (C::kEpilogue == GMM_EPILOGUE_SWIGLU_BACKWARD && swiglu.sums)
    for (int line = blockIdx.x; line < (params.ragged.n + C::TileP - 1) / C::TileP * 4; line += gridDim.x)
      for (int row = first + threadIdx.x % 32; row < total; row += 32) swiglu.sums[int64_t(line) * total + row] = 0.f;
}

template <class C, class Params>
CUTLASS_DEVICE void write_zeros(const Params &params) {
  if (!params.ragged.offs || params.accumulate) return;
  cutlass::arch::wait_on_dependent_grids();
  if constexpr (C::kTokensInK)
    write_zeros_of_groups(params);
  else
    write_zeros_after_groups<C>(params);
}

}  // namespace gmm::sm90::descriptor_array
