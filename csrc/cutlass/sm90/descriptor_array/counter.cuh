// The number of the next tile, shared by the clusters of one launch.
//
// It lies in the call's workspace, which nobody has cleared: what is there may be anything, and a launch that cleared
// it would be a second one. So the first cluster to ask opens the counter under a tag that no other launch has ever
// had, and the last to ask closes it, for replays of a CUDA graph come with the same tag. Calls share nothing.
#pragma once

#include <cutlass/cutlass.h>

#include "cutlass/sm90/descriptor_array/params.h"

namespace gmm::sm90::descriptor_array {

struct Word {
  uint64_t low, high;

  CUTLASS_DEVICE bool operator==(const Word &other) const { return low == other.low && high == other.high; }
};

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

class Counter {
 public:
  // By one thread; after the wait for the kernels before, which may have used the memory.
  CUTLASS_DEVICE explicit Counter(const TileCounter &counter) : counter_(counter) {}

  CUTLASS_DEVICE void open() const {
    for (Word seen{0, 0};;) {
      if (seen == word(kOpen)) return;
      const bool opening = seen == word(kOpening);  // by another cluster, which is about to set the number to zero
      const Word before = compare_and_swap(counter_.workspace, seen, opening ? seen : word(kOpening));
      if (!opening && before == seen) {
        atomicExch(next(), 0u);
        __threadfence();
        compare_and_swap(counter_.workspace, word(kOpening), word(kOpen));
        return;
      }
      seen = before;
    }
  }

  CUTLASS_DEVICE int take() const { return int(atomicAdd(next(), 1u)); }

  CUTLASS_DEVICE void close() const { compare_and_swap(counter_.workspace, word(kOpen), {0, 0}); }

 private:
  enum State : uint64_t { kOpening = 1, kOpen = 2 };

  CUTLASS_DEVICE Word word(State state) const { return {counter_.tag[0] | state, counter_.tag[1]}; }
  CUTLASS_DEVICE unsigned *next() const { return reinterpret_cast<unsigned *>(counter_.workspace + 2); }

  const TileCounter &counter_;
};

}  // namespace gmm::sm90::descriptor_array
