// The checks of a call, before anything is written. The same rules and texts as python/gmm/check.py, which the CPU
// and fake kernels use: csrc/core sees matrices after op(), so only here can an error speak of the caller's tensors.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gmm/gmm.h"
#include "torch/strides.h"
#include "torch/tensor_list.h"

namespace gmm {

// The arguments of a call that are not tensors.
struct Options {
  bool trans_a = false, trans_b = false, accumulate = false, allow_tf32 = false;
  int64_t sm_margin = 0;
  gmm_backend backend = GMM_BACKEND_AUTO;
  std::string kernel;      // the CUTLASS kernel that must take the call; empty: any
  bool triton = false;     // Python's Triton kernels must take it
  bool reference = false;  // Python's reference must take it
  bool fall_back = false;  // when `backend` cannot take the call: warn, and let the library choose
};

constexpr const char *kTritonTakesNoLists =
    "backend 'triton' cannot take this call: it takes the tensors of grouped_mm, not lists";

[[noreturn, gnu::format(printf, 1, 2)]] inline void fail(const char *fmt, ...) {
  char text[512];
  va_list values;
  va_start(values, fmt);
  std::vsnprintf(text, sizeof text, fmt, values);
  va_end(values);
  throw std::runtime_error(text);
}

inline std::string dtype_name(int32_t dtype) {
  if (dtype == aoti_torch_dtype_bfloat16()) return "bfloat16";
  if (dtype == aoti_torch_dtype_float16()) return "float16";
  if (dtype == aoti_torch_dtype_float32()) return "float32";
  if (dtype == aoti_torch_dtype_float64()) return "float64";
  if (dtype == aoti_torch_dtype_int8()) return "int8";
  if (dtype == aoti_torch_dtype_int32()) return "int32";
  if (dtype == aoti_torch_dtype_int64()) return "int64";
  return "dtype " + std::to_string(dtype);
}

inline std::string device_name(const TensorView &t) {
  if (t.device_type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(t.device_index);
  if (t.device_type == aoti_torch_device_type_cpu()) return "cpu";
  if (t.device_type == aoti_torch_device_type_meta()) return "meta";
  return "device type " + std::to_string(t.device_type);
}

inline gmm_dtype to_gmm_dtype(int32_t dtype, const char *name = "a[0]") {
  if (dtype == aoti_torch_dtype_bfloat16()) return GMM_BF16;
  if (dtype == aoti_torch_dtype_float16()) return GMM_FP16;
  if (dtype == aoti_torch_dtype_float32()) return GMM_FP32;
  fail("%s: expected bfloat16, float16 or float32, got %s", name, dtype_name(dtype).c_str());
}

inline void check_lengths(const TensorList &a,
                          std::initializer_list<std::pair<const char *, const TensorList *>> others) {
  for (const auto &[name, list] : others)
    if (list->present() && list->size() != a.size())
      fail("%s: expected length %zu (that of a), got %zu", name, a.size(), list->size());
}

// Rank, device and dtype of a whole list; `like` names the tensor whose dtype it must have.
inline void check_list(const char *name, const TensorList &list, int64_t dim, const TensorView &a0, int32_t dtype,
                       const char *like) {
  for (size_t i = 0; i < list.size(); ++i) {
    const TensorView &t = list[i];
    if (t.dim != dim)
      fail("%s[%zu]: expected %lld dimension%s, got %lld", name, i, (long long)dim, dim == 1 ? "" : "s",
           (long long)t.dim);
    if (t.device_type != a0.device_type || t.device_index != a0.device_index)
      fail("%s[%zu]: expected a tensor on %s (where a[0] is), got one on %s", name, i, device_name(a0).c_str(),
           device_name(t).c_str());
    if (t.dtype != dtype)
      fail("%s[%zu]: expected %s (the dtype of %s), got %s", name, i, dtype_name(dtype).c_str(), like,
           dtype_name(t.dtype).c_str());
  }
}

inline void check_inputs(const TensorList &a, const TensorList &b, const Options &options) {
  to_gmm_dtype(a[0].dtype);
  check_list("a", a, 2, a[0], a[0].dtype, "a[0]");
  check_list("b", b, 2, a[0], a[0].dtype, "a[0]");
  if (options.sm_margin < 0) fail("sm_margin: expected >= 0, got %lld", (long long)options.sm_margin);
  for (size_t i = 0; i < a.size(); ++i) {
    const int64_t k = a[i].sizes[!options.trans_a], got = b[i].sizes[options.trans_b];
    if (k != got)
      fail("b[%zu]: expected %lld %s (a[%zu] has %lld %s), got %lld", i, (long long)k,
           options.trans_b ? "columns" : "rows", i, (long long)k, options.trans_a ? "rows" : "columns", (long long)got);
  }
}

inline void check_d_dtype(const std::string &name, int32_t dtype, int32_t ab_dtype, const char *like = "a[0]") {
  if (dtype != ab_dtype && dtype != aoti_torch_dtype_float32())
    fail("%s: expected %s (the dtype of %s) or float32, got %s", name.c_str(), dtype_name(ab_dtype).c_str(), like,
         dtype_name(dtype).c_str());
}

// Whether an output that begins at `own` shares that element with the other tensor. That other elements are apart is
// the caller's part, as views may interleave.
inline bool begins_at(const TensorView &other, const void *own) { return other.data() == own && !other.empty(); }

// Which of `list` begins there. For an error's text.
inline size_t index_of(const TensorList &list, const void *begin) {
  size_t i = 0;
  while (list[i].empty() || list[i].data() != begin) ++i;
  return i;
}

// The same for lists. The outputs' pointers come first: where an input is a lazy clone of one, that becomes a copy.
inline void check_own_memory(const TensorList &a, const TensorList &b, const TensorList &d) {
  int bits = 1;  // a table of pointers, a quarter full: sorting them took 5 % of a call with 64 groups, this takes 1
  while (size_t(1) << bits < 4 * d.size()) ++bits;
  std::vector<const void *> table(size_t(1) << bits);
  const auto find = [&](const void *begin) -> const void *& {
    size_t at = uintptr_t(begin) * 0x9e3779b97f4a7c15u >> (64 - bits);
    while (table[at] && table[at] != begin) at = (at + 1) & (table.size() - 1);
    return table[at];
  };
  for (size_t i = 0; i < d.size(); ++i) {
    if (d[i].empty()) continue;
    const void *begin = d[i].mutable_data();
    const void *&slot = find(begin);
    if (slot) fail("d[%zu]: expected memory of its own, got that of d[%zu]", i, index_of(d, begin));
    slot = begin;
  }
  for (const auto &[name, list] : {std::pair{"a", &a}, {"b", &b}})
    for (size_t i = 0; i < list->size(); ++i) {
      const void *begin = (*list)[i].data();
      if (begin && find(begin) && !(*list)[i].empty())
        fail("d[%zu]: expected memory of its own, got that of %s[%zu]", index_of(d, begin), name, i);
    }
}

inline void check_d(const TensorList &a, const TensorList &b, const TensorList &d, const Options &options) {
  check_d_dtype("d[0]", d[0].dtype, a[0].dtype);
  for (size_t i = 1; i < d.size(); ++i)
    if (d[i].dtype != d[0].dtype) check_d_dtype("d[" + std::to_string(i) + "]", d[i].dtype, a[0].dtype);
  check_list("d", d, 2, a[0], d[0].dtype, "d[0]");
  for (size_t i = 0; i < d.size(); ++i) {
    const int64_t m = a[i].sizes[options.trans_a], n = b[i].sizes[!options.trans_b];
    if (d[i].sizes[0] != m || d[i].sizes[1] != n)
      fail("d[%zu]: expected shape [%lld, %lld], got [%lld, %lld]", i, (long long)m, (long long)n,
           (long long)d[i].sizes[0], (long long)d[i].sizes[1]);
    if (may_overlap_itself(d[i].sizes, d[i].strides, 2))
      fail("d[%zu]: expected elements that do not share memory, got shape [%lld, %lld] with strides [%lld, %lld]", i,
           (long long)m, (long long)n, (long long)d[i].strides[0], (long long)d[i].strides[1]);
  }
  check_own_memory(a, b, d);
}

inline void check_bias(const TensorList &a, const TensorList &b, const TensorList &bias, int32_t d_dtype,
                       const Options &options) {
  if (!bias.present()) return;
  check_list("bias", bias, 1, a[0], d_dtype, "d");
  for (size_t i = 0; i < bias.size(); ++i) {
    const int64_t n = b[i].sizes[!options.trans_b];
    if (bias[i].sizes[0] != n)
      fail("bias[%zu]: expected %lld elements, got %lld", i, (long long)n, (long long)bias[i].sizes[0]);
  }
}

// Reads the ops' backend string: "NAME" must take the call; "NAME,auto" falls back with a warning; "cutlass: KERNEL" is
// one kernel, as gmm_last_backend() writes it.
inline void set_backend(Options &options, const std::string &text) {
  const size_t comma = text.find(",auto");
  const std::string choice = text.substr(0, comma);
  const std::string name = choice.substr(0, choice.find(':'));
  options.fall_back = comma != std::string::npos;
  options.triton = name == "triton";
  options.reference = name == "reference";
  if (name == "cutlass") {
    options.backend = GMM_BACKEND_CUTLASS;
    const size_t kernel = choice.find_first_not_of(": ", name.size());
    if (kernel != std::string::npos) options.kernel = choice.substr(kernel);
  } else if (name == "cublas") {
    options.backend = GMM_BACKEND_CUBLAS;
  } else if (name != "auto" && name != "triton" && name != "reference") {
    fail("backend: expected auto, cutlass, triton, cublas or reference, got '%s'", choice.c_str());
  }
}

}  // namespace gmm
