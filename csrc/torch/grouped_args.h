// From the tensors of a call of grouped_mm, alone or with an epilogue, to a gmm_args for CUTLASS.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdint>

#include "gmm/gmm.h"
#include "torch/check.h"
#include "torch/grouped.h"
#include "torch/tensor_list.h"

namespace gmm {

inline Operand operand(const TensorView &t, const void *data) {
  const int64_t *sizes = t.sizes + t.dim - 2, *strides = t.strides + t.dim - 2;
  return {{const_cast<void *>(data), sizes[0], sizes[1], strides[0], strides[1]}, t.dim == 3 ? t.strides[0] : 0};
}

// Fills in `args`, which then points into `matrices`; not what is an option of one op alone. Returns null, or why
// CUTLASS cannot take the call.
inline const char *describe_args(const GroupedCall &call, const TensorView &a, int32_t d_dtype,
                                 const TensorArgument &offs, int64_t sm_margin, gmm_args &args,
                                 GroupedMatrices &matrices) {
  args.struct_size = sizeof args;
  if (const char *refusal = describe_grouped(call, args, matrices)) return refusal;
  if (offs.present() && offs->strides[0] != 1 && call.groups > 1) return "it reads contiguous offs";
  args.ab_dtype = to_gmm_dtype(a.dtype);
  args.d_dtype = to_gmm_dtype(d_dtype);
  args.sm_margin = static_cast<int32_t>(std::min<int64_t>(sm_margin, INT32_MAX));
  args.device = a.device_index;
  args.backend = GMM_BACKEND_CUTLASS;
  if (offs.present()) {
    args.offs = offs->data();
    args.offs_int64 = offs->dtype == aoti_torch_dtype_int64();
  }
  return nullptr;
}

}  // namespace gmm
