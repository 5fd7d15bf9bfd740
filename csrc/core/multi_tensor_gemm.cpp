// The C entries: validate, plan, run; exceptions become status codes here and nowhere else.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include "core/device.h"
#include "core/error.h"
#include "core/plan.h"
#include "gmm/gmm.h"

#if GMM_WITH_CUDA
#include "core/fill.h"
#include "cublas/multi_stream.h"
#include "cutlass/sm90/descriptor_array/descriptor_array.h"
#include "cutlass/sm90/pointer_array/pointer_array.h"
#endif

namespace gmm {
namespace {

thread_local char last_error[1024] = "";  // fixed: to report that memory is gone takes none
thread_local char last_backend[128] = "";

// Runs `body`, turning exceptions into a status and the thread's error text.
template <typename Body>
gmm_status guarded(Body &&body) noexcept {
  try {
    body();
    return GMM_SUCCESS;
  } catch (const Error &error) {
    std::snprintf(last_error, sizeof last_error, "%s", error.what());
    return error.status;
  } catch (const std::exception &error) {
    std::snprintf(last_error, sizeof last_error, "internal error: %s", error.what());
  } catch (...) {
    std::snprintf(last_error, sizeof last_error, "internal error of unknown type");
  }
  return GMM_ERROR_INTERNAL;
}

// A caller built against an older header passes a shorter struct: what it lacks reads as zero.
gmm_args read_args(const gmm_args *args) {
  GMM_CHECK(args, "args: expected a gmm_args, got NULL");
  constexpr size_t kFirstVersion = sizeof(gmm_args);
  GMM_CHECK(args->struct_size >= kFirstVersion, "args.struct_size: expected at least %zu, got %zu", kFirstVersion,
            args->struct_size);
  gmm_args copy{};
  std::memcpy(&copy, args, std::min(args->struct_size, sizeof copy));
  return copy;
}

void copy_text(char *to, size_t size, const std::string &text) { std::snprintf(to, size, "%s", text.c_str()); }

std::string kernel_name(const Plan &plan) {
  return plan.kernel ? plan.kernel->name : format("cublas_gemm_ex_%d_streams", plan.streams);
}

void plan_into(const gmm_args &args, const gmm_device *what_if, gmm_plan_result *result) {
  GMM_CHECK(result, "result: expected a gmm_plan_result, got NULL");
  GMM_CHECK(result->struct_size >= sizeof(gmm_plan_result), "result.struct_size: expected at least %zu, got %zu",
            sizeof(gmm_plan_result), result->struct_size);
  GMM_CHECK(!what_if || what_if->struct_size >= sizeof(gmm_device),
            "device.struct_size: expected at least %zu, got %zu", sizeof(gmm_device), what_if->struct_size);
  check_args(args);
  Reasons reasons;
  const size_t struct_size = result->struct_size;
  std::memset(result, 0, sizeof *result);
  result->struct_size = struct_size;
  const auto write_reasons = [&] {
    for (int i = 0; i < GMM_NUM_BACKENDS; ++i) copy_text(result->reason[i], sizeof result->reason[i], reasons[i]);
  };
  try {
    const Device device = what_if ? what_if_device(*what_if) : device_properties(args.device);
    const Plan plan = make_plan(args, device, &reasons);
    result->backend = plan.backend;
    copy_text(result->kernel, sizeof result->kernel, kernel_name(plan));
    if (plan.kernel) {
      result->tile_m = plan.kernel->tile_m;
      result->tile_n = plan.kernel->tile_n;
      result->tile_k = plan.kernel->tile_k;
    }
    result->launches = plan.launches + plan.fill;
    result->streams = plan.streams;
    result->workspace_bytes = plan.workspace_bytes;
  } catch (const Error &) {
    write_reasons();
    throw;
  }
  write_reasons();
}

#if GMM_WITH_CUDA

void run(const gmm_args &args, void *workspace, size_t workspace_bytes, cudaStream_t stream) {
  check_args(args);
  if (args.form == GMM_LIST && args.num_groups == 0) return;
  const Device &device = device_properties(args.device);
  const Plan plan = make_plan(args, device, nullptr);
  const DeviceGuard guard(args.device);
  if (!workspace && plan.workspace_bytes > 0 && args.allocate) {
    workspace = args.allocate(plan.workspace_bytes, args.allocate_context);
    workspace_bytes = plan.workspace_bytes;
    if (!workspace) throw Error(GMM_ERROR_CUDA, format("no memory for a workspace of %zu bytes", workspace_bytes));
  }
  GMM_CHECK(workspace_bytes >= plan.workspace_bytes, "workspace: expected at least %zu bytes, got %zu",
            plan.workspace_bytes, workspace_bytes);
  GMM_CHECK(plan.workspace_bytes == 0 || (workspace && reinterpret_cast<uintptr_t>(workspace) % 256 == 0),
            "workspace: expected 256-byte aligned device memory, got %p", workspace);
  if (plan.fill) fill(args, plan.fill_all, stream);
  if (plan.products > 0) {
    if (plan.backend == GMM_BACKEND_CUBLAS)
      cublas::run(args, plan, workspace, device, stream);
    else if (plan.kernel->family == sm90::Family::kDescriptorArray)
      sm90::descriptor_array::run(args, plan, workspace, device.sm_count - args.sm_margin, stream);
    else
      sm90::pointer_array::run(args, plan, workspace, device.sm_count - args.sm_margin, stream);
  }
  std::snprintf(last_backend, sizeof last_backend, "%s: %s", backend_name(plan.backend), kernel_name(plan).c_str());
}

#else

void run(const gmm_args &args, void *, size_t, void *) {
  check_args(args);
  if (args.form == GMM_LIST && args.num_groups == 0) return;
  device_properties(args.device);  // throws: no CUDA in this build
}

#endif

}  // namespace
}  // namespace gmm

