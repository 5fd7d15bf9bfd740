#include "cutlass/sm90/descriptor_array/launch.cuh"

namespace gmm::sm90::descriptor_array {

template void launch_swiglu<GMM_FP16>(const Kernel &, bool, const SmallParams &, int, cudaStream_t);

}  // namespace gmm::sm90::descriptor_array
