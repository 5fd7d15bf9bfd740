// Grouped GEMM with one TMA descriptor for each operand of each group, passed by value in the kernel's parameters.
#pragma once

#include <cuda_runtime_api.h>

#include "core/plan.h"

namespace gmm::sm90::descriptor_array {

// The products of the call, in stream order. `args` were accepted (heuristics.h); `workspace` is of kWorkspaceBytes;
// uses `sm_count` SMs.
void run(const gmm_args &args, const Plan &plan, void *workspace, int sm_count, cudaStream_t stream);

}  // namespace gmm::sm90::descriptor_array
