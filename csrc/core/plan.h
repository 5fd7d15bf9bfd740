// The choice of backend and kernel: pure host code, no GPU needed. The one place that makes it.
#pragma once

#include <array>
#include <string>

#include "core/device.h"
#include "cutlass/sm90/kernels.h"
#include "gmm/gmm.h"

namespace gmm {

struct Plan {
  gmm_backend backend = GMM_BACKEND_AUTO;
  const sm90::Kernel *kernel = nullptr;  // GMM_BACKEND_CUTLASS
  int streams = 1;                       // GMM_BACKEND_CUBLAS: the caller's included
  int products = 0;                      // groups with M, N and K > 0: what the backend computes
  bool fill = false;                     // core/fill.h runs before the backend
  bool fill_all = false;                 // it writes the bias of every group, not only of those with K = 0
  int launches = 0;                      // kernels or cuBLAS calls, without the fill
  size_t workspace_bytes = 0;

  // Whether the backend adds to what D holds when it starts.
  bool adds_to_d(const gmm_args &args) const { return args.accumulate || fill_all; }
};

// By gmm_backend: why it was not chosen; for the chosen one, why it was.
using Reasons = std::array<std::string, GMM_NUM_BACKENDS>;

const char *backend_name(gmm_backend backend);

// Throws GMM_ERROR_INVALID_ARGUMENT when the call contradicts itself.
void check_args(const gmm_args &args);

// The plan for checked arguments. Throws GMM_ERROR_UNSUPPORTED when the backend asked for, or every backend, refuses.
// `reasons` may be null; texts are made only when it is not, or for the error.
Plan make_plan(const gmm_args &args, const Device &device, Reasons *reasons);

}  // namespace gmm
