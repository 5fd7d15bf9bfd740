// torch.ops.gmm.swiglu_cutlass and swiglu_backward_cutlass: grouped_mm with an epilogue of gmm_epilogue, for CUDA
// tensors. Each returns why CUTLASS does not take the call, "" when it ran; python/gmm/moe/feed_forward.py then does it
// in two steps.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

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

using torch::stable::detail::from;
using torch::stable::detail::to;

// What the kernel reads or writes with the strides of a contiguous tensor, of one or two dimensions.
void check_contiguous(const char *name, const TensorView &t, const TensorView &a, int32_t dtype, const int64_t *sizes,
                      int64_t dim) {
  check_device(name, t, a);
  if (t.dtype != dtype) fail("%s: expected %s, got %s", name, dtype_name(dtype).c_str(), dtype_name(t.dtype).c_str());
  if (t.dim != dim || !std::equal(sizes, sizes + dim, t.sizes))
    fail("%s: expected shape %s, got %s", name, shape_text(sizes, dim).c_str(), shape_text(t.sizes, t.dim).c_str());
  if (t.empty()) return;
  if ((sizes[dim - 1] > 1 && t.strides[dim - 1] != 1) || (dim == 2 && sizes[0] > 1 && t.strides[0] != sizes[1]))
    fail("%s: expected a contiguous tensor, got strides %s", name, shape_text(t.strides, t.dim).c_str());
}

void check_matrix(const char *name, const TensorView &t, const TensorView &a, int32_t dtype, int64_t rows,
                  int64_t columns) {
  const int64_t sizes[] = {rows, columns};
  check_contiguous(name, t, a, dtype, sizes, 2);
}

// An output, which has passed check_matrix(), against everything else.
void check_own(const char *name, const TensorView &t,
               std::initializer_list<std::pair<const char *, const TensorView *>> others) {
  if (t.empty()) return;
  for (const auto &[other, view] : others)
    if (view && begins_at(*view, t.mutable_data())) fail("%s: expected memory of its own, got that of %s", name, other);
}

const TensorView *view_of(const TensorArgument &argument) { return argument.present() ? &*argument : nullptr; }

gmm_matrix contiguous_matrix(const TensorView &t, const void *data) {
  return {const_cast<void *>(data), t.sizes[0], t.sizes[1], std::max<int64_t>(t.sizes[1], 1), 0};
}

// d = the epilogue of a @ b. `h` and `sums` as in gmm.h, checked by the caller.
std::string run(gmm_epilogue epilogue, const TensorView &a, const TensorView &b, const TensorArgument &offs,
                const TensorArgument &weights, const gmm_matrix &h, float *sums, const TensorView &d,
                const Options &options) {
  const int64_t columns = b.sizes[2];
  const char *name = epilogue == GMM_EPILOGUE_SWIGLU ? "y" : "dh";
  check_matrix(name, d, a, a.dtype, a.sizes[0], epilogue == GMM_EPILOGUE_SWIGLU ? columns / 2 : columns * 2);
  if (weights.present()) check_contiguous("weights", *weights, a, aoti_torch_dtype_float32(), a.sizes, 1);
  check_own(name, d, {{"the first operand", &a}, {"b", &b}, {"weights", view_of(weights)}});
  if (a.empty() || b.empty()) return "it has no product to compute";

  GroupedCall call{Mode::kRaggedM, offs->sizes[0], operand(a, a.data()), operand(b, b.data()),
                   operand(d, d.mutable_data())};
  gmm_args args{};
  GroupedMatrices matrices;
  if (const char *refusal = describe_args(call, a, a.dtype, offs, options.sm_margin, args, matrices)) return refusal;
  args.epilogue = epilogue;
  args.h = h;
  args.row_weights = weights.present() ? static_cast<const float *>(weights->data()) : nullptr;
  args.row_sums = sums;
  return try_library(args, a) ? "" : gmm_last_error();
}

// The product's own operands.
void check_product(const TensorView &a, const TensorView &b, const TensorArgument &offs, const Options &options) {
  if (a.dim != 2 || b.dim != 3)
    fail("a, b: expected 2 and 3 dimensions, got %lld and %lld", (long long)a.dim, (long long)b.dim);
  check_grouped(a, b, offs, options);
}

}  // namespace

void swiglu_cutlass(StableIValue *stack, uint64_t, uint64_t) {
  const TensorArgument a = TensorArgument::required(stack[0]), b = TensorArgument::required(stack[1]),
                       offs = TensorArgument::required(stack[2]), weights = TensorArgument::optional(stack[3]),
                       h = TensorArgument::optional(stack[4]), y = TensorArgument::required(stack[5]);
  Options options;
  options.sm_margin = to<int64_t>(stack[6]);
  check_product(*a, *b, offs, options);
  gmm_matrix kept{};
  if (h.present()) {
    check_matrix("h", *h, *a, a->dtype, a->sizes[0], b->sizes[2]);
    check_own("h", *h, {{"a", &*a}, {"b", &*b}, {"weights", view_of(weights)}, {"y", &*y}});
    kept = contiguous_matrix(*h, h->mutable_data());
  }
  stack[0] = from(run(GMM_EPILOGUE_SWIGLU, *a, *b, offs, weights, kept, nullptr, *y, options));
}

void swiglu_backward_cutlass(StableIValue *stack, uint64_t, uint64_t) {
  const TensorArgument dy = TensorArgument::required(stack[0]), b = TensorArgument::required(stack[1]),
                       h = TensorArgument::required(stack[2]), offs = TensorArgument::required(stack[3]),
                       weights = TensorArgument::optional(stack[4]), dh = TensorArgument::required(stack[5]),
                       sums = TensorArgument::optional(stack[6]);
  Options options;
  options.sm_margin = to<int64_t>(stack[7]);
  check_product(*dy, *b, offs, options);
  const int64_t rows = dy->sizes[0], columns = b->sizes[2];
  check_matrix("h", *h, *dy, dy->dtype, rows, 2 * columns);
  float *to_sums = nullptr;
  if (sums.present()) {
    check_matrix("parts", *sums, *dy, aoti_torch_dtype_float32(), (columns + 127) / 128 * 4, rows);
    check_own("parts", *sums, {{"dy", &*dy}, {"b", &*b}, {"h", &*h}, {"weights", view_of(weights)}, {"dh", &*dh}});
    to_sums = static_cast<float *>(sums->mutable_data());
  }
  check_own("dh", *dh, {{"h", &*h}});
  const gmm_matrix kept = contiguous_matrix(*h, h->data());
  stack[0] = from(run(GMM_EPILOGUE_SWIGLU_BACKWARD, *dy, *b, offs, weights, kept, to_sums, *dh, options));
}

}  // namespace gmm
