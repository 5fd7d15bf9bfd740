// The descriptor-array kernels: which calls they take, and with which tile. Pure host code.
#pragma once

#include <string>

#include "cutlass/sm90/kernels.h"
#include "gmm/gmm.h"

namespace gmm::sm90::descriptor_array {

// What fits into the parameters of one launch: 4 KB, which every launch can afford, or the 32,764 bytes that CUDA
// allows (about 2.5 us slower to launch on an H200).
struct Capacity {
  int maps, groups;
};
inline constexpr Capacity kSmall{22, 22}, kLarge{198, 148};

// For a counter of tiles.
inline constexpr int kWorkspaceBytes = 32;

// Beyond this many launches the pointer array, with one launch for any number of groups, is the better kernel.
inline constexpr int kMaxLaunches = 2;

// Tokens in rows: forward and dgrad.
inline constexpr Kernel k192x128{
    "sm90_descriptor_array_192x128x64_pingpong_1x2", Family::kDescriptorArray, 192, 128, 64, 1, 2, true};

// Few rows a group: the weights' traffic sets the time. Narrow tiles keep more SMs reading, wide ones read the tokens
// less often.
inline constexpr Kernel k128x64{
    "sm90_descriptor_array_128x64x64_pingpong_1x1", Family::kDescriptorArray, 128, 64, 64, 1, 1, true};

inline constexpr Kernel k128x128{
    "sm90_descriptor_array_128x128x64_pingpong_1x1", Family::kDescriptorArray, 128, 128, 64, 1, 1, true};

// Tokens in K: wgrad.
inline constexpr Kernel k128x192{
    "sm90_descriptor_array_128x192x64_pingpong_2x1", Family::kDescriptorArray, 128, 192, 64, 2, 1, true};

// Tokens in rows, with the epilogues of that name.
inline constexpr Kernel kSwiglu{
    "sm90_descriptor_array_192x128x64_pingpong_1x2_swiglu", Family::kDescriptorArray, 192, 128, 64, 1, 2, true};
inline constexpr Kernel kSwigluBackward{"sm90_descriptor_array_192x128x64_pingpong_1x2_swiglu_backward",
                                        Family::kDescriptorArray,
                                        192,
                                        128,
                                        64,
                                        1,
                                        2,
                                        true};

inline constexpr const Kernel *kKernels[] = {&k192x128, &k128x64, &k128x128, &k128x192, &kSwiglu, &kSwigluBackward};

// How many launches the groups with a product take, and whether the one has small parameters.
struct Launches {
  int count;
  bool small;
};

// True when every condition of these kernels holds:
//   - bf16 or fp16 in; D in the same dtype, or fp32;
//   - A row-major and B all row-major or all column-major (tokens in rows); or A column-major and B row-major, without
//     bias (tokens in K);
//   - pointers 16-byte aligned; leading dimensions, strides of a batch and the rows of D multiples of 16 bytes;
//   - epilogue: enough rows a group for the wide tiles, which alone have one; h as D;
//   - list: at most kMaxLaunches launches; one with small parameters for rows into fp32, and for 16-bit accumulation.
// Then `launches` is set; otherwise the reason in `why`, which may be null.
bool accepts(const gmm_args &args, Launches &launches, std::string *why);

// Whether that kernel can take the accepted call.
bool takes(const Kernel &kernel, const gmm_args &args);

// The kernel for accepted arguments. `sm_count`: SMs to use, margin already taken off.
const Kernel &choose(const gmm_args &args, int sm_count);

// Whether a kernel with tokens in rows reads D: 16-bit, which it adds to in registers. Then D has a second map.
inline bool reads_d(const gmm_args &args) {
  return args.accumulate && args.d_dtype != GMM_FP32 && args.num_groups > 0 && !args.a[0].column_major;
}

// Whether the rows of `next` follow those of `previous` in one buffer, as slices of it do: one map serves both.
bool continues(const gmm_matrix &previous, const gmm_matrix &next, int element_bytes);

// List form: extent of a tile of `kernel` along Q at most. Tokens in rows: rows of D, a multiple of 16, and groups are
// cut into equal tiles of at most that. Tokens in K: columns of D. In the ragged forms the kernel chooses.
int choose_tile_q(const gmm_args &args, const Kernel &kernel, int sm_count);

// Up to so many rows a group, reading the weights takes the time: no multicast, but narrower tiles or more stages. At
// 64 rows those are 2 to 6 % ahead of the wide tiles, at 90 rows of 128 groups 4 % behind and at 96 of 8 groups 2 %
// ahead (768 to 5760 columns, H200).
inline constexpr int kFewRows = 80;

// Up to so many tokens a group, a tile takes as long as its memory traffic: of the weights, or with tokens in K of D.
int few_tokens(const gmm_args &args, const Kernel &kernel);

// How many clusters take tiles from the back of the schedule, where those with few tokens are: of all, the part that
// these are of the work, but half at most. A tile's work is its tokens and kTileOverhead. In the kernel, too.
inline constexpr int kTileOverhead = 256;
constexpr int choose_clusters_at_back(int clusters, float few_work, float work) {
  return work > 0 ? int(float(clusters) * (few_work < work / 2 ? few_work / work : .5f) + .5f) : 0;
}

// Tokens of a group from which on the L2 adds the product to D (TMA reduction), not the kernel. Measured with the
// prototype alone, in TFLOP/s on an H200, fp32 D: 704 by the L2 and 670 by the kernel with large groups, 311 and 397
// with small ones.
inline constexpr int kAddInL2 = 2048;

}  // namespace gmm::sm90::descriptor_array
