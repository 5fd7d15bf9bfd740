#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "core/error.h"
#include "core/fill.h"

namespace gmm {
namespace {

struct FillGroup {
  void *d;
  const void *bias;  // nullptr: zeros
  int64_t rows, cols, ld;
};

constexpr int kGroupsPerLaunch =
    100;  // 40 bytes each: the table stays under the 4 KB that every CUDA version passes by value

struct FillTable {
  FillGroup group[kGroupsPerLaunch];
};

constexpr int kThreads = 256;

// One group a blockIdx.y; its blocks stride over chunks of kVector elements of a row.
template <typename T, int kVector>
__global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ FillTable table, bool accumulate) {
  struct alignas(sizeof(T) * kVector) Chunk {
    T value[kVector];
  };
  const FillGroup &group = table.group[blockIdx.y];
  const int64_t chunks_per_row = group.cols / kVector;
  const int64_t chunks = group.rows * chunks_per_row;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < chunks; i += int64_t(gridDim.x) * kThreads) {
    const int64_t row = i / chunks_per_row, col = (i - row * chunks_per_row) * kVector;
    Chunk out;
    for (int v = 0; v < kVector; ++v) out.value[v] = group.bias ? static_cast<const T *>(group.bias)[col + v] : T(0.f);
    Chunk *d = reinterpret_cast<Chunk *>(static_cast<T *>(group.d) + row * group.ld + col);
    if (accumulate) {
      const Chunk old = *d;
      for (int v = 0; v < kVector; ++v) out.value[v] = T(float(out.value[v]) + float(old.value[v]));
    }
    *d = out;
  }
}

template <typename T>
void launch(const FillTable &table, int groups, bool accumulate, cudaStream_t stream) {
  constexpr int kVector = 16 / sizeof(T);
  bool vector = true;
  int64_t elements = 0;
  for (int i = 0; i < groups; ++i) {
    const FillGroup &g = table.group[i];
    vector = vector && reinterpret_cast<uintptr_t>(g.d) % 16 == 0 && g.ld % kVector == 0 && g.cols % kVector == 0;
    elements = std::max(elements, g.rows * g.cols);
  }
  // Enough blocks to fill a GPU with one large group, few enough that many small groups cost nothing.
  const int64_t per_block = int64_t(kThreads) * (vector ? kVector : 1) * 4;
  const dim3 grid(unsigned(std::clamp<int64_t>((elements + per_block - 1) / per_block, 1, 512)), unsigned(groups));
  if (vector)
    fill_kernel<T, kVector><<<grid, kThreads, 0, stream>>>(table, accumulate);
  else
    fill_kernel<T, 1><<<grid, kThreads, 0, stream>>>(table, accumulate);
  GMM_CUDA_CHECK(cudaGetLastError());
}

void launch(gmm_dtype dtype, const FillTable &table, int groups, bool accumulate, cudaStream_t stream) {
  switch (dtype) {
    case GMM_BF16:
      return launch<__nv_bfloat16>(table, groups, accumulate, stream);
    case GMM_FP16:
      return launch<__half>(table, groups, accumulate, stream);
    case GMM_FP32:
      return launch<float>(table, groups, accumulate, stream);
  }
}

}  // namespace

void fill(const gmm_args &args, bool all_groups, cudaStream_t stream) {
  FillTable table;
  int count = 0;
  for (int i = 0; i < args.num_groups; ++i) {
    const gmm_matrix &d = args.d[i];
    const void *bias = args.bias ? args.bias[i] : nullptr;
    const bool wanted = all_groups || args.a[i].cols == 0;
    if (!wanted || d.rows == 0 || d.cols == 0 || (args.accumulate && !bias)) continue;
    table.group[count++] = FillGroup{d.data, bias, d.rows, d.cols, d.ld};
    if (count == kGroupsPerLaunch) {
      launch(args.d_dtype, table, count, args.accumulate, stream);
      count = 0;
    }
  }
  if (count > 0) launch(args.d_dtype, table, count, args.accumulate, stream);
}

}  // namespace gmm
