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

// A function of libtorch_cuda's C interface; null without it. Linked to libtorch_cuda, this library would not load on a
// CPU torch; declared weak, the function stays null even on a CUDA torch, which loads its libraries locally.
template <class Function>
Function of_libtorch_cuda(const char *name) {
  void *library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return library ? reinterpret_cast<Function>(dlsym(library, name)) : nullptr;
}

// libtorch's current stream of a CUDA device; null on a ROCm torch, where the library has no backend that could use it
// and says so.
void *current_stream(int32_t device) {
  using Getter = AOTITorchError (*)(int32_t, void **);
  static const auto getter = of_libtorch_cuda<Getter>("aoti_torch_get_current_cuda_stream");
  void *stream = nullptr;
  if (getter) STABLE_TORCH_ERROR_CODE_CHECK(getter(device, &stream));
  return stream;
}

// Workspace out of torch's allocator, on the current stream, when the library asks for it; the device is then current.
// Plain memory costs less host time than a tensor, which is for where there is none: its error has torch's own words,
// out of memory for instance.
class Workspace {
 public:
  explicit Workspace(const TensorView &device) : device_(device) {}
  Workspace(const Workspace &) = delete;
  Workspace &operator=(const Workspace &) = delete;
  ~Workspace() {
    static const auto free =
        of_libtorch_cuda<AOTITorchError (*)(void *)>("aoti_torch_cuda_caching_allocator_raw_delete");
    if (memory_) free(memory_);
  }

  static void *allocate(size_t bytes, void *workspace) noexcept {
    return static_cast<Workspace *>(workspace)->allocate(bytes);
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void *allocate(size_t bytes) noexcept {
    using Allocate = AOTITorchError (*)(uint64_t, void **);
    static const auto raw = of_libtorch_cuda<Allocate>("aoti_torch_cuda_caching_allocator_raw_alloc");
    if (raw && raw(bytes, &memory_) == AOTI_TORCH_SUCCESS) return memory_;
    try {
      const auto size = static_cast<int64_t>(bytes);
      tensor_ = empty_contiguous(1, &size, aoti_torch_dtype_uint8(), device_);
      return tensor_->mutable_data_ptr();
    } catch (...) {
      error_ = std::current_exception();
      return nullptr;
    }
  }

  const TensorView &device_;
  void *memory_ = nullptr;
  std::optional<torch::stable::Tensor> tensor_;
  std::exception_ptr error_;
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
  Workspace workspace(device);
  args.allocate = &Workspace::allocate;
  args.allocate_context = &workspace;
  const gmm_status status = gmm_multi_tensor_gemm(&args, nullptr, 0, current_stream(args.device));
  workspace.rethrow();
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
