// The ends of the ragged groups, which lie in device memory.
#pragma once

#include "cutlass/sm90/descriptor_array/config.cuh"

namespace gmm::sm90::descriptor_array {

// A window of 32 groups, of which each lane of a warp holds one. The last window is filled up with groups that end with
// the last token.
template <class Params>
class Ends {
 public:
  // A rehearsal reads none: its first group has all tokens.
  CUTLASS_DEVICE explicit Ends(const Params &params, bool rehearses = false)
      : params_(params), ragged_(params.ragged), rehearses_(rehearses) {}

  int begin = 0, end = 0;  // of the lane's group

  // Brings the first 32 lines of ends into the L2, all at once.
  CUTLASS_DEVICE void prefetch() const {
    const int at = threadIdx.x % 32 * 128;
    if (at < params_.groups * (ragged_.offs_int64 ? 8 : 4))
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char *>(ragged_.offs) + at));
  }

  // The window that begins with group `first`: 0, or the one after the window before; or, of the first 32 windows, one
  // that was loaded before. Ends that decrease are raised to the greatest before.
  CUTLASS_DEVICE void load(int first) {
    const int lane = threadIdx.x % 32, window = first / 32;
    const int last = first ? __shfl_sync(~0u, last_, window - 1) : 0;
    end = max(end_of(first + lane), last);
    int before = __shfl_up_sync(~0u, end, 1);
    if (__any_sync(~0u, lane > 0 && end < before)) {
      CUTE_NO_UNROLL
      for (int i = 1; i < 32; i *= 2) {
        const int other = __shfl_up_sync(~0u, end, i);
        if (lane >= i) end = max(end, other);
      }
      before = __shfl_up_sync(~0u, end, 1);
    }
    begin = lane ? before : last;
    const int last_end = __shfl_sync(~0u, end, 31);
    if (lane == (window & 31)) last_ = last_end;
  }

 private:
  CUTLASS_DEVICE int end_of(int g) const {
    if (g >= params_.groups || rehearses_) return ragged_.total;
    const int64_t end = ragged_.offs_int64 ? __ldg(static_cast<const long long *>(ragged_.offs) + g)
                                           : __ldg(static_cast<const int *>(ragged_.offs) + g);
    return int(max(int64_t(0), min(end, int64_t(ragged_.total))));
  }

  const Params &params_;
  const RaggedGroups &ragged_;
  const bool rehearses_;
  int last_ = 0;  // of the window that has the lane's number, modulo 32, the last end
};

}  // namespace gmm::sm90::descriptor_array
