// The SM90 kernels by name: tile, cluster, schedule. No CUTLASS here; the plan, its tests and the kernels share this
// table.
#pragma once

namespace gmm::sm90 {

enum class Family {
  kPointerArray,     // CUTLASS's pointer-array collectives: any list
  kDescriptorArray,  // one TMA descriptor an operand and group, in the kernel's parameters
};

struct Kernel {
  const char *name;
  Family family;
  int tile_m, tile_n, tile_k;
  int cluster_m, cluster_n;
  bool pingpong;
};

}  // namespace gmm::sm90
