#include "core/plan.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/error.h"
#include "core/groups.h"
#include "cublas/heuristics.h"
#include "cutlass/sm90/descriptor_array/heuristics.h"
#include "cutlass/sm90/pointer_array/heuristics.h"

namespace gmm {
namespace {

#if GMM_WITH_CUDA
constexpr bool kBuiltWithCuda = true;
#else
constexpr bool kBuiltWithCuda = false;
#endif

bool is_dtype(int dtype) { return dtype == GMM_BF16 || dtype == GMM_FP16 || dtype == GMM_FP32; }

void check_matrix(const gmm_matrix &m, const char *name, int group) {
  GMM_CHECK(m.rows >= 0 && m.cols >= 0, "%s[%d]: expected rows and cols >= 0, got %lld x %lld", name, group,
            (long long)m.rows, (long long)m.cols);
  const int64_t extent = m.column_major ? m.rows : m.cols;
  GMM_CHECK(m.ld >= 1 && m.ld >= extent, "%s[%d]: expected a leading dimension of at least %lld, got %lld", name, group,
            (long long)(extent > 1 ? extent : 1), (long long)m.ld);
  int64_t bytes;
  GMM_CHECK(!__builtin_mul_overflow(m.column_major ? m.cols : m.rows, m.ld, &bytes) &&
                !__builtin_mul_overflow(bytes, int64_t(sizeof(float)), &bytes),
            "%s[%d]: %lld x %lld with a leading dimension of %lld overflows 64-bit addresses", name, group,
            (long long)m.rows, (long long)m.cols, (long long)m.ld);
  GMM_CHECK(m.data || m.rows == 0 || m.cols == 0, "%s[%d]: data is NULL but the matrix is %lld x %lld", name, group,
            (long long)m.rows, (long long)m.cols);
}

int64_t twice(int64_t columns) { return columns > INT64_MAX / 2 ? INT64_MAX : 2 * columns; }

// Of a product with so many columns.
int64_t columns_of_d(const gmm_args &args, int64_t columns) {
  if (args.epilogue == GMM_EPILOGUE_NONE) return columns;
  return args.epilogue == GMM_EPILOGUE_SWIGLU ? columns / 2 : twice(columns);
}

void check_group(const gmm_args &args, int i) {
  const gmm_matrix &a = args.a[i], &b = args.b[i], &d = args.d[i];
  check_matrix(a, "a", i);
  check_matrix(b, "b", i);
  check_matrix(d, "d", i);
  GMM_CHECK(a.cols == b.rows, "b[%d]: expected %lld rows (K of a[%d]), got %lld", i, (long long)a.cols, i,
            (long long)b.rows);
  const int64_t columns = columns_of_d(args, b.cols);
  GMM_CHECK(d.rows == a.rows && d.cols == columns, "d[%d]: expected %lld x %lld, got %lld x %lld", i, (long long)a.rows,
            (long long)columns, (long long)d.rows, (long long)d.cols);
  GMM_CHECK(!d.column_major, "d[%d]: expected row-major, got column-major", i);
  GMM_CHECK(!args.bias || args.bias[i] || d.cols == 0, "bias[%d]: expected %lld elements, got NULL", i,
            (long long)d.cols);
}

void check_ragged(const gmm_args &args) {
  const bool in_m = args.form == GMM_RAGGED_M;
  GMM_CHECK(args.offs || args.num_groups == 0, "offs: expected %d ends in device memory, got NULL", args.num_groups);
  GMM_CHECK(reinterpret_cast<uintptr_t>(args.offs) % (args.offs_int64 ? 8 : 4) == 0,
            "offs: expected %d-byte alignment, got %p", args.offs_int64 ? 8 : 4, args.offs);
  const int64_t stride = in_m ? args.stride_b : args.stride_d;
  GMM_CHECK(stride >= 0, "stride_%c: expected >= 0, got %lld", in_m ? 'b' : 'd', (long long)stride);
  GMM_CHECK(!args.bias || args.stride_bias >= 0, "stride_bias: expected >= 0, got %lld", (long long)args.stride_bias);
  GMM_CHECK(!args.bias || in_m, "bias: expected NULL in the form GMM_RAGGED_K, whose d has no rows of tokens");
}

void check_epilogue(const gmm_args &args) {
  if (args.epilogue == GMM_EPILOGUE_NONE) return;
  GMM_CHECK(!args.bias && !args.accumulate, "epilogue: expected neither bias nor accumulate");
  GMM_CHECK(args.d_dtype == args.ab_dtype, "epilogue: expected a d of the dtype of a and b, got fp32");
  for (const void *pointer : {static_cast<const void *>(args.row_weights), static_cast<const void *>(args.row_sums)})
    GMM_CHECK(reinterpret_cast<uintptr_t>(pointer) % 4 == 0, "row_weights, row_sums: expected 4-byte alignment, got %p",
              pointer);
  const bool forward = args.epilogue == GMM_EPILOGUE_SWIGLU;
  const int64_t rows = args.a[0].rows, columns = forward ? args.b[0].cols : twice(args.b[0].cols);
  GMM_CHECK(columns % 2 == 0, "b[0]: expected an even number of columns, got %lld", (long long)columns);
  if (forward && !args.h.data) return;
  check_matrix(args.h, "h", 0);
  GMM_CHECK(args.h.rows == rows && args.h.cols == columns && !args.h.column_major,
            "h: expected %lld x %lld, row-major; got %lld x %lld", (long long)rows, (long long)columns,
            (long long)args.h.rows, (long long)args.h.cols);
}

// The kernel of that name; nullptr when there is none, or no name.
template <size_t kCount>
const sm90::Kernel *find_kernel(const char *name, const sm90::Kernel *const (&kernels)[kCount]) {
  for (const sm90::Kernel *kernel : kernels)
    if (name && std::strcmp(kernel->name, name) == 0) return kernel;
  return nullptr;
}

// The plan_... functions: true when the call can run there; they complete the plan. `why` may be null; it gets the
// reason of a refusal, or why a backend that takes the call does so with another kernel than its first choice.
bool plan_cutlass(const gmm_args &args, const Device &device, Plan &plan, std::string *why) {
  if (device.sm != 90) {
    if (why) *why = format("its kernels are compiled for sm90a, which only sm90 runs; the device is sm%d", device.sm);
    return false;
  }
  if (args.ab_dtype == GMM_FP32) {
    if (why) *why = "takes bf16 and fp16 inputs, got fp32";
    return false;
  }
  const int sm_count = device.sm_count - args.sm_margin;
  if (sm_count < 2) {
    if (why) *why = format("sm_margin %d leaves fewer than 2 of %d SMs", args.sm_margin, device.sm_count);
    return false;
  }
  // Both families sum a row's products in the same order, so the choice never changes a bit of the result.
  std::string refused;
  sm90::descriptor_array::Launches launches;
  if (sm90::descriptor_array::accepts(args, launches, why ? &refused : nullptr)) {
    const sm90::Kernel *asked = find_kernel(args.kernel, sm90::descriptor_array::kKernels);
    if (!args.kernel || (asked && sm90::descriptor_array::takes(*asked, args))) {
      plan.kernel = asked ? asked : &sm90::descriptor_array::choose(args, sm_count);
      if (plan.products > 0) {
        plan.launches = launches.count;
        plan.workspace_bytes = sm90::descriptor_array::kWorkspaceBytes;
      }
      return true;
    }
  }
  if (args.form != GMM_LIST) {
    if (why) *why = refused.empty() ? format("no kernel named '%s' takes this call", args.kernel) : refused;
    return false;
  }
  if (!sm90::pointer_array::accepts(args, why)) return false;
  if (why && !refused.empty()) *why = "pointer array, as descriptor array refuses: " + refused;
  const sm90::Kernel *asked = find_kernel(args.kernel, sm90::pointer_array::kKernels);
  if (args.kernel && !asked) {
    if (why) *why = format("no kernel named '%s' takes this call", args.kernel);
    return false;
  }
  plan.kernel = asked ? asked : &sm90::pointer_array::choose(args, sm_count);
  plan.launches = sm90::pointer_array::launches(plan.products);
  plan.workspace_bytes = sm90::pointer_array::workspace_bytes(plan.products, sm_count);
  // C is one operand: D itself, or the bias. Where it must be both, or TMA cannot read the bias, the bias goes into D
  // first.
  plan.fill_all = args.bias && (args.accumulate || !sm90::pointer_array::takes_bias(args));
  return true;
}

bool plan_cublas(const gmm_args &args, const Device &device, Plan &plan, std::string *why) {
  if (args.form != GMM_LIST) {
    if (why) *why = "needs the sizes of the groups on the host, got them in device memory";
    return false;
  }
  if (!cublas::accepts(args, device.sm, why)) return false;
  plan.streams = cublas::choose_streams(args);
  plan.launches = plan.products;
  plan.fill_all = args.bias != nullptr;  // D = bias; cuBLAS rounds the product to D's dtype and adds it
  plan.workspace_bytes = plan.products ? plan.streams * cublas::workspace_bytes_per_stream(device.sm) : 0;
  return true;
}

bool plan_backend(gmm_backend backend, const gmm_args &args, const Device &device, Plan &plan, std::string *why) {
  if (!device.what_if && !kBuiltWithCuda) {
    if (why) *why = "not in this build (GMM_CUDA=0, or no nvcc when it was built)";
    return false;
  }
  plan.backend = backend;
  return backend == GMM_BACKEND_CUTLASS ? plan_cutlass(args, device, plan, why) : plan_cublas(args, device, plan, why);
}

// The part of the plan that every backend shares: which groups have a product, and which only a fill.
Plan count_groups(const gmm_args &args) {
  Plan plan;
  if (args.form != GMM_LIST) {  // which groups have tokens, only the device knows; D without groups is zero
    const gmm_matrix &d = args.d[0];
    const bool nothing = d.rows == 0 || d.cols == 0 || (args.form == GMM_RAGGED_K && args.num_groups == 0) ||
                         (args.accumulate && (args.a[0].cols == 0 || args.num_groups == 0));
    plan.products = nothing ? 0 : std::max(args.num_groups, 1);
    return plan;
  }
  for (int i = 0; i < args.num_groups; ++i) {
    if (has_product(args, i))
      ++plan.products;
    else if (args.d[i].rows > 0 && args.d[i].cols > 0 && (!args.accumulate || args.bias))
      plan.fill = true;
  }
  return plan;
}

}  // namespace

const char *backend_name(gmm_backend backend) { return backend == GMM_BACKEND_CUTLASS ? "cutlass" : "cublas"; }

void check_args(const gmm_args &args) {
  GMM_CHECK(args.num_groups >= 0, "num_groups: expected >= 0, got %d", args.num_groups);
  GMM_CHECK(is_dtype(args.ab_dtype), "ab_dtype: expected a gmm_dtype, got %d", int(args.ab_dtype));
  GMM_CHECK(is_dtype(args.d_dtype), "d_dtype: expected a gmm_dtype, got %d", int(args.d_dtype));
  GMM_CHECK(args.d_dtype == args.ab_dtype || args.d_dtype == GMM_FP32,
            "d_dtype: expected the dtype of a and b, or fp32; got %s", args.d_dtype == GMM_BF16 ? "bf16" : "fp16");
  GMM_CHECK(args.sm_margin >= 0, "sm_margin: expected >= 0, got %d", args.sm_margin);
  GMM_CHECK(args.backend >= GMM_BACKEND_AUTO && args.backend < GMM_NUM_BACKENDS,
            "backend: expected a gmm_backend, got %d", int(args.backend));
  GMM_CHECK(args.form >= GMM_LIST && args.form <= GMM_RAGGED_K, "form: expected a gmm_form, got %d", int(args.form));
  GMM_CHECK(args.epilogue >= GMM_EPILOGUE_NONE && args.epilogue <= GMM_EPILOGUE_SWIGLU_BACKWARD,
            "epilogue: expected a gmm_epilogue, got %d", int(args.epilogue));
  GMM_CHECK(args.epilogue == GMM_EPILOGUE_NONE || args.form == GMM_RAGGED_M,
            "epilogue: expected the form GMM_RAGGED_M, got %d", int(args.form));
  const int matrices = args.form == GMM_LIST ? args.num_groups : 1;
  if (matrices == 0) return;
  GMM_CHECK(args.a && args.b && args.d, "a, b, d: expected arrays of %d matrices, got NULL", matrices);
  for (int i = 0; i < matrices; ++i) check_group(args, i);
  if (args.form != GMM_LIST) check_ragged(args);
  check_epilogue(args);
}

Plan make_plan(const gmm_args &args, const Device &device, Reasons *reasons) {
  GMM_CHECK(!args.kernel || args.backend != GMM_BACKEND_CUBLAS, "kernel: expected NULL with backend 'cublas', got '%s'",
            args.kernel);
  const gmm_backend asked = args.kernel ? GMM_BACKEND_CUTLASS : args.backend;
  const Plan shared = count_groups(args);
  Plan chosen;
  for (gmm_backend backend : {GMM_BACKEND_CUTLASS, GMM_BACKEND_CUBLAS}) {  // in order of preference
    const bool wanted = asked == GMM_BACKEND_AUTO || asked == backend;
    if (!reasons && (!wanted || chosen.backend != GMM_BACKEND_AUTO)) continue;
    Plan plan = shared;
    std::string *why = reasons ? &(*reasons)[backend] : nullptr;
    if (!plan_backend(backend, args, device, plan, why)) continue;
    if (!wanted) {
      *why = "not asked for";
    } else if (chosen.backend != GMM_BACKEND_AUTO) {
      *why = format("%s takes the call and comes first", backend_name(chosen.backend));
    } else {
      chosen = plan;
      if (why) {
        const char *chosen_as = asked == backend ? "asked for" : "first in order of preference that takes the call";
        *why = std::string("chosen: ") + chosen_as + (why->empty() ? "" : "; " + *why);
      }
    }
  }
  if (chosen.backend == GMM_BACKEND_AUTO) {
    Reasons texts;
    if (!reasons) return make_plan(args, device, &texts);  // again, for the texts of the error
    const auto why = [&](gmm_backend backend) { return (*reasons)[backend].c_str(); };
    throw Error(GMM_ERROR_UNSUPPORTED,
                asked == GMM_BACKEND_AUTO
                    ? format("no backend takes this call. cutlass: %s. cublas: %s", why(GMM_BACKEND_CUTLASS),
                             why(GMM_BACKEND_CUBLAS))
                    : format("backend '%s' cannot take this call: %s", backend_name(asked), why(asked)));
  }
  chosen.fill = chosen.fill || (chosen.fill_all && chosen.products > 0);
  return chosen;
}

}  // namespace gmm
