// torch.ops.gmm.*: the schemas, and the CUDA implementation on LibTorch's stable ABI (torch >= 2.10; no Python, no CUDA
// headers). Tensors are checked, described as gmm_matrix, and handed to gmm.h. The CPU implementation, the fake kernels
// and autograd are registered in python/gmm.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gmm/gmm.h"
#include "torch/check.h"
#include "torch/strides.h"
#include "torch/tensor_list.h"

namespace gmm {
namespace {

using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

void check_status(gmm_status status) {
  if (status != GMM_SUCCESS) throw std::runtime_error(gmm_last_error());
}

// libtorch's current stream of a CUDA device. The shim lives in libtorch_cuda: linked, this library would not load on a
// CPU torch; declared weak, it stays null even on a CUDA torch, which loads its libraries locally.
void *current_stream(int32_t device) {
  using Getter = AOTITorchError (*)(int32_t, void **);
  static const Getter getter = [] {
    void *library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  if (!getter)
    fail("this torch has no aoti_torch_get_current_cuda_stream in libtorch_cuda.so: gmm needs torch >= 2.10");
  void *stream;
  STABLE_TORCH_ERROR_CODE_CHECK(getter(device, &stream));
  return stream;
}

Tensor empty_contiguous(int64_t rows, int64_t cols, int32_t dtype, const TensorView &device) {
  const int64_t sizes[] = {rows, cols}, strides[] = {cols, 1};
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(2, sizes, strides, dtype, device.device_type, device.device_index, &handle));
  return Tensor(handle);
}

// The tensors of one call as gmm.h wants them, with the copies that this takes: of an operand without a leading
// dimension (expanded, or strided in both dimensions), and of a d that is not row-major.
class Matrices {
 public:
  explicit Matrices(size_t groups) { matrices_.reserve(3 * groups); }

  const gmm_matrix *add_inputs(const TensorList &list, bool transpose) {
    const gmm_matrix *first = matrices_.data() + matrices_.size();
    for (const TensorView &t : list) {
      gmm_matrix &m = matrices_.emplace_back();
      if (describe(t.strided(t.data()), transpose, m)) continue;
      const TensorView copy = contiguous(t);
      describe(copy.strided(copy.data()), transpose, m);
    }
    return first;
  }

  const gmm_matrix *add_outputs(const TensorList &list, bool accumulate) {
    const gmm_matrix *first = matrices_.data() + matrices_.size();
    for (const TensorView &t : list) {
      gmm_matrix &m = matrices_.emplace_back();
      if (describe_row_major(t.strided(t.mutable_data()), m)) continue;
      Tensor copy = empty_contiguous(t.sizes[0], t.sizes[1], t.dtype, t);
      if (accumulate) torch::stable::copy_(copy, t.tensor());
      describe_row_major(TensorView(copy.get()).strided(copy.mutable_data_ptr()), m);
      copies_back_.emplace_back(t.tensor(), std::move(copy));
    }
    return first;
  }

  const void *const *add_bias(const TensorList &list) {
    if (!list.present()) return nullptr;
    for (const TensorView &t : list) {
      const bool adjacent = t.sizes[0] <= 1 || t.strides[0] == 1;
      bias_.push_back(adjacent ? t.data() : contiguous(t).data());
    }
    return bias_.data();
  }

  void copy_back() {
    for (auto &[tensor, copy] : copies_back_) torch::stable::copy_(tensor, copy);
  }

 private:
  TensorView contiguous(const TensorView &t) {
    return TensorView(kept_.emplace_back(torch::stable::contiguous(t.tensor())).get());
  }

  std::vector<gmm_matrix> matrices_;
  std::vector<const void *> bias_;
  std::vector<Tensor> kept_;  // until the work is on the stream; the allocator then reuses them in its order
  std::vector<std::pair<Tensor, Tensor>> copies_back_;
};

// As a Python warning: what libtorch's own shim prints passes no filter.
void warn(const std::string &text) {
  StableIValue stack[] = {from(text)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("gmm::warn", "", stack, TORCH_ABI_VERSION));
}

// Workspace out of torch's allocator, on the current stream, when the library asks for it.
struct Workspace {
  const TensorView &device;
  std::optional<Tensor> tensor;
  std::exception_ptr error;  // torch's own words, out of memory for instance

