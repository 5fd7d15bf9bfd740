#include "cutlass/sm90/descriptor_array/launch.cuh"

namespace gmm::sm90::descriptor_array {

template void launch<GMM_FP16, LargeParams>(const Kernel &, bool, bool, const LargeParams &, int, cudaStream_t);

}  // namespace gmm::sm90::descriptor_array
