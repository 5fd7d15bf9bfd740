/* gmm: grouped GEMM for mixture-of-experts models. The only public header; C, without torch or Python.
 *
 * A grouped GEMM is a list of independent matrix products of different sizes, done in one call:
 *
 *     D[i] = A[i] @ B[i] (+ bias[i]) (+ D[i] if accumulate)        for i in [0, num_groups)
 *
 * The groups are told in one of two forms (gmm_form): as a list of matrices whose sizes the host knows, or as
 * consecutive slices of one buffer whose ends lie in device memory ("ragged"), which the host never reads.
 *
 * gmm_multi_tensor_gemm() is the one entry. It validates its arguments, chooses a backend from the SM
 * architecture, dtypes, layouts and shapes (gmm_plan() makes the same choice and tells why), and runs it.
 *
 * For every function here:
 *   - Errors are status codes; the text of the last one of this thread is gmm_last_error(). No C++ exception leaves.
 *   - Every function may be called from several threads at once.
 *   - Nothing is written to any output before all checks have passed.
 */
#ifndef GMM_GMM_H_
#define GMM_GMM_H_

#include <stddef.h>
#include <stdint.h>

#define GMM_VERSION "0.1.0"

#if defined(_WIN32)
#define GMM_API
#else
#define GMM_API __attribute__((visibility("default")))
#endif

/* Enums have 32 bits; in C++ the type says so, since there a value that is none of the names would else be undefined
 * behaviour, not an error. */
