// The GEMM launch behind the set-up kernel. No CUTLASS here: gemm.cuh defines it, instantiations/ compile it.
#pragma once

#include <cuda_runtime_api.h>

#include "cutlass/sm90/kernels.h"
#include "cutlass/sm90/pointer_array/workspace.h"
#include "gmm/gmm.h"

namespace gmm::sm90::pointer_array {

struct Gemm {
  Workspace workspace;
  int products;
  bool a_column_major, b_column_major;
  gmm_dtype d_dtype;
  bool add_c;  // D = A @ B + C; else C is never read
  bool raster_along_m;
  int device;
  int sm_count;
};

// Launches one kernel, with programmatic dependent launch: it starts early and waits for the kernel before it.
template <const Kernel &kKernel, gmm_dtype kDtype>
void launch_gemm(const Gemm &gemm, cudaStream_t stream);

}  // namespace gmm::sm90::pointer_array
