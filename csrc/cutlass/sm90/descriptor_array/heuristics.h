// The descriptor-array kernels: which calls they take, and with which tile. Pure host code.
#pragma once

#include "cutlass/sm90/kernels.h"
#include "gmm/gmm.h"

namespace gmm::sm90::descriptor_array {

// What fits into the parameters of one launch: 4 KB, which every launch can afford, or the 32,764 bytes that CUDA
// allows (about 2.5 us slower to launch on an H200).
struct Capacity {
  int maps, groups;
};
inline constexpr Capacity kSmall{24, 24}, kLarge{210, 150};

// Beyond this many launches the pointer array, with one launch for any number of groups, is the better kernel.
inline constexpr int kMaxLaunches = 2;

inline constexpr Kernel k192x128{
    "sm90_descriptor_array_192x128x64_pingpong_1x2", Family::kDescriptorArray, 192, 128, 64, 1, 2, true};

// Few rows a group: the weights' traffic sets the time, and narrow tiles keep more SMs reading.
inline constexpr Kernel k128x64{
    "sm90_descriptor_array_128x64x64_pingpong_1x1", Family::kDescriptorArray, 128, 64, 64, 1, 1, true};

inline constexpr const Kernel *kKernels[] = {&k192x128, &k128x64};

// True when every condition of the fast path holds:
//   - bf16 or fp16 in, D in the same dtype, neither bias nor accumulation;
//   - A row-major; B all row-major or all column-major;
//   - pointers 16-byte aligned; leading dimensions, and N, multiples of 8 elements;
//   - at most kMaxLaunches launches.
bool accepts(const gmm_args &args);

// The kernel for accepted arguments.
const Kernel &choose(const gmm_args &args);

// Whether the rows of `next` follow those of `previous` in one buffer, as slices of it do: one map serves both.
bool continues(const gmm_matrix &previous, const gmm_matrix &next);

// How many launches the groups with a product take.
int launches(const gmm_args &args);

// Rows of A that a tile of `kernel` takes at most, a multiple of 16. Groups are cut into equal tiles of at most that.
int choose_tile_rows(const gmm_args &args, const Kernel &kernel, int sm_count);

}  // namespace gmm::sm90::descriptor_array