extern "C" {

gmm_status gmm_plan(const gmm_args *args, const gmm_device *device, gmm_plan_result *result) {
  return gmm::guarded([&] { gmm::plan_into(gmm::read_args(args), device, result); });
}

gmm_status gmm_workspace_size(const gmm_args *args, size_t *bytes) {
  return gmm::guarded([&] {
    const gmm_args copy = gmm::read_args(args);
    GMM_CHECK(bytes, "bytes: expected a pointer, got NULL");
    gmm::check_args(copy);
    *bytes = copy.form == GMM_LIST && copy.num_groups == 0
                 ? 0
                 : gmm::make_plan(copy, gmm::device_properties(copy.device), nullptr).workspace_bytes;
  });
}

gmm_status gmm_multi_tensor_gemm(const gmm_args *args, void *workspace, size_t workspace_bytes, void *stream) {
  return gmm::guarded([&] {
#if GMM_WITH_CUDA
    gmm::run(gmm::read_args(args), workspace, workspace_bytes, static_cast<cudaStream_t>(stream));
#else
    gmm::run(gmm::read_args(args), workspace, workspace_bytes, stream);
#endif
  });
}

const char *gmm_last_error(void) { return gmm::last_error; }

const char *gmm_last_backend(void) { return gmm::last_backend; }

void gmm_set_last_backend(const char *text) {
  std::snprintf(gmm::last_backend, sizeof gmm::last_backend, "%s", text ? text : "");
}

const char *gmm_version(void) { return GMM_VERSION; }

const char *gmm_build_info(void) {
  return "version=" GMM_VERSION "\ncuda=" GMM_CUDA_VERSION "\ncutlass=" GMM_CUTLASS_VERSION
         "\ncublas=" GMM_CUBLAS_VERSION "\narchs=" GMM_ARCHS "\ncompiler=" __VERSION__;
}

}  // extern "C"
