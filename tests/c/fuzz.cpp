// Fuzzes the argument checks and the plan: gmm_plan(), gmm_workspace_size() and gmm_multi_tensor_gemm() must answer any
// arguments with a status, and read nothing but what their size fields and num_groups say is there. No GPU is needed.
//
//   fuzz [SECONDS] [SEED]    prints the seed; an input that fails is written to fuzz-crash.bin
//   fuzz FILE                runs that input again
//
// An input is a string of bytes that make_call() turns into choices. Inputs that reach code that no input before them
// reached are kept and mutated: the library is compiled with -fsanitize-coverage=trace-pc, this file is not. Any
// compiler with the sanitizers will do; with clang's libFuzzer, link everything but main().
#include <algorithm>
#include <array>
#include <chrono>
#include <cinttypes>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gmm/gmm.h"

namespace {

// Whatever the choices need beyond the end of an input is zero.
class Bytes {
 public:
  Bytes(const uint8_t *data, size_t size) : data_(data), left_(size) {}

  uint64_t take(int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; ++i, left_ -= left_ > 0) value = value << 8 | (left_ > 0 ? *data_++ : 0);
    return value;
  }

  bool one_in(int n) { return take(1) % n == n - 1u; }  // false once the input is used up

 private:
  const uint8_t *data_;
  size_t left_;
};

constexpr int64_t kSizes[] = {0,          1,          2,         7,         8,         16,        24,
                              64,         128,        1408,      2048,      16384,     1 << 20,   1 << 26,
                              0x7fff0000, 0x7fff0001, INT32_MAX, 1LL << 31, 1LL << 32, 1LL << 33, 1LL << 38,
                              1LL << 39,  1LL << 61,  1LL << 62, INT64_MAX, INT64_MIN, -1,        -8};

int64_t any_size(Bytes &bytes) {
  const uint64_t choice = bytes.take(1);
  if (choice < 128) return int64_t(choice) * 8;
  if (choice == 255) return int64_t(bytes.take(8));
  return kSizes[choice % std::size(kSizes)];
}

void *any_pointer(Bytes &bytes) {
  constexpr uintptr_t kAddresses[] = {0x7f0000000000u, 0, 0x7f0000000002u, 0x7f0000000008u, 0x7f0000000004u,
                                      UINTPTR_MAX,     1, UINTPTR_MAX - 15};
  return reinterpret_cast<void *>(kAddresses[bytes.take(1) % std::size(kAddresses)]);
}

int32_t any_int(Bytes &bytes, int usual) {
  const uint64_t choice = bytes.take(1);
  if (choice < 240) return int(choice % usual);
  constexpr int32_t kOthers[] = {-1, INT32_MAX, INT32_MIN, 131, 17};
  return choice == 255 ? int32_t(bytes.take(4)) : kOthers[choice % std::size(kOthers)];
}

void *usual_pointer(Bytes &bytes) {
  return bytes.one_in(16) ? any_pointer(bytes) : reinterpret_cast<void *>(0x7f0000000000u);
}

gmm_matrix make_matrix(Bytes &bytes, int64_t rows, int64_t cols, bool column_major) {
  gmm_matrix m = {usual_pointer(bytes), rows, cols, 0, column_major};
  const int64_t extent = column_major ? rows : cols;
  m.ld = extent > 1 ? extent : 1;
  if (bytes.one_in(8)) m.ld = any_size(bytes);
  if (bytes.one_in(32)) m.rows = any_size(bytes);
  if (bytes.one_in(32)) m.cols = any_size(bytes);
  return m;
}

// Arrays of exactly num_groups matrices on the heap, so that AddressSanitizer sees one read too many.
struct Call {
  gmm_args args{};
  std::vector<gmm_matrix> a, b, d;
  std::vector<const void *> bias;
  std::string kernel;
};

