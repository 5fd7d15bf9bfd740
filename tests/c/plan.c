/* The C interface without a GPU, torch or Python: gmm_plan() for GPUs that are not here, and what it says to bad calls.
 * Exits with 1 at the first surprise. Compiled as C99. */
#include <gmm/gmm.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                  \
  do {                                                                                                    \
    if (!(condition)) {                                                                                   \
      fprintf(stderr, "plan.c:%d: %s\n  gmm_last_error(): %s\n", __LINE__, #condition, gmm_last_error()); \
      exit(1);                                                                                            \
    }                                                                                                     \
  } while (0)

enum { kGroups = 3 };

typedef struct Call {
  gmm_args args;
  gmm_matrix a[kGroups], b[kGroups], d[kGroups];
  const void *bias[kGroups];
} Call;

static const gmm_device kH200 = {sizeof(gmm_device), 90, 132};
static const gmm_device kA100 = {sizeof(gmm_device), 80, 0};
static const gmm_device kV100 = {sizeof(gmm_device), 70, 0};

/* Never followed, only checked for alignment. */
static void *address(size_t offset) { return (void *)(0x7f0000000000u + offset); }

static gmm_matrix matrix(int64_t rows, int64_t cols, int column_major) {
  gmm_matrix m = {address(0), rows, cols, column_major ? rows : cols, column_major};
  return m;
}

/* x [4096, 2048] @ w [768, 2048]^T in every group. */
static void forward(Call *call) {
  memset(call, 0, sizeof *call);
  for (int i = 0; i < kGroups; ++i) {
    call->a[i] = matrix(4096, 2048, 0);
    call->b[i] = matrix(2048, 768, 1);
    call->d[i] = matrix(4096, 768, 0);
    call->bias[i] = address(0);
  }
  call->args.struct_size = sizeof call->args;
  call->args.num_groups = kGroups;
  call->args.a = call->a;
  call->args.b = call->b;
  call->args.d = call->d;
  call->args.ab_dtype = call->args.d_dtype = GMM_BF16;
}

static gmm_status plan(const Call *call, const gmm_device *device, gmm_plan_result *result) {
  memset(result, 0, sizeof *result);
  result->struct_size = sizeof *result;
  return gmm_plan(&call->args, device, result);
}

/* The call is refused as invalid, and the text holds both words. */
static void invalid(const Call *call, const char *word, const char *other, int line) {
  gmm_plan_result result;
  size_t bytes = 7;
  if (plan(call, &kH200, &result) != GMM_ERROR_INVALID_ARGUMENT || !strstr(gmm_last_error(), word) ||
      !strstr(gmm_last_error(), other)) {
    fprintf(stderr, "plan.c:%d: expected an error with '%s' and '%s', got '%s'\n", line, word, other, gmm_last_error());
    exit(1);
  }
  CHECK(gmm_workspace_size(&call->args, &bytes) == GMM_ERROR_INVALID_ARGUMENT);
  CHECK(bytes == 7 || bytes == 0);
  CHECK(gmm_multi_tensor_gemm(&call->args, NULL, 0, NULL) == GMM_ERROR_INVALID_ARGUMENT);
}
#define INVALID(call, word, other) invalid(call, word, other, __LINE__)

static void test_facts(void) {
  CHECK(strcmp(gmm_version(), GMM_VERSION) == 0);
  CHECK(strstr(gmm_build_info(), "version=" GMM_VERSION));
  CHECK(strstr(gmm_build_info(), "cuda="));
  CHECK(strstr(gmm_build_info(), "compiler="));
  CHECK(strcmp(gmm_last_error(), "") == 0);
  CHECK(strcmp(gmm_last_backend(), "") == 0);
  gmm_set_last_backend("reference: loop of mm");
  CHECK(strcmp(gmm_last_backend(), "reference: loop of mm") == 0);
}

static void test_choice(void) {
  Call call;
  char kernel[sizeof((gmm_plan_result *)0)->kernel];
  gmm_plan_result result;

  forward(&call);
  CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS);
  CHECK(result.backend == GMM_BACKEND_CUTLASS);
  CHECK(strlen(result.kernel) > 0 && result.tile_m > 0 && result.tile_n > 0 && result.tile_k > 0);
  CHECK(result.launches >= 1 && result.streams == 1);
  CHECK(strlen(result.reason[GMM_BACKEND_CUTLASS]) > 0 && strlen(result.reason[GMM_BACKEND_CUBLAS]) > 0);

  CHECK(plan(&call, &kA100, &result) == GMM_SUCCESS);
  CHECK(result.backend == GMM_BACKEND_CUBLAS);
  CHECK(strstr(result.reason[GMM_BACKEND_CUTLASS], "sm80"));

  CHECK(plan(&call, &kV100, &result) == GMM_ERROR_UNSUPPORTED); /* no bf16 before sm80 */
  CHECK(strstr(gmm_last_error(), "bf16") && strstr(result.reason[GMM_BACKEND_CUBLAS], "bf16"));

  call.d[1].data = address(2);
  CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS);
  CHECK(result.backend == GMM_BACKEND_CUBLAS);
  CHECK(strstr(result.reason[GMM_BACKEND_CUTLASS], "d[1]") && strstr(result.reason[GMM_BACKEND_CUTLASS], "16"));

  call.args.backend = GMM_BACKEND_CUTLASS;
  CHECK(plan(&call, &kH200, &result) == GMM_ERROR_UNSUPPORTED);
  CHECK(strstr(gmm_last_error(), "cutlass") && strstr(gmm_last_error(), "d[1]"));

  forward(&call);
  call.args.backend = GMM_BACKEND_CUBLAS;
  CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS);
  CHECK(result.backend == GMM_BACKEND_CUBLAS && result.streams >= 1 && result.launches >= kGroups);

  forward(&call);
  call.args.backend = GMM_BACKEND_CUTLASS;
  call.args.kernel = "sm90_none_such";
  CHECK(plan(&call, &kH200, &result) == GMM_ERROR_UNSUPPORTED);
  CHECK(strstr(gmm_last_error(), "sm90_none_such"));
  call.args.kernel = NULL;
  CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS);
  memcpy(kernel, result.kernel, sizeof kernel);
  call.args.kernel = kernel; /* any kernel that a plan names may be asked for */
  CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS && strcmp(result.kernel, kernel) == 0);

  /* The kernel asked for is a must, also where the backend is left open; no other may take its place. */
  call.args.backend = GMM_BACKEND_AUTO;
  CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS && strcmp(result.kernel, kernel) == 0);
  CHECK(plan(&call, &kA100, &result) == GMM_ERROR_UNSUPPORTED);
  call.args.kernel = "sm90_none_such";
  CHECK(plan(&call, &kH200, &result) == GMM_ERROR_UNSUPPORTED && strstr(gmm_last_error(), "sm90_none_such"));
  call.args.backend = GMM_BACKEND_CUBLAS;
  CHECK(plan(&call, &kH200, &result) == GMM_ERROR_INVALID_ARGUMENT && strstr(gmm_last_error(), "kernel"));

  forward(&call);
  call.args.num_groups = 0;
  call.args.a = call.args.b = call.args.d = NULL;
  CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS);
  CHECK(result.launches == 0);

  forward(&call); /* sizes that lead beyond the end of memory */
  call.a[0].data = call.d[0].data = (void *)(UINTPTR_MAX - 15);
  CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS);

  forward(&call); /* an empty group needs no memory */
  call.a[2] = matrix(0, 2048, 0);
  call.d[2] = matrix(0, 768, 0);
  call.a[2].data = call.d[2].data = NULL;
  CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS);
}

