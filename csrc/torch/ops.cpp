// torch.ops.gmm.*: the schemas, and which function is the CUDA implementation of each, on LibTorch's stable ABI (torch
// >= 2.10; no Python, no CUDA headers). Tensors are checked, described as gmm_matrix, and handed to gmm.h. The CPU
// implementation, the fake kernels and autograd are registered in python/gmm.
#include <torch/csrc/stable/library.h>

#include "torch/kernels.h"

// `backend`: see set_backend() in check.h. multi_tensor_gemm_reference is Python's: torch.mm for each group, on any
// device.
#define GMM_GEMM_SCHEMA                                                                                       \
  "(Tensor[] a, Tensor[] b, Tensor(c!)[] d, Tensor[]? bias=None, *, bool trans_a=False, bool trans_b=False, " \
  "bool accumulate=False, bool allow_tf32=False, int sm_margin=0, str backend=\"auto\")"
#define GMM_MM_SCHEMA                                                                         \
  "(Tensor[] a, Tensor[] b, Tensor[]? bias=None, *, bool trans_a=False, bool trans_b=False, " \
  "ScalarType? out_dtype=None, bool allow_tf32=False, int sm_margin=0, str backend=\"auto\") -> Tensor[]"

// In grouped_mm_python, csrc/torch/grouped_mm.cpp hands over the calls that CUTLASS does not take. Ops that return a
// str give the text of their error: see call_python_checked() in call.h.
#define GMM_GROUPED_OUT_SCHEMA                                                               \
  "(Tensor a, Tensor b, Tensor? offs, Tensor? bias, Tensor(e!) out, *, bool trans_b=False, " \
  "bool accumulate=False, bool allow_tf32=False, int sm_margin=0, str backend=\"auto\")"

STABLE_TORCH_LIBRARY(gmm, m) {
  m.def("multi_tensor_gemm" GMM_GEMM_SCHEMA " -> ()");
  m.def("multi_tensor_gemm_reference" GMM_GEMM_SCHEMA " -> str");
  m.def("multi_tensor_mm" GMM_MM_SCHEMA);
  m.def(
      "grouped_mm(Tensor a, Tensor b, Tensor? offs=None, Tensor? bias=None, *, ScalarType? out_dtype=None, "
      "bool trans_b=False, bool allow_tf32=False, int sm_margin=0, str backend=\"auto\") -> Tensor");
  m.def("grouped_mm_out" GMM_GROUPED_OUT_SCHEMA " -> ()");
  m.def("grouped_mm_python" GMM_GROUPED_OUT_SCHEMA " -> str");
  m.def(
      "swiglu_cutlass(Tensor a, Tensor b, Tensor offs, Tensor? weights, Tensor(h!)? h, Tensor(y!) y, *, "
      "int sm_margin=0) -> str");
  m.def(
      "swiglu_backward_cutlass(Tensor dy, Tensor b, Tensor h, Tensor offs, Tensor? weights, Tensor(d!) dh, "
      "Tensor(p!)? parts, *, int sm_margin=0) -> str");
  m.def("check_offsets(Tensor offs, int total) -> str");
  m.def("warn(str text) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gmm, CUDA, m) {
  m.impl("multi_tensor_gemm", &gmm::multi_tensor_gemm);
  m.impl("multi_tensor_mm", &gmm::multi_tensor_mm);
  m.impl("grouped_mm", &gmm::grouped_mm);
  m.impl("grouped_mm_out", &gmm::grouped_mm_out);
  m.impl("swiglu_cutlass", &gmm::swiglu_cutlass);
  m.impl("swiglu_backward_cutlass", &gmm::swiglu_backward_cutlass);
}
