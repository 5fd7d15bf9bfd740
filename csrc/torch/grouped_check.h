// The checks of grouped_mm, before anything is written. The same rules and texts as python/gmm/ragged/check.py, which
// the CPU and fake kernels use.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "torch/check.h"
#include "torch/grouped.h"
#include "torch/tensor_list.h"

namespace gmm {

inline std::string shape_text(const int64_t *sizes, int64_t dim) {
  std::string text = "[";
  for (int64_t i = 0; i < dim; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

// Sizes of a checked call: groups, and M, N, K with the ragged one as the buffers have it.
struct GroupedShape {
  Mode mode;
  int64_t groups, m, n, k;

  bool batched_out() const { return mode == Mode::kRaggedK || mode == Mode::kBatched; }
  int64_t ragged_size() const { return mode == Mode::kRaggedM ? m : mode == Mode::kRaggedN ? n : k; }
};

inline void check_device(const char *name, const TensorView &t, const TensorView &a) {
  if (t.device_type != a.device_type || t.device_index != a.device_index)
    fail("%s: expected a tensor on %s (where a is), got one on %s", name, device_name(a).c_str(),
         device_name(t).c_str());
}

inline void check_dtype(const char *name, const TensorView &t, int32_t dtype, const char *like) {
  if (t.dtype != dtype)
    fail("%s: expected %s (the dtype of %s), got %s", name, dtype_name(dtype).c_str(), like,
         dtype_name(t.dtype).c_str());
}

inline void check_offs(const TensorView &a, const TensorView &b, const TensorArgument &offs) {
  if (a.dim == 3 && b.dim == 3) {
    if (offs.present()) fail("offs: expected None, as a and b both have 3 dimensions, got a tensor");
    return;
  }
  if (!offs.present())
    fail("offs: expected a tensor, as a has %lld and b has %lld dimensions, got None", (long long)a.dim,
         (long long)b.dim);
  if (offs->dim != 1) fail("offs: expected 1 dimension, got %lld", (long long)offs->dim);
  if (offs->dtype != aoti_torch_dtype_int32() && offs->dtype != aoti_torch_dtype_int64())
    fail("offs: expected int32 or int64, got %s", dtype_name(offs->dtype).c_str());
  check_device("offs", *offs, a);
}

// Everything but bias and out.
inline GroupedShape check_grouped(const TensorView &a, const TensorView &b, const TensorArgument &offs,
                                  const Options &options) {
  if (a.dim != 2 && a.dim != 3) fail("a: expected 2 or 3 dimensions, got %lld", (long long)a.dim);
  if (b.dim != 2 && b.dim != 3) fail("b: expected 2 or 3 dimensions, got %lld", (long long)b.dim);
  to_gmm_dtype(a.dtype, "a");
  check_device("b", b, a);
  check_dtype("b", b, a.dtype, "a");
  if (options.sm_margin < 0) fail("sm_margin: expected >= 0, got %lld", (long long)options.sm_margin);
  check_offs(a, b, offs);
  const int64_t k = a.sizes[a.dim - 1], b_k = b.sizes[b.dim - 2 + options.trans_b];
  if (k != b_k)
    fail("b: expected %lld %s (a has %lld columns), got %lld", (long long)k, options.trans_b ? "columns" : "rows",
         (long long)k, (long long)b_k);
  GroupedShape shape{Mode::kBatched, a.sizes[0], a.sizes[a.dim - 2], b.sizes[b.dim - 1 - options.trans_b], k};
  if (!offs.present()) {
    if (b.sizes[0] != shape.groups)
      fail("b: expected %lld groups (those of a), got %lld", (long long)shape.groups, (long long)b.sizes[0]);
    return shape;
  }
  shape.mode = a.dim < b.dim ? Mode::kRaggedM : a.dim > b.dim ? Mode::kRaggedN : Mode::kRaggedK;
  shape.groups = offs->sizes[0];
  const int64_t batch = shape.mode == Mode::kRaggedM ? b.sizes[0] : a.sizes[0];
  if (shape.mode != Mode::kRaggedK && batch != shape.groups)
    fail("offs: expected length %lld (the groups of %s), got %lld", (long long)batch,
         shape.mode == Mode::kRaggedM ? "b" : "a", (long long)shape.groups);
  return shape;
}

inline void check_grouped_bias(const TensorView &a, const TensorArgument &bias, int32_t dtype,
                               const GroupedShape &shape) {
  if (!bias.present()) return;
  if (shape.mode == Mode::kRaggedN || shape.mode == Mode::kRaggedK)
    fail("bias: expected None, as it takes a b of 3 dimensions, one for each group's rows; got a tensor");
  if (bias->dim != 2 || bias->sizes[0] != shape.groups || bias->sizes[1] != shape.n)
    fail("bias: expected shape [%lld, %lld], got %s", (long long)shape.groups, (long long)shape.n,
         shape_text(bias->sizes, bias->dim).c_str());
  check_device("bias", *bias, a);
  check_dtype("bias", *bias, dtype, "out");
}

inline void check_grouped_out(const TensorView &a, const TensorView &b, const TensorView &out,
                              const GroupedShape &shape) {
  const int64_t sizes[] = {shape.groups, shape.m, shape.n};
  const int64_t *expected = shape.batched_out() ? sizes : sizes + 1, dim = shape.batched_out() ? 3 : 2;
  check_d_dtype("out", out.dtype, a.dtype, "a");
  check_device("out", out, a);
  if (out.dim != dim || !std::equal(expected, expected + dim, out.sizes))
    fail("out: expected shape %s, got %s", shape_text(expected, dim).c_str(), shape_text(out.sizes, out.dim).c_str());
  if (may_overlap_itself(out.sizes, out.strides, dim))
    fail("out: expected elements that do not share memory, got shape %s with strides %s",
         shape_text(out.sizes, dim).c_str(), shape_text(out.strides, dim).c_str());
  if (out.empty()) return;
  const void *own = out.mutable_data();
  if (begins_at(a, own)) fail("out: expected memory of its own, got that of a");
  if (begins_at(b, own)) fail("out: expected memory of its own, got that of b");
}

}  // namespace gmm
