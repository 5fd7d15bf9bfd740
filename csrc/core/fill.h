// Writes what D holds where no product does: zeros or the bias.
#pragma once

#include <cuda_runtime_api.h>

#include "gmm/gmm.h"

namespace gmm {

// For each group with K = 0, or for every group when `all_groups` is set:
//   D = bias (0 without bias), or with accumulate D += bias.
// Launches as few kernels as the groups' by-value table allows; nothing when there is nothing to write.
void fill(const gmm_args &args, bool all_groups, cudaStream_t stream);

}  // namespace gmm