void add_groups(Bytes &bytes, Call &call, int count) {
  const bool a_column_major = bytes.take(1) % 2, b_column_major = bytes.take(1) % 2;
  const bool vary = bytes.take(1) % 2;
  int64_t m = any_size(bytes), n = any_size(bytes), k = any_size(bytes);
  char *slice = reinterpret_cast<char *>(0x7f0000000000u);
  const bool slices = bytes.take(1) % 2;  // of one buffer, as tokens are: one map serves several groups
  for (int i = 0; i < count; ++i) {
    if (vary || bytes.one_in(16)) m = any_size(bytes);
    if (bytes.one_in(16)) n = any_size(bytes);
    if (bytes.one_in(16)) k = any_size(bytes);
    call.a.push_back(make_matrix(bytes, m, k, a_column_major != bytes.one_in(64)));
    call.b.push_back(make_matrix(bytes, k, n, b_column_major != bytes.one_in(64)));
    call.d.push_back(make_matrix(bytes, m, n, bytes.one_in(64)));
    call.bias.push_back(usual_pointer(bytes));
    if (!slices) continue;
    call.a.back().data = call.d.back().data = slice;
    slice = reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(slice) + uint64_t(m) * uint64_t(k) * 2);
  }
}

// Mostly one that fits the first group.
void add_epilogue(Bytes &bytes, Call &call) {
  gmm_args &args = call.args;
  args.epilogue = gmm_epilogue(any_int(bytes, 3));
  args.row_weights = static_cast<const float *>(usual_pointer(bytes));
  args.row_sums = static_cast<float *>(usual_pointer(bytes));
  args.h = make_matrix(bytes, any_size(bytes), any_size(bytes), bytes.one_in(4));
  if (call.d.empty() || bytes.one_in(4)) return;
  const auto twice = [](int64_t columns) { return int64_t(uint64_t(columns) * 2); };
  const int64_t rows = call.d[0].rows, columns = call.b[0].cols;
  const bool forward = args.epilogue == GMM_EPILOGUE_SWIGLU;
  if (args.epilogue) call.d[0] = make_matrix(bytes, rows, forward ? columns / 2 : twice(columns), false);
  args.h = make_matrix(bytes, rows, forward ? columns : twice(columns), false);
}

void make_call(Bytes &bytes, Call &call) {
  constexpr const char *kKernels[] = {"sm90_descriptor_array_192x128x64_pingpong_1x2",
                                      "sm90_descriptor_array_128x64x64_pingpong_1x1",
                                      "sm90_descriptor_array_128x128x64_pingpong_1x1",
                                      "sm90_descriptor_array_128x192x64_pingpong_2x1",
                                      "sm90_descriptor_array_192x128x64_pingpong_1x2_swiglu",
                                      "sm90_descriptor_array_192x128x64_pingpong_1x2_swiglu_backward",
                                      "sm90_pointer_array_128x192x64_pingpong_2x1",
                                      "sm90_pointer_array_64x128x128_pingpong_1x1",
                                      "sm90_none_such",
                                      ""};
  gmm_args &args = call.args;
  args.form = gmm_form(any_int(bytes, 3));
  args.num_groups = bytes.one_in(16) ? int(bytes.take(2)) % 4096 : any_int(bytes, 40);
  const int matrices = args.form == GMM_LIST ? args.num_groups : 1;
  if (args.form == GMM_LIST && args.num_groups > 4096) args.num_groups %= 4096;  // as many as the arrays have
  add_groups(bytes, call, std::max(0, std::min(matrices, 4096)));
  args.ab_dtype = gmm_dtype(any_int(bytes, 3));
  args.d_dtype = bytes.take(1) % 2 ? args.ab_dtype : gmm_dtype(any_int(bytes, 3));
  args.accumulate = any_int(bytes, 2);
  args.allow_tf32 = any_int(bytes, 2);
  args.sm_margin = bytes.one_in(8) ? any_int(bytes, 140) : 0;
  args.device = bytes.one_in(8) ? any_int(bytes, 2) : 0;
  args.backend = bytes.one_in(4) ? gmm_backend(any_int(bytes, 3)) : GMM_BACKEND_AUTO;
  if (bytes.one_in(8)) {
    call.kernel = kKernels[bytes.take(1) % std::size(kKernels)];
    if (bytes.one_in(16)) call.kernel.assign(bytes.take(2), 'k');
    args.kernel = call.kernel.c_str();
  }
  args.offs = usual_pointer(bytes);
  args.offs_int64 = any_int(bytes, 2);
  args.stride_b = any_size(bytes);
  args.stride_d = any_size(bytes);
  args.stride_bias = any_size(bytes);
  if (bytes.one_in(4)) add_epilogue(bytes, call);
  call.a.shrink_to_fit(), call.b.shrink_to_fit(), call.d.shrink_to_fit(), call.bias.shrink_to_fit();
  args.a = bytes.one_in(64) ? nullptr : call.a.data();
  args.b = bytes.one_in(64) ? nullptr : call.b.data();
  args.d = bytes.one_in(64) ? nullptr : call.d.data();
  args.bias = bytes.take(1) % 2 ? call.bias.data() : nullptr;
}

