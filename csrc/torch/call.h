// What the ops share: the C entry on torch's stream, with torch's memory; and the ways to Python.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <string>

#include "gmm/gmm.h"
#include "torch/check.h"
#include "torch/tensor_list.h"

namespace gmm {

torch::stable::Tensor empty_contiguous(int64_t dim, const int64_t *sizes, int32_t dtype, const TensorView &device);

// Runs the call on torch's current stream of the device. False when the backend asked for, or every backend, refuses
// it: gmm_last_error() says why. Throws on every other error.
bool try_library(gmm_args &args, const TensorView &device);

// A Python warning, once for each backend that the environment asks for.
void warn_once(const Options &options, const std::string &text);

// Replaces the arguments on the stack by the results of the op `name`, which Python implements.
void call_python(const char *name, StableIValue *stack);

// The same for an op that returns the text of its error, "" without one, which is thrown here: before torch 2.13 an
// exception loses its text on the way through libtorch's C interface.
void call_python_checked(const char *name, StableIValue *stack);

}  // namespace gmm
