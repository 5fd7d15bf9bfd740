// What the kernels of both families ask of a matrix, because they read and write by TMA. Pure host code.
#pragma once

#include <cstdint>
#include <string>

#include "core/error.h"
#include "gmm/gmm.h"

namespace gmm::sm90 {

// False, with the reason in `why`, which may be null.
template <typename... Values>
bool refuse(std::string *why, const char *text, Values... values) {
  if (why) *why = format(text, values...);
  return false;
}

// In 32 bits, which the kernels' limits make sure of: 64-bit divisions would show in the host time of a call.
inline uint32_t ceil_div(int64_t x, uint32_t y) { return (uint32_t(x) + y - 1) / y; }

inline int bytes_of(gmm_dtype dtype) { return dtype == GMM_FP32 ? 4 : 2; }

// What a family counts in: in elements.
struct Limits {
  int64_t extent, ld;
};

// Extents are free where TMA loads: it cuts at them, element by element.
inline bool accepts_matrix(const gmm_matrix &m, const char *name, int group, int element_bytes, const Limits &limits,
                           std::string *why) {
  const int elements = 16 / element_bytes;
  if (m.rows > limits.extent || m.cols > limits.extent || m.ld > limits.ld)
    return refuse(why, "%s[%d]: %lld x %lld with leading dimension %lld is beyond the kernels' 32-bit extents", name,
                  group, (long long)m.rows, (long long)m.cols, (long long)m.ld);
  if (reinterpret_cast<uintptr_t>(m.data) % 16 != 0)
    return refuse(why, "%s[%d]: data %p is not 16-byte aligned", name, group, m.data);
  if (m.ld % elements != 0)
    return refuse(why, "%s[%d]: leading dimension %lld is not a multiple of %d elements (16 bytes)", name, group,
                  (long long)m.ld, elements);
  return true;
}

// The three operands of a group. Stores are not cut to the element: TMA writes the whole 16 bytes that a row ends in.
inline bool accepts_operands(const gmm_args &args, int group, const Limits &limits, std::string *why) {
  const gmm_matrix &d = args.d[group];
  const int d_bytes = bytes_of(args.d_dtype), elements = 16 / d_bytes;
  if (!accepts_matrix(args.a[group], "a", group, 2, limits, why) ||
      !accepts_matrix(args.b[group], "b", group, 2, limits, why) ||
      !accepts_matrix(d, "d", group, d_bytes, limits, why))
    return false;
  if (d.cols % elements == 0) return true;
  return refuse(why, "d[%d]: %lld columns are not a multiple of %d (16 bytes)", group, (long long)d.cols, elements);
}

}  // namespace gmm::sm90
