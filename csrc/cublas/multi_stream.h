// Grouped GEMM as one cuBLAS call a group, spread over several streams.
#pragma once

#include <cuda_runtime_api.h>

#include "core/plan.h"

namespace gmm::cublas {

// D = A @ B (+ D when the plan adds to it) for the groups with work. The work forks from `stream` into plan.streams
// streams of a pool and joins it again before the call returns, all by events: the host never waits.
void run(const gmm_args &args, const Plan &plan, void *workspace, const Device &device, cudaStream_t stream);

}  // namespace gmm::cublas
