// Errors inside the library are exceptions; the C entries turn them into status codes (core/multi_tensor_gemm.cpp).
#pragma once

#include <cstdarg>
#include <stdexcept>
#include <string>

#include "gmm/gmm.h"

namespace gmm {

struct Error : std::runtime_error {
  Error(gmm_status status, const std::string &text) : std::runtime_error(text), status(status) {}
  gmm_status status;
};

// printf into a std::string.
[[gnu::format(printf, 1, 2)]] std::string format(const char *fmt, ...);

}  // namespace gmm

// GMM_CHECK(k_a == k_b, "a[%d] has %lld columns, b[%d] has %lld rows", ...): the call contradicts itself.
#define GMM_CHECK(condition, ...)                                                                 \
  do {                                                                                            \
    if (!(condition)) throw ::gmm::Error(GMM_ERROR_INVALID_ARGUMENT, ::gmm::format(__VA_ARGS__)); \
  } while (0)

// GMM_CUDA_CHECK(cudaFoo(...)): a CUDA runtime call that must succeed. Needs <cuda_runtime_api.h>.
#define GMM_CUDA_CHECK(call)                                                                                  \
  do {                                                                                                        \
    cudaError_t gmm_error_ = (call);                                                                          \
    if (gmm_error_ != cudaSuccess)                                                                            \
      throw ::gmm::Error(GMM_ERROR_CUDA,                                                                      \
                         ::gmm::format("%s failed: %s (%s). The error may come from earlier work on "         \
                                       "this device.",                                                        \
                                       #call, cudaGetErrorString(gmm_error_), cudaGetErrorName(gmm_error_))); \
  } while (0)