/* Forward of 4096 tokens, or the weight gradient, with the ends in device memory. */
static void ragged(Call *call, gmm_form form) {
  forward(call);
  if (form == GMM_RAGGED_K) {
    call->a[0] = matrix(768, 4096, 1);
    call->b[0] = matrix(4096, 2048, 0);
    call->d[0] = matrix(768, 2048, 0);
    call->args.stride_d = 768 * 2048;
  } else {
    call->args.stride_b = 2048 * 768;
  }
  call->args.form = form;
  call->args.offs = address(4);
}

static void test_ragged(void) {
  static const gmm_form kForms[] = {GMM_RAGGED_M, GMM_RAGGED_K};
  Call call;
  gmm_plan_result result;

  for (int i = 0; i < 2; ++i) {
    const gmm_form form = kForms[i];
    ragged(&call, form);
    CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS);
    CHECK(result.backend == GMM_BACKEND_CUTLASS && result.launches == 1);
    CHECK(strncmp(result.kernel, "sm90_", 5) == 0 && result.tile_m > 0);
    CHECK(strstr(result.reason[GMM_BACKEND_CUBLAS], "on the host"));

    CHECK(plan(&call, &kA100, &result) == GMM_ERROR_UNSUPPORTED);
    CHECK(strstr(gmm_last_error(), "sm80") && strstr(gmm_last_error(), "on the host"));
    CHECK(strstr(result.reason[GMM_BACKEND_CUTLASS], "sm80"));

    call.args.d_dtype = GMM_FP32;
    call.args.accumulate = 1;
    CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS && result.backend == GMM_BACKEND_CUTLASS);

    ragged(&call, form);
    call.args.offs = NULL;
    INVALID(&call, "offs", "NULL");
    call.args.offs = address(2);
    INVALID(&call, "offs", "4-byte");
    call.args.offs = address(4);
    call.args.offs_int64 = 1;
    INVALID(&call, "offs", "8-byte");
    ragged(&call, form);
    call.args.stride_b = call.args.stride_d = -1;
    INVALID(&call, form == GMM_RAGGED_M ? "stride_b" : "stride_d", "-1");
    ragged(&call, form); /* in bytes it would overflow */
    call.args.stride_b = call.args.stride_d = INT64_MAX - 7;
    CHECK(plan(&call, &kH200, &result) == GMM_ERROR_UNSUPPORTED && strstr(gmm_last_error(), "2^39"));
    ragged(&call, form);
    call.b[0] = matrix(call.b[0].rows + 8, call.b[0].cols, call.b[0].column_major);
    INVALID(&call, "b[0]", "rows");
  }

  ragged(&call, GMM_RAGGED_M);
  call.args.bias = call.bias;
  call.args.stride_bias = 768;
  CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS && result.backend == GMM_BACKEND_CUTLASS);
  ragged(&call, GMM_RAGGED_K);
  call.args.bias = call.bias;
  INVALID(&call, "bias", "GMM_RAGGED_K");
  ragged(&call, (gmm_form)3);
  INVALID(&call, "form", "3");
}