  static void *allocate(size_t bytes, void *context) noexcept {
    auto *self = static_cast<Workspace *>(context);
    try {
      self->tensor = empty_contiguous(1, static_cast<int64_t>(bytes), aoti_torch_dtype_uint8(), self->device);
      return self->tensor->mutable_data_ptr();
    } catch (...) {
      self->error = std::current_exception();
      return nullptr;
    }
  }
};

void call_library(gmm_args &args, bool fall_back, const TensorView &device) {
  Workspace workspace{device, std::nullopt, nullptr};
  args.allocate = &Workspace::allocate;
  args.allocate_context = &workspace;
  void *stream = current_stream(args.device);
  gmm_status status = gmm_multi_tensor_gemm(&args, nullptr, 0, stream);
  if (status == GMM_ERROR_UNSUPPORTED && fall_back) {
    static std::atomic<bool> warned[GMM_NUM_BACKENDS];
    if (!warned[args.backend].exchange(true)) warn(std::string("GMM_BACKEND: ") + gmm_last_error());
    args.backend = GMM_BACKEND_AUTO;
    args.kernel = nullptr;
    status = gmm_multi_tensor_gemm(&args, nullptr, 0, stream);
  }
  if (workspace.error) std::rethrow_exception(workspace.error);
  check_status(status);
}

// The call itself, for checked arguments.
void run(const TensorList &a, const TensorList &b, const TensorList &d, const TensorList &bias,
         const Options &options) {
  Matrices matrices(a.size());
  gmm_args args{};
  args.struct_size = sizeof args;
  args.num_groups = static_cast<int32_t>(a.size());
  args.a = matrices.add_inputs(a, options.trans_a);
  args.b = matrices.add_inputs(b, options.trans_b);
  args.d = matrices.add_outputs(d, options.accumulate);
  args.bias = matrices.add_bias(bias);
  args.ab_dtype = to_gmm_dtype(a[0].dtype);
  args.d_dtype = to_gmm_dtype(d[0].dtype);
  args.accumulate = options.accumulate;
  args.allow_tf32 = options.allow_tf32;
  args.sm_margin = static_cast<int32_t>(std::min<int64_t>(options.sm_margin, INT32_MAX));
  args.device = a[0].device_index;
  args.backend = options.backend;
  args.kernel = options.kernel.empty() ? nullptr : options.kernel.c_str();

  call_library(args, options.fall_back, a[0]);
  matrices.copy_back();
}

// Boxed by hand for TensorList: each reads its arguments from the stack, in schema order, and owns them.

// Replaces the arguments on the stack, which `lists` give back, by the result of the Python op `name`.
void call_reference(const char *name, StableIValue *stack, std::initializer_list<TensorList *> lists) {
  for (TensorList *list : lists) list->release();
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION));
}

void multi_tensor_gemm(StableIValue *stack, uint64_t, uint64_t) {
  TensorList a = TensorList::required(stack[0]);
  TensorList b = TensorList::required(stack[1]);
  TensorList d = TensorList::required(stack[2]);
  TensorList bias = TensorList::optional(stack[3]);
  Options options;
  options.trans_a = to<bool>(stack[4]);
  options.trans_b = to<bool>(stack[5]);
  options.accumulate = to<bool>(stack[6]);
  options.allow_tf32 = to<bool>(stack[7]);
  options.sm_margin = to<int64_t>(stack[8]);
  const std::string backend = to<std::string>(stack[9]);
  set_backend(options, backend);

  check_lengths(a, {{"b", &b}, {"d", &d}, {"bias", &bias}});
  check_inputs(a, b, options);
  check_d(a, b, d, options);
  check_bias(a, b, bias, d[0].dtype, options);
  if (options.reference) {
    stack[9] = from(backend);
    call_reference("gmm::multi_tensor_gemm_reference", stack, {&a, &b, &d, &bias});
  } else {
    run(a, b, d, bias, options);
  }
}

void multi_tensor_mm(StableIValue *stack, uint64_t, uint64_t) {
  TensorList a = TensorList::required(stack[0]);
  TensorList b = TensorList::required(stack[1]);
  TensorList bias = TensorList::optional(stack[2]);
  Options options;
  options.trans_a = to<bool>(stack[3]);
  options.trans_b = to<bool>(stack[4]);
  const auto out_dtype = to<std::optional<int32_t>>(stack[5]);  // libtorch's number for a ScalarType
  options.allow_tf32 = to<bool>(stack[6]);
  options.sm_margin = to<int64_t>(stack[7]);
  const std::string backend = to<std::string>(stack[8]);
  set_backend(options, backend);

  check_lengths(a, {{"b", &b}, {"bias", &bias}});
  check_inputs(a, b, options);
  const int32_t dtype = out_dtype.value_or(a[0].dtype);
  check_d_dtype("out_dtype", dtype, a[0].dtype);
  check_bias(a, b, bias, dtype, options);
  if (options.reference) {
    stack[5] = from(out_dtype);
    stack[8] = from(backend);
    call_reference("gmm::multi_tensor_mm_reference", stack, {&a, &b, &bias});
    return;
  }
  TensorList d = TensorList::empty(a.size());
  for (size_t i = 0; i < a.size(); ++i)
    d.push_back(empty_contiguous(a[i].sizes[options.trans_a], b[i].sizes[!options.trans_b], dtype, a[0]));
  run(a, b, d, bias, options);
  stack[0] = d.release();
}

}  // namespace
}  // namespace gmm

// `backend`: see set_backend() in check.h. The ..._reference ops are Python's: torch.mm for each group, on any device.
#define GMM_GEMM_SCHEMA                                                                                       \
  "(Tensor[] a, Tensor[] b, Tensor(c!)[] d, Tensor[]? bias=None, *, bool trans_a=False, bool trans_b=False, " \
  "bool accumulate=False, bool allow_tf32=False, int sm_margin=0, str backend=\"auto\") -> ()"
#define GMM_MM_SCHEMA                                                                         \
  "(Tensor[] a, Tensor[] b, Tensor[]? bias=None, *, bool trans_a=False, bool trans_b=False, " \
  "ScalarType? out_dtype=None, bool allow_tf32=False, int sm_margin=0, str backend=\"auto\") -> Tensor[]"

STABLE_TORCH_LIBRARY(gmm, m) {
  m.def("multi_tensor_gemm" GMM_GEMM_SCHEMA);
  m.def("multi_tensor_gemm_reference" GMM_GEMM_SCHEMA);
  m.def("multi_tensor_mm" GMM_MM_SCHEMA);
  m.def("multi_tensor_mm_reference" GMM_MM_SCHEMA);
  m.def("warn(str text) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(gmm, CUDA, m) {
  m.impl("multi_tensor_gemm", &gmm::multi_tensor_gemm);
  m.impl("multi_tensor_mm", &gmm::multi_tensor_mm);
}
