#include "cublas/multi_stream.h"

#include <cublas_v2.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/groups.h"
#include "cublas/heuristics.h"

#define GMM_CUBLAS_CHECK(call)                                                                                \
  do {                                                                                                        \
    cublasStatus_t gmm_status_ = (call);                                                                      \
    if (gmm_status_ != CUBLAS_STATUS_SUCCESS)                                                                 \
      throw Error(GMM_ERROR_CUBLAS, format("%s failed: %s (%s)%s", #call, cublasGetStatusString(gmm_status_), \
                                           cublasGetStatusName(gmm_status_), device_error().c_str()));        \
  } while (0)

namespace gmm::cublas {
namespace {

// For the text of a failure: the CUDA error that the device is in, of which cuBLAS says nothing. "" without one.
std::string device_error() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // the question must not break a capture
  cudaThreadExchangeStreamCaptureMode(&mode);
  size_t free, total;
  const cudaError_t error = cudaMemGetInfo(&free, &total);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (error == cudaSuccess) return "";
  return format(". The device reports %s (%s), which may come from earlier work on it", cudaGetErrorString(error),
                cudaGetErrorName(error));
}

// One stream of a fork. The first lane of a set works on the caller's stream and leaves its own unused.
struct Lane {
  cudaStream_t stream = nullptr;
  cublasHandle_t handle = nullptr;
  cudaEvent_t done = nullptr;
};

// Lanes that one call at a time uses.
struct LaneSet {
  std::vector<Lane> lanes;
  cudaEvent_t fork = nullptr;
  bool busy = false;
  // The capture that the streams were forked into. Until it ends, other work on them would become part of its graph.
  unsigned long long capture = 0;
};

// Capture id of a stream, 0 outside a capture.
unsigned long long capture_id(cudaStream_t stream) {
  if (stream == nullptr) return 0;  // the legacy stream cannot be captured, and may not even be asked during a capture
  cudaStreamCaptureStatus status;
  unsigned long long id = 0;
  GMM_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

// Whether a stream of the set is still part of a capture: those that a call forked into, which need not be all.
bool in_capture(const LaneSet &set) {
  return std::any_of(set.lanes.begin(), set.lanes.end(), [](const Lane &lane) { return capture_id(lane.stream) != 0; });
}

// Creating handles allocates; a capture in this thread would otherwise forbid that.
class RelaxedCapture {
 public:
  RelaxedCapture() { GMM_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

void add_lanes(LaneSet &set, int count) {
  if (int(set.lanes.size()) >= count) return;
  const RelaxedCapture relaxed;
  if (!set.fork) GMM_CUDA_CHECK(cudaEventCreateWithFlags(&set.fork, cudaEventDisableTiming));
  while (int(set.lanes.size()) < count) {
    Lane lane;
    GMM_CUDA_CHECK(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking));
    GMM_CUDA_CHECK(cudaEventCreateWithFlags(&lane.done, cudaEventDisableTiming));
    GMM_CUBLAS_CHECK(cublasCreate(&lane.handle));
    // Partial sums stay in fp32: the result may not depend on how cuBLAS splits K.
    GMM_CUBLAS_CHECK(cublasSetMathMode(
        lane.handle, cublasMath_t(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
    set.lanes.push_back(lane);
  }
}

// The lane sets of one device. Sets are made as concurrent calls need them and kept for the process's life.
class Pool {
 public:
  static Pool &of_device(int device) {
    constexpr int kMaxDevices = 64;
    static Pool *pools = new Pool[kMaxDevices];  // never destroyed: CUDA may be gone before static destructors run
    return pools[device];
  }

  LaneSet *acquire(unsigned long long capture) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto &set : sets_) {
      if (set->busy) continue;
      if (set->capture != 0 && set->capture != capture && in_capture(*set)) continue;
      set->busy = true;
      set->capture = capture;
      return set.get();
    }
    sets_.push_back(std::make_unique<LaneSet>());
    sets_.back()->busy = true;
    sets_.back()->capture = capture;
    return sets_.back().get();
  }

  void release(LaneSet *set) {
    const std::lock_guard<std::mutex> lock(mutex_);
    set->busy = false;
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<LaneSet>> sets_;
};

cudaDataType cuda_type(gmm_dtype dtype) {
  return dtype == GMM_BF16 ? CUDA_R_16BF : dtype == GMM_FP16 ? CUDA_R_16F : CUDA_R_32F;
}

// cuBLAS is column-major: D row-major is D^T, so the operands change places and B comes first.
void gemm(cublasHandle_t handle, const gmm_args &args, int i, bool add) {
  const gmm_matrix &a = args.a[i], &b = args.b[i], &d = args.d[i];
  const float alpha = 1.f, beta = add ? 1.f : 0.f;
  const cublasComputeType_t compute =
      args.ab_dtype == GMM_FP32 && args.allow_tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  GMM_CUBLAS_CHECK(cublasGemmEx_64(handle, b.column_major ? CUBLAS_OP_T : CUBLAS_OP_N,
                                   a.column_major ? CUBLAS_OP_T : CUBLAS_OP_N, d.cols, d.rows, a.cols, &alpha, b.data,
                                   cuda_type(args.ab_dtype), b.ld, a.data, cuda_type(args.ab_dtype), a.ld, &beta,
                                   d.data, cuda_type(args.d_dtype), d.ld, compute, CUBLAS_GEMM_DEFAULT));
}

struct Product {
  int group;
  double flops;
};

// Largest first, each to the lane with the least work: a large group never waits behind small ones.
void submit(const gmm_args &args, const Plan &plan, LaneSet &set) {
  std::vector<Product> products;
  products.reserve(plan.products);
  for (int i = 0; i < args.num_groups; ++i) {
    if (has_product(args, i))
      products.push_back({i, double(args.d[i].rows) * double(args.d[i].cols) * double(args.a[i].cols)});
  }
  std::stable_sort(products.begin(), products.end(),
                   [](const Product &x, const Product &y) { return x.flops > y.flops; });
  std::vector<double> load(plan.streams, 0.);
  for (const Product &product : products) {
    const size_t lane = std::min_element(load.begin(), load.end()) - load.begin();
    load[lane] += product.flops;
    gemm(set.lanes[lane].handle, args, product.group, plan.adds_to_d(args));
  }
}

void prepare(const gmm_args &args, const Plan &plan, LaneSet &set, void *workspace, const Device &device,
             cudaStream_t stream) {
  const size_t bytes = workspace_bytes_per_stream(device.sm);
  if (plan.streams > 1) GMM_CUDA_CHECK(cudaEventRecord(set.fork, stream));
  for (int i = 0; i < plan.streams; ++i) {
    const Lane &lane = set.lanes[i];
    if (i > 0) GMM_CUDA_CHECK(cudaStreamWaitEvent(lane.stream, set.fork, 0));
    GMM_CUBLAS_CHECK(cublasSetStream(lane.handle, i == 0 ? stream : lane.stream));
    // After cublasSetStream, which puts cuBLAS's own workspace back.
    GMM_CUBLAS_CHECK(cublasSetWorkspace(lane.handle, static_cast<char *>(workspace) + i * bytes, bytes));
    const int sm_target = args.sm_margin ? std::max(device.sm_count - args.sm_margin, 1) : 0;  // 0: all
    GMM_CUBLAS_CHECK(cublasSetSmCountTarget(lane.handle, sm_target));
  }
}

void join(const Plan &plan, const LaneSet &set, cudaStream_t stream) {
  for (int i = 1; i < plan.streams; ++i) {
    GMM_CUDA_CHECK(cudaEventRecord(set.lanes[i].done, set.lanes[i].stream));
    GMM_CUDA_CHECK(cudaStreamWaitEvent(stream, set.lanes[i].done, 0));
  }
}

}  // namespace

void run(const gmm_args &args, const Plan &plan, void *workspace, const Device &device, cudaStream_t stream) {
  Pool &pool = Pool::of_device(args.device);
  const auto give_back = [&pool](LaneSet *set) { pool.release(set); };
  const std::unique_ptr<LaneSet, decltype(give_back)> set(pool.acquire(capture_id(stream)), give_back);
  add_lanes(*set, plan.streams);
  prepare(args, plan, *set, workspace, device, stream);
  try {
    submit(args, plan, *set);
  } catch (...) {
    join(plan, *set, stream);  // what was submitted still uses the caller's memory
    throw;
  }
  join(plan, *set, stream);
}

}  // namespace gmm::cublas