void must(bool condition, const char *what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz: not so: %s; gmm_last_error(): %s\n", what, gmm_last_error());
  std::abort();
}
#define MUST(condition) must(condition, #condition)

void check_status(gmm_status status) {
  MUST(status >= GMM_SUCCESS && status < GMM_ERROR_INTERNAL);  // an internal error is a defect
  MUST(status == GMM_SUCCESS || gmm_last_error()[0] != '\0');
}

// As many bytes as struct_size says, and at least the field itself: what lies behind belongs to someone else.
template <typename Struct>
std::unique_ptr<char[]> sized(const Struct &value, size_t struct_size) {
  const size_t bytes = std::max(sizeof(size_t), std::min(struct_size, 2 * sizeof value));
  std::unique_ptr<char[]> copy(new char[bytes]());
  std::memcpy(copy.get(), &value, std::min(bytes, sizeof value));
  std::memcpy(copy.get(), &struct_size, sizeof struct_size);
  return copy;
}

size_t any_struct_size(Bytes &bytes, size_t right) {
  if (!bytes.one_in(32)) return right;
  const size_t kOthers[] = {0, 1, right - 1, right + 1, right - 8, right + 64, 2 * right, SIZE_MAX, SIZE_MAX / 2};
  return kOthers[bytes.take(1) % std::size(kOthers)];
}

void check_plan(const gmm_plan_result &plan) {
  MUST(plan.backend == GMM_BACKEND_CUTLASS || plan.backend == GMM_BACKEND_CUBLAS);
  MUST(plan.kernel[0] && std::memchr(plan.kernel, 0, sizeof plan.kernel));
  MUST(plan.launches >= 0 && plan.streams >= 1 && plan.streams <= 16);
  MUST((plan.backend == GMM_BACKEND_CUTLASS) == (plan.tile_m > 0));
  MUST(plan.workspace_bytes < size_t(1) << 42);  // sm_count may be anything
  for (int i = GMM_BACKEND_CUTLASS; i < GMM_NUM_BACKENDS; ++i)
    MUST(plan.reason[i][0] && std::memchr(plan.reason[i], 0, sizeof plan.reason[i]));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  Bytes bytes(data, size);
  Call call;
  make_call(bytes, call);
  gmm_device device{0, bytes.one_in(4) ? any_int(bytes, 130) : 90, bytes.one_in(8) ? any_int(bytes, 140) : 0};
  const auto args = sized(call.args, any_struct_size(bytes, sizeof(gmm_args)));
  const auto what_if = sized(device, any_struct_size(bytes, sizeof(gmm_device)));
  const auto result = sized(gmm_plan_result{}, any_struct_size(bytes, sizeof(gmm_plan_result)));
  auto *args_pointer = bytes.one_in(64) ? nullptr : reinterpret_cast<const gmm_args *>(args.get());
  auto *device_pointer = bytes.one_in(32) ? nullptr : reinterpret_cast<const gmm_device *>(what_if.get());
  auto *plan = bytes.one_in(64) ? nullptr : reinterpret_cast<gmm_plan_result *>(result.get());

  const gmm_status status = gmm_plan(args_pointer, device_pointer, plan);
  check_status(status);
  if (status == GMM_SUCCESS) check_plan(*plan);
  size_t workspace = 0;
  check_status(gmm_workspace_size(args_pointer, bytes.one_in(64) ? nullptr : &workspace));
  check_status(gmm_multi_tensor_gemm(args_pointer, any_pointer(bytes), size_t(any_size(bytes)), nullptr));
  return 0;
}

