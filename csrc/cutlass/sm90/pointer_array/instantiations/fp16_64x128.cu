#include "cutlass/sm90/pointer_array/gemm.cuh"

namespace gmm::sm90::pointer_array {
template void launch_gemm<k64x128, GMM_FP16>(const Gemm &, cudaStream_t);
}  // namespace gmm::sm90::pointer_array
