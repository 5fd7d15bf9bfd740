#include "core/error.h"
#include "core/groups.h"
#include "cutlass/sm90/pointer_array/gemm.h"
#include "cutlass/sm90/pointer_array/heuristics.h"
#include "cutlass/sm90/pointer_array/pointer_array.h"
#include "cutlass/sm90/pointer_array/workspace.h"

namespace gmm::sm90::pointer_array {
namespace {

struct Group {
  const void *a, *b, *c;
  void *d;
  int32_t m, n, k;
  int32_t ld_a, ld_b, ld_d;  // accepts() refuses larger ones
};

// What the set-up kernel gets by value, so that nothing on the host has to outlive the call.
template <int kCapacity>
struct SetUp {
  Workspace workspace;
  int first;  // group[0] is this one of the arrays
  bool c_is_one_row;
  Group group[kCapacity];
};
static_assert(sizeof(SetUp<kFewGroups>) <= 4096 && sizeof(SetUp<kManyGroups>) <= 32764, "kernel parameters");

// One block of one thread a group: the blocks' reads of the parameters, each a miss of the constant cache, overlap.
template <int kCapacity>
__global__ void set_up_kernel(const __grid_constant__ SetUp<kCapacity> set_up) {
  cudaTriggerProgrammaticLaunchCompletion();  // the GEMM may be launched; it waits for the end of this kernel
  const Workspace &w = set_up.workspace;
  const Group &group = set_up.group[blockIdx.x];
  const int i = set_up.first + blockIdx.x;
  w.shape[i] = {group.m, group.n, group.k};
  w.a[i] = group.a;
  w.b[i] = group.b;
  w.c[i] = group.c;
  w.d[i] = group.d;
  w.ld_a[i] = group.ld_a;
  w.ld_b[i] = group.ld_b;
  w.ld_c[i] = set_up.c_is_one_row ? 0 : group.ld_d;
  w.ld_d[i] = group.ld_d;
}

// Fills the workspace's arrays with the groups that have a product, in as many launches as their number takes.
template <int kCapacity>
void launch_set_up(const gmm_args &args, const Workspace &workspace, bool c_is_one_row, cudaStream_t stream) {
  SetUp<kCapacity> set_up;
  set_up.workspace = workspace;
  set_up.c_is_one_row = c_is_one_row;
  set_up.first = 0;
  int count = 0;
  const auto launch = [&] {
    set_up_kernel<<<count, 1, 0, stream>>>(set_up);
    GMM_CUDA_CHECK(cudaGetLastError());
    set_up.first += count;
    count = 0;
  };
  for (int i = 0; i < args.num_groups; ++i) {
    if (!has_product(args, i)) continue;
    const gmm_matrix &a = args.a[i], &b = args.b[i], &d = args.d[i];
    set_up.group[count++] = Group{a.data,          b.data,          c_is_one_row ? args.bias[i] : d.data,
                                  d.data,          int32_t(a.rows), int32_t(b.cols),
                                  int32_t(a.cols), int32_t(a.ld),   int32_t(b.ld),
                                  int32_t(d.ld)};
    if (count == kCapacity) launch();
  }
  if (count > 0) launch();
}

using LaunchGemm = void (*)(const Gemm &, cudaStream_t);

LaunchGemm gemm_of(const Kernel *kernel, gmm_dtype dtype) {
  const bool bf16 = dtype == GMM_BF16;
  if (kernel == &k128x192) return bf16 ? launch_gemm<k128x192, GMM_BF16> : launch_gemm<k128x192, GMM_FP16>;
  if (kernel == &k128x256) return bf16 ? launch_gemm<k128x256, GMM_BF16> : launch_gemm<k128x256, GMM_FP16>;
  if (kernel == &k64x128) return bf16 ? launch_gemm<k64x128, GMM_BF16> : launch_gemm<k64x128, GMM_FP16>;
  throw Error(GMM_ERROR_INTERNAL, format("no kernel named %s here", kernel ? kernel->name : "NULL"));
}

}  // namespace

void run(const gmm_args &args, const Plan &plan, void *workspace, int sm_count, cudaStream_t stream) {
  if (plan.products == 0) return;
  const bool add_d = plan.adds_to_d(args);
  const bool add_bias = !add_d && args.bias;
  int first = 0;
  while (!has_product(args, first)) ++first;
  const int cluster = plan.kernel->cluster_m * plan.kernel->cluster_n;

  Gemm gemm{};
  gemm.workspace = carve_workspace(workspace, plan.products, sm_count);
  gemm.products = plan.products;
  gemm.a_column_major = args.a[first].column_major;  // as in all groups with a product
  gemm.b_column_major = args.b[first].column_major;
  gemm.d_dtype = args.d_dtype;
  gemm.add_c = add_d || add_bias;
  gemm.raster_along_m = raster_along_m(args);
  gemm.device = args.device;
  gemm.sm_count = sm_count / cluster * cluster;  // one CTA each; CUTLASS does not always round to whole clusters

  // The bias is C with a row stride of 0: TMA reads the same row for every row of the tile.
  if (plan.products <= kFewGroups)
    launch_set_up<kFewGroups>(args, gemm.workspace, add_bias, stream);
  else
    launch_set_up<kManyGroups>(args, gemm.workspace, add_bias, stream);
  gemm_of(plan.kernel, args.ab_dtype)(gemm, stream);
}

}  // namespace gmm::sm90::pointer_array
