// The next tiles, shared by the clusters of one launch, which take them from either end of the schedule.
//
// It lies in the call's workspace, which nobody has cleared: what is there may be anything, and a launch that cleared
// it would be a second one. So the first cluster opens it under a tag that no other launch has ever had, and counts
// from what it finds; the last to ask closes it, for replays of a CUDA graph come with the same tag. Calls share
// nothing.
#pragma once

#include <cutlass/cutlass.h>

#include "cutlass/sm90/descriptor_array/params.h"

namespace gmm::sm90::descriptor_array {

// The tag, and what the count began with.
struct Word {
  uint64_t low, high;

  CUTLASS_DEVICE bool operator==(const Word &other) const { return low == other.low && high == other.high; }
};

CUTLASS_DEVICE Word load(const uint64_t *at) {
  Word seen;
  asm volatile("{\n.reg .b128 seen;\nld.acquire.gpu.global.b128 seen, [%2];\nmov.b128 {%0, %1}, seen;\n}\n"
               : "=l"(seen.low), "=l"(seen.high)
               : "l"(at)
               : "memory");
  return seen;
}

CUTLASS_DEVICE Word compare_and_swap(uint64_t *at, const Word &expected, const Word &desired) {
  Word seen;
  asm volatile(
      "{\n.reg .b128 seen, expected, desired;\n"
      "mov.b128 expected, {%3, %4};\nmov.b128 desired, {%5, %6};\n"
      "atom.acq_rel.gpu.global.cas.b128 seen, [%2], expected, desired;\n"
      "mov.b128 {%0, %1}, seen;\n}\n"
      : "=l"(seen.low), "=l"(seen.high)
      : "l"(at), "l"(expected.low), "l"(expected.high), "l"(desired.low), "l"(desired.high)
      : "memory");
  return seen;
}

// Tiles that were taken.
struct Taken {
  int front, back;
};

// For one thread of a cluster.
class Counter {
 public:
  CUTLASS_DEVICE explicit Counter(const TileCounter &counter) : counter_(counter) {}

  // After the wait for the kernels before, which may have used the memory. The first cluster opens the counter, the
  // others wait for it: if all tried, the last would get through after 6 us (H200). But they do not count on it to run
  // at all before they end.
  CUTLASS_DEVICE void open(bool first) {
    constexpr int kPatience = 100;  // about 100 us
    Word seen = load(counter_.workspace);
    for (int i = 0; !first && !is_open(seen) && i < kPatience; ++i) seen = load(counter_.workspace);
    while (!is_open(seen)) {
      const Word opened{counter_.tag, __ldcg(next())};
      const Word before = compare_and_swap(counter_.workspace, seen, opened);
      seen = before == seen ? opened : before;
    }
    first_ = seen.high;
  }

  // Those before this one.
  CUTLASS_DEVICE Taken take(bool at_back) const {
    const uint64_t taken = atomicAdd(next(), at_back ? 1ull << 32 : 1ull) - first_;
    return {int(uint32_t(taken)), int(taken >> 32)};
  }

  CUTLASS_DEVICE void close() const { counter_.workspace[0] = 0; }

 private:
  CUTLASS_DEVICE bool is_open(const Word &word) const { return word.low == counter_.tag; }
  // The tiles taken from the back in the high half, which those from the front never reach.
  CUTLASS_DEVICE unsigned long long *next() const {
    return reinterpret_cast<unsigned long long *>(counter_.workspace + 2);
  }

  const TileCounter &counter_;
  uint64_t first_ = 0;
};

}  // namespace gmm::sm90::descriptor_array
