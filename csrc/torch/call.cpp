#include "torch/call.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <atomic>
#include <exception>
#include <optional>
#include <stdexcept>

namespace gmm {
namespace {

// libtorch's current stream of a CUDA device; null on a ROCm torch, where the library has no backend that could use it
// and says so. The shim lives in libtorch_cuda: linked, this library would not load on a
// CPU torch; declared weak, it stays null even on a CUDA torch, which loads its libraries locally.
void *current_stream(int32_t device) {
  using Getter = AOTITorchError (*)(int32_t, void **);
  static const Getter getter = [] {
    void *library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void *stream = nullptr;
  if (getter) STABLE_TORCH_ERROR_CODE_CHECK(getter(device, &stream));
  return stream;
}

// Workspace out of torch's allocator, on the current stream, when the library asks for it.
struct Workspace {
  const TensorView &device;
  std::optional<torch::stable::Tensor> tensor;
  std::exception_ptr error;  // torch's own words, out of memory for instance

  static void *allocate(size_t bytes, void *context) noexcept {
    auto *self = static_cast<Workspace *>(context);
    try {
      const auto size = static_cast<int64_t>(bytes);
      self->tensor = empty_contiguous(1, &size, aoti_torch_dtype_uint8(), self->device);
      return self->tensor->mutable_data_ptr();
    } catch (...) {
      self->error = std::current_exception();
      return nullptr;
    }
  }
};

}  // namespace

torch::stable::Tensor empty_contiguous(int64_t dim, const int64_t *sizes, int32_t dtype, const TensorView &device) {
  int64_t strides[3], stride = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  AtenTensorHandle handle;
  try {
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(dim, sizes, strides, dtype, device.device_type, device.device_index, &handle));
  } catch (const std::exception &error) {  // of torch's own words, "CUDA out of memory", nothing is left before 2.13
    fail("no memory for %lld elements on %s (%s)", (long long)stride, device_name(device).c_str(), error.what());
  }
  return torch::stable::Tensor(handle);
}

bool try_library(gmm_args &args, const TensorView &device) {
  Workspace workspace{device, std::nullopt, nullptr};
  args.allocate = &Workspace::allocate;
  args.allocate_context = &workspace;
  const gmm_status status = gmm_multi_tensor_gemm(&args, nullptr, 0, current_stream(args.device));
  if (workspace.error) std::rethrow_exception(workspace.error);
  if (status != GMM_SUCCESS && status != GMM_ERROR_UNSUPPORTED) throw std::runtime_error(gmm_last_error());
  return status == GMM_SUCCESS;
}

// Through Python's warnings: what libtorch's own shim prints passes no filter.
void warn_once(const Options &options, const std::string &text) {
  static std::atomic<bool> warned[GMM_NUM_BACKENDS + 1];
  if (warned[options.triton ? GMM_NUM_BACKENDS : options.backend].exchange(true)) return;
  StableIValue stack[] = {torch::stable::detail::from("GMM_BACKEND: " + text)};
  call_python("gmm::warn", stack);
}

void call_python(const char *name, StableIValue *stack) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION));
}

void call_python_checked(const char *name, StableIValue *stack) {
  call_python(name, stack);
  const auto error = torch::stable::detail::to<std::string>(stack[0]);
  if (!error.empty()) throw std::runtime_error(error);
}

}  // namespace gmm
