#include "cutlass/sm90/pointer_array/heuristics.h"

#include <cmath>
#include <cstdint>

#include "core/groups.h"
#include "cutlass/sm90/pointer_array/workspace.h"
#include "cutlass/sm90/tma.h"

namespace gmm::sm90::pointer_array {
namespace {

// CUTLASS counts in int and rounds up to whole clusters of tiles.
constexpr Limits kLimits{INT32_MAX - 1024, INT32_MAX - 1024};

bool accepts_layout(const gmm_matrix &m, const gmm_matrix &first, const char *name, int group, std::string *why) {
  if (!m.column_major == !first.column_major) return true;
  return refuse(why, "%s[%d]: %s-major, the groups before it are %s-major; the kernels take one layout for all %s",
                name, group, m.column_major ? "column" : "row", first.column_major ? "column" : "row", name);
}

// The cost model: an SM does its tiles one after the other, each in `step_us` for every tile_k of K and `tile_us`
// besides. (Of two tiles that share an SM by pingpong each runs at half speed; per SM it is the same.)
struct Cost {
  const Kernel *kernel;
  double step_us, tile_us;
};

// From bf16 on one H200: whole kernels at K = 2048 and 7168; for 64x128, 71 groups of 8 rows, bound by reading weights.
constexpr Cost kCosts[] = {
    {&k128x192, 0.57, 0.2},
    {&k128x256, 0.745, 1.7},
    {&k64x128, 1.10, 0.2},
};

double estimate_us(const gmm_args &args, const Cost &cost, int sm_count) {
  const Kernel &kernel = *cost.kernel;
  double clusters = 0, us = 0;
  for (int i = 0; i < args.num_groups; ++i) {
    if (!has_product(args, i)) continue;
    // Whole clusters: with 2x1 and M below one tile, half of the work is padding.
    const double group_clusters = double(ceil_div(args.a[i].rows, kernel.tile_m * kernel.cluster_m)) *
                                  ceil_div(args.b[i].cols, kernel.tile_n * kernel.cluster_n);
    clusters += group_clusters;
    us += group_clusters * (ceil_div(args.a[i].cols, kernel.tile_k) * cost.step_us + cost.tile_us);
  }
  const double waves = std::ceil(clusters / (sm_count / (kernel.cluster_m * kernel.cluster_n)));
  return waves * us / clusters;  // every wave as long as the mean tile
}

}  // namespace

bool accepts(const gmm_args &args, std::string *why) {
  if (args.ab_dtype != GMM_BF16 && args.ab_dtype != GMM_FP16)
    return refuse(why, "takes bf16 and fp16 inputs, got fp32");
  int first = -1;
  for (int i = 0; i < args.num_groups; ++i) {
    if (!has_product(args, i)) continue;
    if (first < 0) first = i;
    if (!accepts_operands(args, i, kLimits, why) || !accepts_layout(args.a[i], args.a[first], "a", i, why) ||
        !accepts_layout(args.b[i], args.b[first], "b", i, why))
      return false;
  }
  return true;
}

bool takes_bias(const gmm_args &args) {
  for (int i = 0; i < args.num_groups; ++i)
    if (has_product(args, i) && reinterpret_cast<uintptr_t>(args.bias[i]) % 16 != 0) return false;
  return true;
}

const Kernel &choose(const gmm_args &args, int sm_count) {
  const Kernel *best = &k64x128;  // for sm_count = 1, where no cluster of two fits
  double best_us = 0;
  for (const Cost &cost : kCosts) {
    if (sm_count < cost.kernel->cluster_m * cost.kernel->cluster_n) continue;
    const double us = estimate_us(args, cost, sm_count);
    if (best_us == 0 || us < best_us) {
      best = cost.kernel;
      best_us = us;
    }
  }
  return *best;
}

size_t workspace_bytes(int products, int sm_count) { return carve_workspace(nullptr, products, sm_count).bytes; }

int launches(int products) {
  if (products == 0) return 0;
  const int groups_per_set_up = products <= kFewGroups ? kFewGroups : kManyGroups;
  return 1 + (products + groups_per_set_up - 1) / groups_per_set_up;
}

bool raster_along_m(const gmm_args &args) {
  int64_t m = 0, n = 0;
  for (int i = 0; i < args.num_groups; ++i) {
    if (!has_product(args, i)) continue;
    m += args.a[i].rows;
    n += args.b[i].cols;
  }
  return m < n;
}

}  // namespace gmm::sm90::pointer_array