// ---- what libFuzzer would do

#ifndef GMM_LIBFUZZER

namespace {

std::array<bool, 1 << 16> reached;  // by the hash of an address in the library
size_t new_code = 0;
std::vector<uint8_t> current;

void save_input(int) {
  if (FILE *file = std::fopen("fuzz-crash.bin", "wb")) {
    std::fwrite(current.data(), 1, current.size(), file);
    std::fclose(file);
    std::fprintf(stderr, "fuzz: the input is in fuzz-crash.bin\n");
  }
  std::signal(SIGABRT, SIG_DFL);
  std::abort();
}

std::vector<uint8_t> mutated(std::vector<uint8_t> input, std::mt19937_64 &random) {
  for (int i = int(random() % 8); i >= 0; --i) {
    const size_t at = input.empty() ? 0 : random() % input.size();
    switch (random() % 4) {
      case 0:
        if (!input.empty()) input[at] = uint8_t(random());
        break;
      case 1:
        if (!input.empty()) input[at] ^= uint8_t(1u << random() % 8);
        break;
      case 2:
        if (input.size() < 8192) input.insert(input.begin() + at, random() % 16, uint8_t(random()));
        break;
      default:
        if (!input.empty()) input.erase(input.begin() + at);
    }
  }
  return input;
}

std::vector<uint8_t> random_input(std::mt19937_64 &random) {
  std::vector<uint8_t> input(random() % (random() % 16 ? 512 : 8192));
  for (uint8_t &byte : input) byte = uint8_t(random());
  return input;
}

int replay(const char *path) {
  FILE *file = std::fopen(path, "rb");
  if (!file) return std::perror(path), 1;
  for (int byte; (byte = std::fgetc(file)) != EOF;) current.push_back(uint8_t(byte));
  std::fclose(file);
  return LLVMFuzzerTestOneInput(current.data(), current.size());
}

}  // namespace

// By SIGABRT, so that the input is saved.
extern "C" const char *__asan_default_options() { return "abort_on_error=1"; }
extern "C" const char *__ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }

extern "C" void __sanitizer_cov_trace_pc() {
  const auto address = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  bool &seen = reached[(address ^ address >> 16) % reached.size()];
  new_code += !seen;
  seen = true;
}

int main(int argc, char **argv) {
  if (argc > 1 && !std::strtod(argv[1], nullptr)) return replay(argv[1]);
  const double seconds = argc > 1 ? std::strtod(argv[1], nullptr) : 300;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
  std::printf("fuzz: seed %" PRIu64 ", %.0f s\n", seed, seconds);
  std::fflush(stdout);
  std::signal(SIGABRT, save_input);
  std::mt19937_64 random(seed);
  std::vector<std::vector<uint8_t>> corpus;
  uint64_t inputs = 0, code = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (; inputs % 256 || std::chrono::steady_clock::now() < end; ++inputs) {
    const bool fresh = corpus.empty() || random() % 4 == 0;
    current = fresh ? random_input(random) : mutated(corpus[random() % corpus.size()], random);
    new_code = 0;
    LLVMFuzzerTestOneInput(current.data(), current.size());
    if (new_code) corpus.push_back(current);
    code += new_code;
  }
  std::printf("fuzz: clean, %" PRIu64 " inputs, %zu kept for the %" PRIu64 " pieces of code that they reached\n",
              inputs, corpus.size(), code);
}

#endif