/* h of as many columns as `columns`; d is what the epilogue makes of the product's 768. */
static void with_epilogue(Call *call, gmm_epilogue epilogue, int64_t columns, int64_t columns_d) {
  ragged(call, GMM_RAGGED_M);
  call->args.epilogue = epilogue;
  call->args.h = matrix(call->a[0].rows, columns, 0);
  call->d[0] = matrix(call->a[0].rows, columns_d, 0);
}

static void test_epilogues(void) {
  Call call;
  gmm_plan_result result;

  with_epilogue(&call, GMM_EPILOGUE_SWIGLU, 768, 384);
  CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS && strstr(result.kernel, "1x2_swiglu"));
  call.args.h.data = NULL; /* not kept */
  CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS && strstr(result.kernel, "1x2_swiglu"));
  with_epilogue(&call, GMM_EPILOGUE_SWIGLU_BACKWARD, 2 * 768, 2 * 768);
  CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS && strstr(result.kernel, "_swiglu_backward"));
  CHECK(plan(&call, &kA100, &result) == GMM_ERROR_UNSUPPORTED);

  call.a[0].rows = call.d[0].rows = call.args.h.rows = 80 * call.args.num_groups; /* the weights' traffic counts */
  CHECK(plan(&call, &kH200, &result) == GMM_ERROR_UNSUPPORTED && strstr(gmm_last_error(), "rows in"));
  call.args.kernel = "sm90_descriptor_array_192x128x64_pingpong_1x2_swiglu_backward";
  CHECK(plan(&call, &kH200, &result) == GMM_SUCCESS);
  call.args.kernel = "sm90_descriptor_array_192x128x64_pingpong_1x2_swiglu";
  CHECK(plan(&call, &kH200, &result) == GMM_ERROR_UNSUPPORTED && strstr(gmm_last_error(), "no kernel named"));

  with_epilogue(&call, GMM_EPILOGUE_SWIGLU, 768, 768);
  INVALID(&call, "d[0]", "384");
  with_epilogue(&call, GMM_EPILOGUE_SWIGLU, 384, 384);
  INVALID(&call, "h", "768");
  with_epilogue(&call, GMM_EPILOGUE_SWIGLU, 768, 384);
  call.args.accumulate = 1;
  INVALID(&call, "epilogue", "accumulate");
  call.args.accumulate = 0;
  call.args.d_dtype = GMM_FP32;
  INVALID(&call, "epilogue", "fp32");
  with_epilogue(&call, GMM_EPILOGUE_SWIGLU, 768, 384);
  call.args.h.data = address(2);
  CHECK(plan(&call, &kH200, &result) == GMM_ERROR_UNSUPPORTED && strstr(gmm_last_error(), "h: "));
  with_epilogue(&call, GMM_EPILOGUE_SWIGLU, 768, 384);
  call.args.row_weights = address(2);
  INVALID(&call, "row_weights", "4-byte");
  with_epilogue(&call, (gmm_epilogue)3, 768, 384);
  INVALID(&call, "epilogue", "3");
  forward(&call);
  call.args.epilogue = GMM_EPILOGUE_SWIGLU;
  INVALID(&call, "epilogue", "GMM_RAGGED_M");
}

