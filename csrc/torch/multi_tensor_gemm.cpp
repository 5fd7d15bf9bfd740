// The list form: torch.ops.gmm.multi_tensor_gemm and multi_tensor_mm for CUDA tensors.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gmm/gmm.h"
#include "torch/call.h"
#include "torch/check.h"
#include "torch/kernels.h"
#include "torch/strides.h"
#include "torch/tensor_list.h"

namespace gmm {
namespace {

using torch::stable::Tensor;
using torch::stable::detail::from;
using torch::stable::detail::to;

Tensor empty_matrix(int64_t rows, int64_t cols, int32_t dtype, const TensorView &device) {
  const int64_t sizes[] = {rows, cols};
  return empty_contiguous(2, sizes, dtype, device);
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
      Tensor copy = empty_matrix(t.sizes[0], t.sizes[1], t.dtype, t);
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

// Runs the call on the backend asked for. One that the environment asked for and that cannot is replaced, with a
// warning.
void call_library(gmm_args &args, const Options &options, const TensorView &device) {
  if (!options.triton && try_library(args, device)) return;
  const std::string why = options.triton ? kTritonTakesNoLists : gmm_last_error();
  if (!options.fall_back) throw std::runtime_error(why);
  warn_once(options, why);
  args.backend = GMM_BACKEND_AUTO;
  args.kernel = nullptr;
  if (!try_library(args, device)) throw std::runtime_error(gmm_last_error());
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

  call_library(args, options, a[0]);
  matrices.copy_back();
}

// The call on Python's reference, which takes the lists over.
void run_reference(TensorList &a, TensorList &b, TensorList &d, TensorList &bias, const Options &options,
                   const std::string &backend) {
  StableIValue stack[] = {a.release(),
                          b.release(),
                          d.release(),
                          bias.release(),
                          from(options.trans_a),
                          from(options.trans_b),
                          from(options.accumulate),
                          from(options.allow_tf32),
                          from(options.sm_margin),
                          from(backend)};
  call_python_checked("gmm::multi_tensor_gemm_reference", stack);
}

}  // namespace

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
    run_reference(a, b, d, bias, options, backend);
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
  TensorList d = TensorList::empty(a.size());
  for (size_t i = 0; i < a.size(); ++i)
    d.push_back(empty_matrix(a[i].sizes[options.trans_a], b[i].sizes[!options.trans_b], dtype, a[0]));
  if (options.reference) {
    TensorList written = TensorList::empty(d.size());
    for (const TensorView &t : d) written.push_back(t.tensor());
    run_reference(a, b, written, bias, options, backend);
  } else {
    run(a, b, d, bias, options);
  }
  stack[0] = d.release();
}

}  // namespace gmm
