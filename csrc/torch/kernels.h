// The CUDA kernels of torch.ops.gmm, boxed by hand: each reads its arguments from the stack, in schema order (ops.cpp),
// and owns them.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace gmm {

void multi_tensor_gemm(StableIValue *stack, uint64_t num_args, uint64_t num_outputs);
void multi_tensor_mm(StableIValue *stack, uint64_t num_args, uint64_t num_outputs);
void grouped_mm(StableIValue *stack, uint64_t num_args, uint64_t num_outputs);
void grouped_mm_out(StableIValue *stack, uint64_t num_args, uint64_t num_outputs);
void swiglu_cutlass(StableIValue *stack, uint64_t num_args, uint64_t num_outputs);
void swiglu_backward_cutlass(StableIValue *stack, uint64_t num_args, uint64_t num_outputs);

}  // namespace gmm