static void test_invalid_calls(void) {
  Call call;
  gmm_plan_result result;
  gmm_device device = kH200;
  size_t bytes;

  forward(&call);
  CHECK(gmm_plan(NULL, &kH200, &result) == GMM_ERROR_INVALID_ARGUMENT);
  CHECK(gmm_plan(&call.args, &kH200, NULL) == GMM_ERROR_INVALID_ARGUMENT);
  CHECK(gmm_workspace_size(NULL, &bytes) == GMM_ERROR_INVALID_ARGUMENT);
  CHECK(gmm_workspace_size(&call.args, NULL) == GMM_ERROR_INVALID_ARGUMENT);
  CHECK(gmm_multi_tensor_gemm(NULL, NULL, 0, NULL) == GMM_ERROR_INVALID_ARGUMENT);

  call.args.struct_size = 0;
  INVALID(&call, "struct_size", "0");
  forward(&call);
  result.struct_size = 0;
  CHECK(gmm_plan(&call.args, &kH200, &result) == GMM_ERROR_INVALID_ARGUMENT);
  CHECK(strstr(gmm_last_error(), "struct_size"));
  device.struct_size = 3;
  CHECK(plan(&call, &device, &result) == GMM_ERROR_INVALID_ARGUMENT);
  device = kH200;
  device.sm = 0;
  CHECK(plan(&call, &device, &result) == GMM_ERROR_INVALID_ARGUMENT);

  call.args.num_groups = -1;
  INVALID(&call, "num_groups", "-1");
  forward(&call);
  call.args.a = NULL;
  INVALID(&call, "a", "NULL");
  forward(&call);
  call.a[1].rows = -5;
  INVALID(&call, "a[1]", "-5");
  forward(&call);
  call.b[2].ld = 2047;
  INVALID(&call, "b[2]", "2047");
  forward(&call);
  call.b[2].ld = INT64_MAX;
  INVALID(&call, "b[2]", "9223372036854775807");
  forward(&call);
  call.b[1].rows = 1024;
  INVALID(&call, "b[1]", "1024");
  forward(&call);
  call.d[2].cols = 767;
  INVALID(&call, "d[2]", "767");
  forward(&call);
  call.d[1].column_major = 1;
  call.d[1].ld = 4096;
  INVALID(&call, "d[1]", "row-major");
  forward(&call);
  call.a[2].data = NULL;
  INVALID(&call, "a[2]", "NULL");
  forward(&call);
  call.args.bias = call.bias;
  call.bias[1] = NULL;
  INVALID(&call, "bias[1]", "NULL");
  forward(&call);
  call.args.ab_dtype = (gmm_dtype)9;
  INVALID(&call, "ab_dtype", "9");
  forward(&call);
  call.args.d_dtype = GMM_FP16;
  INVALID(&call, "d_dtype", "fp16");
  forward(&call);
  call.args.sm_margin = -2;
  INVALID(&call, "sm_margin", "-2");
  forward(&call);
  call.args.backend = (gmm_backend)17;
  INVALID(&call, "backend", "17");
}

int main(void) {
  test_facts();
  test_choice();
  test_ragged();
  test_epilogues();
  test_invalid_calls();
  printf("plan.c: all as expected, gmm %s\n", gmm_version());
  return 0;
}
