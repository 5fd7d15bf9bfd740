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

// Streams worth using for these groups, the caller's included: at most GMM_CUBLAS_STREAMS (4).
int choose_streams(const gmm_args &args, int sm_count);

}  // namespace gmm::cublas