#ifdef __cplusplus
#define GMM_INT32 : int32_t
extern "C" {
#else
#define GMM_INT32
#endif

typedef enum gmm_status GMM_INT32 {
  GMM_SUCCESS = 0,
  GMM_ERROR_INVALID_ARGUMENT = 1, /* the call contradicts itself; the text names argument, group, expected, got */
  GMM_ERROR_UNSUPPORTED = 2,      /* a valid call that the backend asked for, or this build, cannot take */
  GMM_ERROR_CUDA = 3,             /* the CUDA runtime or driver failed, in this call or in earlier work on the stream */
  GMM_ERROR_CUBLAS = 4,           /* cuBLAS failed */
  GMM_ERROR_INTERNAL = 5          /* a defect of this library */
} gmm_status;

typedef enum gmm_dtype GMM_INT32 { GMM_BF16 = 0, GMM_FP16 = 1, GMM_FP32 = 2 } gmm_dtype;

typedef enum gmm_backend GMM_INT32 {
  GMM_BACKEND_AUTO = 0,    /* the library chooses */
  GMM_BACKEND_CUTLASS = 1, /* grouped kernels, few launches for all groups; sm90 */
  GMM_BACKEND_CUBLAS = 2   /* one cuBLAS call a group, spread over several streams; any GPU */
} gmm_backend;
#define GMM_NUM_BACKENDS 3

/* What a call's a, b and d are. In the ragged forms each is ONE gmm_matrix; group g is a slice between offs[g - 1]
 * (0 for the first) and offs[g] along the ragged dimension, and operands without that dimension are a batch: group g's
 * matrix lies g * stride_? elements after the one given. */
typedef enum gmm_form GMM_INT32 {
  GMM_LIST = 0,     /* arrays of num_groups matrices */
  GMM_RAGGED_M = 1, /* a: T x K, its rows are cut;  b: K x N, batch (stride_b);  d: T x N, its rows are cut. Rows of d
                     * at and after offs[num_groups - 1] become zero (untouched when accumulating) */
  GMM_RAGGED_K = 2  /* a: M x T, its columns are cut;  b: T x N, its rows are cut;  d: M x N, batch (stride_d) */
} gmm_form;

/* What a call of GMM_RAGGED_M makes of its product P = A @ B, rounded to d_dtype, in the same kernel; with I =
 * h.cols / 2, w = row_weights (1 where that is NULL), and P, h and d cut into halves of I columns, gate and up. Not
 * with bias or accumulate; d_dtype is ab_dtype. What is written lies apart from all else, and is zero at and after the
 * last end. On sm90 alone; elsewhere, and with up to 80 rows a group, GMM_ERROR_UNSUPPORTED: product and activation are
 * then better off in kernels of their own, which the caller has. */
typedef enum gmm_epilogue GMM_INT32 {
  GMM_EPILOGUE_NONE = 0,
  GMM_EPILOGUE_SWIGLU = 1, /* P: T x 2I. d (T x I) = w * silu(gate(P)) * up(P), and h = P unless h.data is NULL */
  /* P: T x I, the gradient of what GMM_EPILOGUE_SWIGLU made of h. d (T x 2I) is the gradient of h: gate(d) = w * P *
   * up(h) * silu'(gate(h)), up(d) = w * P * silu(gate(h)). Where row_sums is not NULL, the sums of P * silu(gate(h)) *
   * up(h) along a row are the gradient of w: its float32 [4 * ceil(I / 128)][T] gets what is to be added for that. */
  GMM_EPILOGUE_SWIGLU_BACKWARD = 2
} gmm_epilogue;

/* One matrix in device memory, seen as it enters the product: op() has been applied, so a transposed operand
 * has its rows and cols swapped and column_major flipped.
 *
 *   data          device pointer to element (0, 0); may be NULL when rows or cols is 0. Not owned.
 *   rows, cols    >= 0, in elements.
 *   ld            elements between neighbouring rows (row-major) or neighbouring columns (column-major);
 *                 at least the contiguous extent (cols, or rows when column-major), and at least 1.
 *   column_major  0: element (r, c) is data[r * ld + c];  1: it is data[c * ld + r]. D must be row-major. */
typedef struct gmm_matrix {
  void *data;
  int64_t rows;
  int64_t cols;
  int64_t ld;
  int32_t column_major;
} gmm_matrix;

/* Everything one call needs, in host memory; read before the call returns, so it may be freed or reused at once.
 * Set struct_size to sizeof(gmm_args) and zero what you do not use: fields added later read as zero. */
typedef struct gmm_args {
  size_t struct_size;
  int32_t num_groups;  /* >= 0; an empty list does nothing */
  const gmm_matrix *a; /* [num_groups] (one in a ragged form, see gmm_form), M x K each; M, N, K may differ between
                          groups and may be 0 */
  const gmm_matrix *b; /* [num_groups], K x N each */
  const gmm_matrix *d; /* [num_groups], M x N each; written. Must not overlap one another, an A, a B or a bias */
  const void *const
      *bias;           /* [num_groups] device pointers to N elements of d_dtype, added to every row; NULL for none */
  gmm_dtype ab_dtype;  /* of every A and B */
  gmm_dtype d_dtype;   /* of every D and bias: ab_dtype, or GMM_FP32 */
  int32_t accumulate;  /* 0: D is overwritten, its old contents never read;  1: the product is added to D */
  int32_t allow_tf32;  /* 1: fp32 products may use TF32; 0: IEEE fp32. No effect on bf16 and fp16 */
  int32_t sm_margin;   /* >= 0: SMs to leave free for other kernels (communication); backends that cannot ignore it */
  int32_t device;      /* CUDA device ordinal that holds all the memory above */
  gmm_backend backend; /* GMM_BACKEND_AUTO, or one that must take the call (else GMM_ERROR_UNSUPPORTED) */
  const char *kernel;  /* NULL, or the CUTLASS kernel that must take the call, as gmm_plan_result.kernel names it */
  /* NULL, or where gmm_multi_tensor_gemm() gets a workspace that it was not given: called at most once, with
   * allocate_context and the device current, before anything is written. Returns device memory as `workspace` below, or
   * NULL to fail the call with GMM_ERROR_CUDA. Spares the caller gmm_workspace_size(), which makes the plan a first
   * time. */
  void *(*allocate)(size_t bytes, void *allocate_context);
  void *allocate_context;
  gmm_form form;
  /* The rest is for the ragged forms. offs: [num_groups] ends in device memory, non-decreasing, the last at most T;
   * read when the work runs, so that a graph replay sees new ones. Ends that are not so never cause an access out of
   * bounds: each is clamped to [0, T] and to the greatest before it. 4-byte aligned, or 8 with int64. */
  const void *offs;
  int32_t offs_int64;  /* 0: offs are int32; 1: int64 */
  int64_t stride_b;    /* GMM_RAGGED_M: >= 0: elements from a group's b to the next one's */
  int64_t stride_d;    /* GMM_RAGGED_K: the same of d */
  int64_t stride_bias; /* GMM_RAGGED_M: the same of bias, whose array then has one pointer */
  gmm_epilogue epilogue;
  gmm_matrix h; /* with an epilogue: T x 2I, row-major, of d_dtype; written by SWIGLU, read by SWIGLU_BACKWARD */
  const float *row_weights; /* with an epilogue: [T] in device memory, or NULL */
  float *row_sums;          /* GMM_EPILOGUE_SWIGLU_BACKWARD: see there; or NULL */
} gmm_args;

/* The device a plan is asked for. */
typedef struct gmm_device {
  size_t struct_size;
  int32_t sm;       /* compute capability, major * 10 + minor: 80, 86, 89, 90, 100, 120, ... */
  int32_t sm_count; /* multiprocessors; 0: typical for that architecture */
} gmm_device;

/* What a call would do. Strings are NUL-terminated. */
typedef struct gmm_plan_result {
  size_t struct_size;
  gmm_backend backend; /* never GMM_BACKEND_AUTO */
  char kernel[96];     /* e.g. "sm90_pointer_array_128x192x64_pingpong_2x1", "cublas_gemm_ex_4_streams" */
  int32_t tile_m;      /* tile of D a CTA computes at a time; 0 where the backend does not say */
  int32_t tile_n;
  int32_t tile_k;
  int32_t launches;       /* kernels (CUTLASS) or cuBLAS calls this takes, fills of empty products included */
  int32_t streams;        /* streams that the work is spread over, the caller's included */
  size_t workspace_bytes; /* device memory that gmm_multi_tensor_gemm() needs for this call */
  char reason[GMM_NUM_BACKENDS][256]; /* by gmm_backend: why it was not chosen; for the chosen one, why it was */
} gmm_plan_result;

/* Chooses backend and kernel for a call without running it. Pure host code; needs no GPU when `device` is given.
 *
 *   args    as for gmm_multi_tensor_gemm(). Pointers are checked for alignment, never followed.
 *   device  NULL: the GPU args->device, with the backends that this build has.
 *           Else:  a what-if for that architecture, with every backend built.
 *   result  set its struct_size before. Written on GMM_SUCCESS; on an error that comes after the checks of `args` only
 *           its reasons are, and the rest is zero.
 *
 * Does not synchronise. */
GMM_API gmm_status gmm_plan(const gmm_args *args, const gmm_device *device, gmm_plan_result *result);

/* Bytes of device memory that gmm_multi_tensor_gemm() needs for `args`; 0 is possible. Same errors as gmm_plan(). */
GMM_API gmm_status gmm_workspace_size(const gmm_args *args, size_t *bytes);

/* Runs the grouped GEMM.
 *
 *   args             host memory, free to reuse on return.
 *   workspace        device memory of args->device, 256-byte aligned, at least gmm_workspace_size() bytes; used in
 *                    stream order until the work of this call is done; not to be shared with a call on another stream.
 *                    NULL when none is needed or args->allocate gives it.
 *   workspace_bytes  its size.
 *   stream           cudaStream_t. All work is ordered after what the stream already holds and before what it gets
 *                    next, also where side streams do it.
 *
 * Never synchronises device or stream. May be captured in a CUDA graph: pointers and sizes are then frozen, the
 * contents of A, B, D and bias are read at each replay. The caller's current device is restored. */
GMM_API gmm_status gmm_multi_tensor_gemm(const gmm_args *args, void *workspace, size_t workspace_bytes, void *stream);

/* Text of the last error of this thread, "" when there was none. Valid until this thread's next call. */
GMM_API const char *gmm_last_error(void);

/* "backend: kernel" of this thread's last successful gmm_multi_tensor_gemm(), or what gmm_set_last_backend() noted;
 * "" before the first. Valid until this thread's next call. */
GMM_API const char *gmm_last_backend(void);

/* For bindings with backends of their own (a CPU reference, say): notes what ran, so that one place tells. */
GMM_API void gmm_set_last_backend(const char *text);

/* The library's version, GMM_VERSION at its build. */
GMM_API const char *gmm_version(void);

/* Fixed facts of this build, one `key=value` a line: version, cuda (nvcc's version or "none"), cutlass, cublas,
 * archs, compiler. */
GMM_API const char *gmm_build_info(void);

#undef GMM_INT32
#ifdef __cplusplus
}
#endif
#endif /* GMM_GMM_H_ */
