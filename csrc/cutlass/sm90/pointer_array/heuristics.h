// Which lists the pointer-array kernels take, and which of the kernels suits one. Pure host code, no CUDA needed.
#pragma once

#include <cstddef>
#include <string>

#include "cutlass/sm90/kernels.h"
#include "gmm/gmm.h"

namespace gmm::sm90::pointer_array {

// Fastest up to K of a few thousand: one warpgroup's epilogue hides behind the other's mainloop.
inline constexpr Kernel k128x192{
    "sm90_pointer_array_128x192x64_pingpong_2x1", Family::kPointerArray, 128, 192, 64, 2, 1, true};

// Least operand traffic per FLOP, for long K.
inline constexpr Kernel k128x256{
    "sm90_pointer_array_128x256x64_cooperative_2x1", Family::kPointerArray, 128, 256, 64, 2, 1, false};

// Few rows a group: little padding, and no cluster whose second tile would lie past the last row.
inline constexpr Kernel k64x128{
    "sm90_pointer_array_64x128x128_pingpong_1x1", Family::kPointerArray, 64, 128, 128, 1, 1, true};

inline constexpr const Kernel *kKernels[] = {&k128x192, &k128x256, &k64x128};

// Whether the list (checked arguments) can run here. `why`, when not null, gets the reason of a refusal.
bool accepts(const gmm_args &args, std::string *why);

// Whether the bias can be C, which TMA reads: every vector 16-byte aligned.
bool takes_bias(const gmm_args &args);

// The kernel for a list that accepts() took. Looks at shapes only. `sm_count`: SMs to use, margin already taken off.
const Kernel &choose(const gmm_args &args, int sm_count);

// What run() needs for that many groups with M, N and K > 0.
size_t workspace_bytes(int products, int sm_count);

// Kernels that run() launches for that many groups.
int launches(int products);

// Which way tiles follow one another: along M when D is wider than high. Tiles that run at the same time then span all
// of the shorter operand and a slice of the longer one, so both are read from DRAM about once.
bool raster_along_m(const gmm_args &args);

}  // namespace gmm::sm90::pointer_array
