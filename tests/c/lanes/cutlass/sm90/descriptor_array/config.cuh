// Stands in for the kernel's config.cuh where schedule.cuh runs on a CPU: the lanes of a warp are fibers, which take
// turns between the warp's functions.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "cutlass/sm90/descriptor_array/heuristics.h"

namespace lanes {

struct Index {
  unsigned x = 0;
};
inline Index thread, block, grid;
inline uint64_t exchanged[2][32];
inline int turn = 0;  // which half of `exchanged` the lanes fill
inline ucontext_t scheduler, contexts[32];

// Runs `body` once for each lane.
inline void run(const std::function<void()> &body) {
  static const std::function<void()> *running;
  static std::vector<char> stacks(32 * 65536);
  static bool ended[32];
  running = &body;
  for (int lane = 0; lane < 32; ++lane) {
    ended[lane] = false;
    getcontext(&contexts[lane]);
    contexts[lane].uc_stack = {&stacks[lane * 65536], 0, 65536};
    contexts[lane].uc_link = &scheduler;
    makecontext(
        &contexts[lane],
        +[] {
          (*running)();
          ended[thread.x] = true;
        },
        0);
  }
  for (bool any = true; any; turn ^= 1) {
    any = false;
    for (int lane = 0; lane < 32; ++lane) {
      if (ended[lane]) continue;
      thread.x = lane;
      swapcontext(&scheduler, &contexts[lane]);
      any |= !ended[lane];
    }
  }
}

// What the lanes bring along; all of them get here before one goes on.
template <class T>
const uint64_t *exchange(T value) {
  const int half = turn;
  exchanged[half][thread.x] = 0;
  std::memcpy(&exchanged[half][thread.x], &value, sizeof value);
  swapcontext(&contexts[thread.x], &scheduler);
  return exchanged[half];
}

template <class T>
T as(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T, class Function>
T reduce(T value, const Function &function) {
  const uint64_t *all = exchange(value);
  T result = as<T>(all[0]);
  for (int lane = 1; lane < 32; ++lane) result = function(result, as<T>(all[lane]));
  return result;
}

}  // namespace lanes

#define threadIdx lanes::thread
#define blockIdx lanes::block
#define gridDim lanes::grid
#define CUTLASS_DEVICE inline
#define CUTE_UNROLL
#define CUTE_NO_UNROLL

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return lanes::as<T>(lanes::exchange(value)[lane & 31]);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int by) {
  const int lane = lanes::thread.x;
  return lanes::as<T>(lanes::exchange(value)[lane >= by ? lane - by : lane]);
}
template <class T>
T __reduce_max_sync(unsigned, T value) {
  return lanes::reduce(value, [](T a, T b) { return std::max(a, b); });
}
template <class T>
T __reduce_min_sync(unsigned, T value) {
  return lanes::reduce(value, [](T a, T b) { return std::min(a, b); });
}
template <class T>
T __reduce_add_sync(unsigned, T value) {
  return lanes::reduce(value, [](T a, T b) { return T(a + b); });
}
inline unsigned __ballot_sync(unsigned, bool value) {
  return lanes::reduce(value ? 1u << lanes::thread.x : 0u, [](unsigned a, unsigned b) { return a | b; });
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline int __ffs(unsigned value) { return __builtin_ffs(int(value)); }
inline int __clz(unsigned value) { return value ? __builtin_clz(value) : 32; }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
template <class T>
T __ldg(const T *at) {
  return *at;
}

namespace cutlass::arch {
void wait_on_dependent_grids();
}

namespace gmm::sm90::descriptor_array {

using std::max, std::min;

constexpr int kBlockK = 64, kTileRing = 4, kTilesAhead = 2, kShortBlocks = 4;

struct Tile {
  int p, q, q_end, group, k, k_end, k_blocks_before, shares_q;

  int k_blocks() const { return (k_end - k + kBlockK - 1) / kBlockK; }
};
struct GroupShape {
  int m, n, k, tiles_end, row_d;
};
struct RaggedGroups {
  const void *offs;
  int offs_int64, total, m, n, k;
};

// Only named by what does not run here.
template <class C>
struct SharedStorage;
void cluster_wait();
void compiler_fence();

}  // namespace gmm::sm90::descriptor_array

// No machine code of a GPU: the prefetch of the ends.
#define asm
#define volatile(...)
