// torch.ops.gmm.grouped_mm and grouped_mm_out for CUDA tensors: CUTLASS where it takes the call, else Python, which
// chooses between Triton and cuBLAS (python/gmm/ragged/run.py).
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "gmm/gmm.h"
#include "torch/call.h"
#include "torch/check.h"
#include "torch/grouped.h"
#include "torch/grouped_args.h"
#include "torch/grouped_check.h"
#include "torch/kernels.h"
#include "torch/tensor_list.h"

namespace gmm {
namespace {

using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

// The arguments of both ops, but for out.
struct Arguments {
  TensorArgument a, b, offs, bias;
  Options options;

  // a, b, offs and bias come first in both schemas.
  explicit Arguments(const StableIValue *stack)
      : a(TensorArgument::required(stack[0])),
        b(TensorArgument::required(stack[1])),
        offs(TensorArgument::optional(stack[2])),
        bias(TensorArgument::optional(stack[3])) {}
};

bool is_empty(const TensorView &t) {
  return std::any_of(t.sizes, t.sizes + t.dim, [](int64_t size) { return size == 0; });
}

int itemsize(int32_t dtype) { return dtype == aoti_torch_dtype_float32() ? 4 : 2; }

// Whether CUTLASS ran the call; when not, `why` says why.
bool run_cutlass(const Arguments &call, const GroupedShape &shape, const TensorView &out, std::string &why) {
  const TensorView &a = *call.a, &b = *call.b;
  const Options &options = call.options;
  GroupedCall grouped{shape.mode, shape.groups, operand(a, a.data()), operand(b, b.data()),
                      operand(out, out.mutable_data())};
  if (options.trans_b) grouped.b = grouped.b.transposed();
  grouped.ab_itemsize = itemsize(a.dtype);
  grouped.d_itemsize = itemsize(out.dtype);
  if (call.bias.present()) {
    grouped.bias = call.bias->data();
    grouped.bias_group_stride = call.bias->strides[0];
    grouped.bias_stride = call.bias->strides[1];
  }

  gmm_args args{};
  GroupedMatrices matrices;
  const char *refusal = describe_args(grouped, a, out.dtype, call.offs, options.sm_margin, args, matrices);
  if (refusal) {
    why = std::string("backend 'cutlass' cannot take this call: ") + refusal;
    return false;
  }
  args.accumulate = options.accumulate;
  args.allow_tf32 = options.allow_tf32;
  args.kernel = options.kernel.empty() ? nullptr : options.kernel.c_str();
  if (try_library(args, a)) return true;
  why = gmm_last_error();
  return false;
}

// Hands the call over to Python, with its tensors.
void run_python(Arguments &call, const TensorView &out, const std::string &backend) {
  const Options &options = call.options;
  StableIValue stack[] = {call.a.release(),
                          call.b.release(),
                          call.offs.release(),
                          call.bias.release(),
                          torch::stable::detail::from(out.new_reference()),
                          from(options.trans_b),
                          from(options.accumulate),
                          from(options.allow_tf32),
                          from(options.sm_margin),
                          from(backend)};
  call_python_checked("gmm::grouped_mm_python", stack);
}

// Whether ends that are not ascending within the buffer raise, at the price of a synchronisation.
bool checks_offsets() {
  static const bool checks = [] {
    const char *value = std::getenv("GMM_CHECK_OFFSETS");
    return value && std::strcmp(value, "1") == 0;
  }();
  return checks;
}

void check_offsets(const TensorView &offs, int64_t total) {
  StableIValue stack[] = {from(offs.tensor()), from(total)};
  call_python_checked("gmm::check_offsets", stack);
}

// Runs a checked call.
void run(Arguments &call, const GroupedShape &shape, const TensorView &out, const std::string &backend) {
  if (call.offs.present() && checks_offsets()) check_offsets(*call.offs, shape.ragged_size());
  const Options &options = call.options;
  if (is_empty(out) || shape.groups == 0 || (shape.k == 0 && !call.bias.present())) {
    if (!options.accumulate) torch::stable::fill_(out.tensor(), 0);
    gmm_set_last_backend("reference: no products");  // as in python/gmm/ragged/run.py
    return;
  }
  const bool cutlass = options.backend == GMM_BACKEND_CUTLASS;
  const bool any = options.backend == GMM_BACKEND_AUTO && !options.triton && !options.reference;
  if (any || cutlass) {
    std::string why;
    if (run_cutlass(call, shape, out, why)) return;
    if (cutlass && !options.fall_back) throw std::runtime_error(why);
    if (cutlass) warn_once(options, why);
  }
  run_python(call, out, any || cutlass ? "auto" : backend);
}

}  // namespace

void grouped_mm(StableIValue *stack, uint64_t, uint64_t) {
  Arguments call(stack);
  const auto out_dtype = to<std::optional<int32_t>>(stack[4]);  // libtorch's number for a ScalarType
  call.options.trans_b = to<bool>(stack[5]);
  call.options.allow_tf32 = to<bool>(stack[6]);
  call.options.sm_margin = to<int64_t>(stack[7]);
  const std::string backend = to<std::string>(stack[8]);
  set_backend(call.options, backend);

  const TensorView &a = *call.a;
  const GroupedShape shape = check_grouped(a, *call.b, call.offs, call.options);
  const int32_t dtype = out_dtype.value_or(a.dtype);
  check_d_dtype("out_dtype", dtype, a.dtype, "a");
  check_grouped_bias(a, call.bias, dtype, shape);
  const int64_t sizes[] = {shape.groups, shape.m, shape.n};
  const Tensor out =
      shape.batched_out() ? empty_contiguous(3, sizes, dtype, a) : empty_contiguous(2, sizes + 1, dtype, a);
  run(call, shape, TensorView(out.get()), backend);
  stack[0] = from(out);
}

void grouped_mm_out(StableIValue *stack, uint64_t, uint64_t) {
  Arguments call(stack);
  TensorArgument out = TensorArgument::required(stack[4]);
  call.options.trans_b = to<bool>(stack[5]);
  call.options.accumulate = to<bool>(stack[6]);
  call.options.allow_tf32 = to<bool>(stack[7]);
  call.options.sm_margin = to<int64_t>(stack[8]);
  const std::string backend = to<std::string>(stack[9]);
  set_backend(call.options, backend);

  const TensorView &a = *call.a;
  const GroupedShape shape = check_grouped(a, *call.b, call.offs, call.options);
  check_grouped_out(a, *call.b, *out, shape);
  check_grouped_bias(a, call.bias, out->dtype, shape);
  run(call, shape, *out, backend);
}

}  // namespace gmm
