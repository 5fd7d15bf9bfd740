#include "cutlass/sm90/descriptor_array/heuristics.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/groups.h"
#include "cutlass/sm90/tma.h"

namespace gmm::sm90::descriptor_array {
namespace {

// Coordinates are 32-bit, rounded up to whole tiles; a map's strides are 40-bit, and tail maps compute with them.
constexpr Limits kLimits{0x7fff0000, int64_t(1) << 31};

// Tokens in K: a is stored [tokens, M] and b [tokens, N].
bool tokens_in_k(const gmm_matrix &a, const gmm_matrix &b) { return a.column_major && !b.column_major; }

bool accepts_group(const gmm_args &args, int i, bool in_k, std::string *why) {
  const gmm_matrix &a = args.a[i], &b = args.b[i];
  if (!accepts_operands(args, i, kLimits, why)) return false;
  if (in_k ? !tokens_in_k(a, b) : a.column_major)
    return refuse(why,
                  "a[%d] is %s-major and b[%d] %s-major; the kernels take a row-major, or a column-major and b "
                  "row-major",
                  i, a.column_major ? "column" : "row", i, b.column_major ? "column" : "row");
  return true;
}

Launches count_launches(const gmm_args &args) {
  const int d_bytes = bytes_of(args.d_dtype), maps_of_d = 1 + reads_d(args);
  int count = 0;
  Capacity used = kLarge;  // of the current launch; the first group opens one
  const gmm_matrix *a = nullptr, *d = nullptr;
  for (int i = 0; i < args.num_groups; ++i) {
    if (!has_product(args, i)) continue;
    const bool shares = a && !args.a[i].column_major;
    int maps = 1 + (shares && continues(*a, args.a[i], 2) ? 0 : 1) +
               (shares && continues(*d, args.d[i], d_bytes) ? 0 : maps_of_d);
    if (used.maps + maps > kLarge.maps || used.groups + 1 > kLarge.groups) {
      ++count;
      used = {0, 0};
      maps = 2 + maps_of_d;
    }
    used.maps += maps;
    used.groups += 1;
    a = &args.a[i];
    d = &args.d[i];
  }
  return {count, count <= 1 && used.maps <= kSmall.maps && used.groups <= kSmall.groups};
}

bool accepts_list(const gmm_args &args, Launches &launches, std::string *why) {
  int64_t tiles = 0, rows = 0;  // 32-bit in the kernel
  const gmm_matrix *first_a = nullptr, *first_b = nullptr;
  for (int i = 0; i < args.num_groups; ++i) {
    if (!has_product(args, i)) continue;
    if (!first_b) first_a = &args.a[i], first_b = &args.b[i];
    if (!accepts_group(args, i, tokens_in_k(*first_a, *first_b), why)) return false;
    if (!args.b[i].column_major != !first_b->column_major) return refuse(why, "b[%d]: another layout than before", i);
    tiles += int64_t(ceil_div(args.d[i].rows, 16)) * ceil_div(args.d[i].cols, 64);
    rows += args.d[i].rows;
    if (tiles >= INT32_MAX || rows >= INT32_MAX) return refuse(why, "more tiles or rows than 32 bits count");
  }
  if (first_b && args.bias && tokens_in_k(*first_a, *first_b)) return refuse(why, "bias with a transposed a");
  launches = count_launches(args);
  if (launches.count > kMaxLaunches) return refuse(why, "%d groups need %d launches", args.num_groups, launches.count);
  const bool fp32 = args.d_dtype == GMM_FP32, in_k = first_b && tokens_in_k(*first_a, *first_b);
  if (!launches.small && (in_k ? args.accumulate && !fp32 : args.accumulate || fp32))
    return refuse(why, "%d groups need large parameters, which no kernel for this D takes", args.num_groups);
  return true;
}

// Few rows: what comes into an SM for a block of K, in lines, with tiles of that kernel; `tiles` of a row tile each.
int64_t few_rows_cost(const Kernel &kernel, int64_t tiles, int64_t rows_of_group, int sm_count) {
  return ceil_div(tiles, sm_count) * (kernel.tile_n + rows_of_group);
}

bool accepts_epilogue(const gmm_args &args, std::string *why) {
  const gmm_matrix &a = args.a[0], &h = args.h;
  if (!args.kernel && a.rows <= int64_t(kFewRows) * args.num_groups)
    return refuse(why, "%lld rows in %d groups: for up to %d a group no kernel has an epilogue", (long long)a.rows,
                  args.num_groups, kFewRows);
  if (a.cols == 0) return refuse(why, "an epilogue without a product, as K = 0");
  // Their halves are matrices of their own.
  const int64_t half = (args.epilogue == GMM_EPILOGUE_SWIGLU ? args.d[0].cols : args.b[0].cols);
  if (half % 8 != 0)
    return refuse(why, "halves of h of %lld columns, which are no multiple of 16 bytes", (long long)half);
  if (h.data && (reinterpret_cast<uintptr_t>(h.data) % 16 != 0 || h.ld % 8 != 0 || h.ld >= kLimits.ld))
    return refuse(why, "h: expected an address and a leading dimension that are multiples of 16 bytes, got %p and %lld",
                  h.data, (long long)h.ld);
  return true;
}

bool accepts_ragged(const gmm_args &args, std::string *why) {
  const gmm_matrix &d = args.d[0];
  const bool in_k = args.form == GMM_RAGGED_K;
  if (!accepts_group(args, 0, in_k, why)) return false;
  if (args.epilogue && !accepts_epilogue(args, why)) return false;
  if (args.bias && args.a[0].cols == 0) return refuse(why, "bias without a product, as K = 0");
  const int64_t batch_stride = in_k ? args.stride_d : args.stride_b;
  const int bytes = in_k ? bytes_of(args.d_dtype) : 2;
  if (batch_stride % (16 / bytes) != 0 || batch_stride >= (int64_t(1) << 39) / bytes)
    return refuse(why, "%s: expected matrices a multiple of 16 bytes and less than 2^39 apart, got %lld elements",
                  in_k ? "d" : "b", (long long)batch_stride);
  // In floating point: the product of three 32-bit numbers overflows 64 bits.
  const double tiles = in_k ? double(args.num_groups) * ceil_div(d.rows, 64) * ceil_div(d.cols, 64)
                            : (double(ceil_div(d.rows, 16)) + args.num_groups) * ceil_div(args.b[0].cols, 64);
  if (tiles >= INT32_MAX) return refuse(why, "more tiles than 32 bits count");
  return true;
}

bool first_is_column_major(const gmm_args &args) {
  for (int i = 0; i < args.num_groups; ++i)
    if (has_product(args, i)) return args.a[i].column_major;
  return false;
}

// As the ragged kernel does, see schedule.cuh.
int choose_tile_columns(const gmm_args &args, const Kernel &kernel, int clusters) {
  double wide = 0, narrow = 0;  // tiles of a cluster
  for (int i = 0; i < args.num_groups; ++i) {
    if (!has_product(args, i)) continue;
    const double m_tiles = ceil_div(args.d[i].rows, kernel.tile_m * kernel.cluster_m);
    wide += m_tiles * ceil_div(args.d[i].cols, 192);
    narrow += m_tiles * ceil_div(args.d[i].cols, 128);
  }
  const bool spreads = std::ceil(narrow / clusters) * 160 < std::ceil(wide / clusters) * (192 + 32);
  return wide <= 4 * clusters && spreads ? 128 : 192;
}

}  // namespace

bool accepts(const gmm_args &args, Launches &launches, std::string *why) {
  if (args.ab_dtype == GMM_FP32) return refuse(why, "takes bf16 and fp16 inputs, got fp32");
  launches = {1, true};
  return args.form == GMM_LIST ? accepts_list(args, launches, why) : accepts_ragged(args, why);
}

bool continues(const gmm_matrix &previous, const gmm_matrix &next, int element_bytes) {
  // Unsigned, as a caller's address and sizes may lead beyond the end of memory.
  const auto address = [](const gmm_matrix &m) { return reinterpret_cast<uintptr_t>(m.data); };
  return next.ld == previous.ld && next.cols == previous.cols &&
         address(next) - address(previous) == uintptr_t(previous.rows) * previous.ld * element_bytes;
}

const Kernel &choose(const gmm_args &args, int sm_count) {
  if (args.form == GMM_RAGGED_K) return k128x192;
  if (args.epilogue) return args.epilogue == GMM_EPILOGUE_SWIGLU ? kSwiglu : kSwigluBackward;
  const bool list = args.form == GMM_LIST;
  int64_t rows = 0, groups = 0, narrow = 0, wide = 0;  // tiles of 64 and 128 columns, one along the rows
  for (int i = 0; i < (list ? args.num_groups : 1); ++i) {
    if (list && !has_product(args, i)) continue;
    if (args.a[i].column_major) return k128x192;
    const int64_t alike = list ? 1 : args.num_groups;
    rows += args.d[i].rows;
    groups += alike;
    narrow += alike * ceil_div(args.d[i].cols, k128x64.tile_n);
    wide += alike * ceil_div(args.d[i].cols, k128x128.tile_n);
  }
  if (rows > kFewRows * groups || !takes(k128x64, args)) return k192x128;
  const int64_t each = groups ? ceil_div(rows, groups) : 0;
  const bool is_wide = few_rows_cost(k128x128, wide, each, sm_count) < few_rows_cost(k128x64, narrow, each, sm_count);
  return is_wide ? k128x128 : k128x64;
}

bool takes(const Kernel &kernel, const gmm_args &args) {
  if ((&kernel == &kSwiglu) != (args.epilogue == GMM_EPILOGUE_SWIGLU)) return false;
  if ((&kernel == &kSwigluBackward) != (args.epilogue == GMM_EPILOGUE_SWIGLU_BACKWARD)) return false;
  const bool in_k = args.form == GMM_RAGGED_K || (args.form == GMM_LIST && first_is_column_major(args));
  if ((&kernel == &k128x192) != in_k) return false;
  return (&kernel != &k128x64 && &kernel != &k128x128) || !args.accumulate || args.d_dtype == GMM_FP32;
}

int few_tokens(const gmm_args &args, const Kernel &kernel) {
  constexpr int kPerByte = 96;  // of an element of D
  return &kernel == &k128x192 ? kPerByte * bytes_of(args.d_dtype) : kFewRows;
}

int choose_tile_q(const gmm_args &args, const Kernel &kernel, int sm_count) {
  if (&kernel == &k128x192) return choose_tile_columns(args, kernel, sm_count / kernel.cluster_m);
  if (kernel.cluster_n == 1) return kernel.tile_m;
  // As the ragged kernel does, see schedule.cuh.
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
