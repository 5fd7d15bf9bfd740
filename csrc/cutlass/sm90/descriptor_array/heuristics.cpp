#include "cutlass/sm90/descriptor_array/heuristics.h"

#include <algorithm>
#include <cstdint>

#include "core/groups.h"

namespace gmm::sm90::descriptor_array {
namespace {

// 32 bits: 64-bit divisions would show in the host time of a call.
uint32_t ceil_div(int64_t a, uint32_t b) { return (uint32_t(a) + b - 1) / b; }

// What a TMA descriptor of 2-byte elements demands.
bool tma_ready(const gmm_matrix &m) {
  constexpr int64_t kMaxExtent = int64_t(1) << 31, kMaxStrideBytes = int64_t(1) << 40;
  return reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && m.ld % 8 == 0 && m.rows < kMaxExtent && m.cols < kMaxExtent &&
         m.ld * 2 < kMaxStrideBytes;
}

}  // namespace

bool accepts(const gmm_args &args) {
  if (args.ab_dtype == GMM_FP32 || args.d_dtype != args.ab_dtype || args.bias || args.accumulate) return false;
  int64_t tiles = 0, rows = 0;  // 32-bit in the kernel
  int b_column_major = -1;
  for (int i = 0; i < args.num_groups; ++i) {
    if (!has_product(args, i)) continue;
    const gmm_matrix &a = args.a[i], &b = args.b[i], &d = args.d[i];
    if (a.column_major || !tma_ready(a) || !tma_ready(b) || !tma_ready(d)) return false;
    if (d.cols % 8 != 0) return false;  // a TMA store writes the whole 16 bytes that a row ends in
    if (b_column_major >= 0 && b_column_major != b.column_major) return false;
    b_column_major = b.column_major;
    tiles += int64_t(ceil_div(d.rows, 16)) * ceil_div(d.cols, 64);
    rows += d.rows;
  }
  return tiles < INT32_MAX && rows < INT32_MAX && launches(args) <= kMaxLaunches;
}

bool continues(const gmm_matrix &previous, const gmm_matrix &next) {
  return next.ld == previous.ld && next.cols == previous.cols &&
         static_cast<char *>(next.data) == static_cast<char *>(previous.data) + previous.rows * previous.ld * 2;
}

int launches(const gmm_args &args) {
  int launches = 0;
  Capacity used = kLarge;  // of the current launch; the first group opens one
  const gmm_matrix *a = nullptr, *d = nullptr;
  for (int i = 0; i < args.num_groups; ++i) {
    if (!has_product(args, i)) continue;
    int maps = 1 + !(a && continues(*a, args.a[i])) + !(d && continues(*d, args.d[i]));
    if (used.maps + maps > kLarge.maps || used.groups + 1 > kLarge.groups) {
      ++launches;
      used = {0, 0};
      maps = 3;
    }
    used.maps += maps;
    used.groups += 1;
    a = &args.a[i];
    d = &args.d[i];
  }
  return launches;
}

const Kernel &choose(const gmm_args &args) {
  int64_t rows = 0, groups = 0;
  for (int i = 0; i < args.num_groups; ++i) {
    if (!has_product(args, i)) continue;
    rows += args.d[i].rows;
    ++groups;
  }
  return rows <= 96 * groups ? k128x64 : k192x128;
}

int choose_tile_rows(const gmm_args &args, const Kernel &kernel, int sm_count) {
  if (kernel.cluster_n == 1) return kernel.tile_m;
  // Persistent CTAs take equal numbers of tiles: minimise (waves) x (mean time of a tile). A tile's time grows with its
  // rows, plus about 20 rows' worth for filling the pipeline and the epilogue (measured on an H200).
  constexpr int kOverheadRows = 20;
  int best_rows = kernel.tile_m;
  double best = 0;
  for (int rows = kernel.tile_m; rows >= 96; rows -= 16) {
    double tiles = 0, time = 0;  // time: rows of all tiles together, in units of 16, and what each tile costs besides
    for (int i = 0; i < args.num_groups; ++i) {
      if (!has_product(args, i)) continue;
      const double m_tiles = ceil_div(args.d[i].rows, rows), n_tiles = ceil_div(args.d[i].cols, kernel.tile_n);
      tiles += m_tiles * n_tiles;
      time += (ceil_div(args.d[i].rows, 16) * 16. + m_tiles * kOverheadRows) * n_tiles * double(args.a[i].cols);
    }
    const double waves = tiles / sm_count;
    const double estimate = time / waves * double(int64_t(waves) + (waves > int64_t(waves)));
    if (best == 0 || estimate < best) {
      best = estimate;
      best_rows = rows;
    }
  }
  return best_rows;
}

}  // namespace gmm::sm90::descriptor_array
