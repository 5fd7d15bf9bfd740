// Grouped GEMM of any list through CUTLASS's pointer-array kernels: one set-up kernel and one GEMM.
#pragma once

#include <cuda_runtime_api.h>

#include "core/plan.h"
#include "gmm/gmm.h"

namespace gmm::sm90::pointer_array {

// D = A @ B (+ D, or + bias) for the groups with M, N and K > 0; the others are not touched. The list must be one that
// accepts() takes, `workspace` at least workspace_bytes() large and 256-byte aligned, args.device current.
// Asynchronous.
void run(const gmm_args &args, const Plan &plan, void *workspace, int sm_count, cudaStream_t stream);

}  // namespace gmm::sm90::pointer_array
