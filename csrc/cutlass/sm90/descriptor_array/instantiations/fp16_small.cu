#include "cutlass/sm90/descriptor_array/launch.cuh"

namespace gmm::sm90::descriptor_array {

template void launch<GMM_FP16, SmallParams>(const Kernel &, bool, bool, const SmallParams &, int, cudaStream_t);

}  // namespace gmm::sm90::descriptor_array
