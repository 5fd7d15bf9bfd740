// The one description of the workspace: its size for the plan, its parts for the set-up kernel and the GEMM.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace gmm::sm90::pointer_array {

// Device memory. All arrays have one element for each group with M, N and K > 0. Written by the set-up kernel, except
// tensor_maps, which each CTA of the GEMM writes for itself; nothing is expected to be zero.
struct Workspace {
  struct Shape {
    int32_t m, n, k;
  } *shape;
  const void **a, **b, **c;
  void **d;
  int64_t *ld_a, *ld_b, *ld_c, *ld_d;
  std::byte *tensor_maps;
  size_t bytes;
};

// Groups that one launch of the set-up kernel takes: its parameters then have 4 KB, or the most that CUDA allows.
inline constexpr int kFewGroups = 70;
inline constexpr int kManyGroups = 580;

inline constexpr size_t kWorkspaceAlignment = 256;

// CUTLASS keeps a 128-byte tensor map a CTA for each of A, B and C, and one a consumer warpgroup for D.
inline constexpr size_t kTensorMapBytesPerSm = 128 * (3 + 2);

inline Workspace carve_workspace(void *base, int products, int sm_count) {
  Workspace w{};
  const auto take = [&](auto &part, size_t bytes) {
    part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(reinterpret_cast<uintptr_t>(base) + w.bytes);
    w.bytes += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  };
  take(w.shape, products * sizeof(*w.shape));
  take(w.a, products * sizeof(*w.a));
  take(w.b, products * sizeof(*w.b));
  take(w.c, products * sizeof(*w.c));
  take(w.d, products * sizeof(*w.d));
  take(w.ld_a, products * sizeof(*w.ld_a));
  take(w.ld_b, products * sizeof(*w.ld_b));
  take(w.ld_c, products * sizeof(*w.ld_c));
  take(w.ld_d, products * sizeof(*w.ld_d));
  take(w.tensor_maps, sm_count * kTensorMapBytesPerSm);
  return w;
}

}  // namespace gmm::sm90::pointer_array
