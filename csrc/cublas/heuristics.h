// Multi-stream cuBLAS: what it takes and how many streams it uses. Pure host code.
#pragma once

#include <cstddef>
#include <string>

#include "gmm/gmm.h"

namespace gmm::cublas {

// Device memory that each stream's cuBLAS handle gets as its workspace: what cuBLAS's documentation recommends.
size_t workspace_bytes_per_stream(int sm);

// True when cuBLAS can take the call; `why`, when not null, gets the reason when it cannot.
bool accepts(const gmm_args &args, int sm, std::string *why);

// Streams to use, the caller's included: one a group, at most GMM_CUBLAS_STREAMS (4). On an H200 four streams beat one
// by 2 to 21 % at nine of ten shapes, also where a single product fills the GPU: the next one's first tiles run beside
// its last ones (docs/performance.md). One where each product has thousands of tiles, and the last ones are nothing to
// it: four then lose 2 %.
int choose_streams(const gmm_args &args);

}  // namespace gmm::cublas
