// gmm._core: plans and facts of the build for Python, through gmm.h alone. Knows no torch: tensors come as numbers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "gmm/gmm.h"
#include "torch/grouped.h"
#include "torch/strides.h"

namespace py = pybind11;

namespace {

using Stored = std::array<int64_t, 5>;   // address, rows, cols, row stride, column stride
using Batched = std::array<int64_t, 6>;  // address, group stride, rows, cols, row stride, column stride

constexpr std::array<const char *, GMM_NUM_BACKENDS> kBackends = {"auto", "cutlass", "cublas"};

void check(gmm_status status) {
  if (status == GMM_SUCCESS) return;
  if (status == GMM_ERROR_INVALID_ARGUMENT) throw py::value_error(gmm_last_error());
  throw std::runtime_error(gmm_last_error());
}

gmm_dtype to_dtype(const std::string &name) {
  if (name == "bfloat16") return GMM_BF16;
  if (name == "float16") return GMM_FP16;
  if (name == "float32") return GMM_FP32;
  throw py::value_error("dtype: expected bfloat16, float16 or float32, got " + name);
}

gmm_backend to_backend(const std::string &name) {
  for (size_t i = 0; i < kBackends.size(); ++i)
    if (name == kBackends[i]) return static_cast<gmm_backend>(i);
  throw py::value_error("backend: expected auto, cutlass or cublas, got '" + name + "'");
}

// The matrices of one operand. What the torch ops would copy first is planned as its contiguous copy, and counted.
std::vector<gmm_matrix> describe_all(const std::vector<Stored> &tensors, bool transpose, bool row_major, int &copies) {
  std::vector<gmm_matrix> matrices;
  for (const auto &[address, rows, cols, row_stride, col_stride] : tensors) {
    gmm::Strided t{reinterpret_cast<void *>(address), rows, cols, row_stride, col_stride};
    gmm_matrix &m = matrices.emplace_back();
    if (row_major ? gmm::describe_row_major(t, m) : gmm::describe(t, transpose, m)) continue;
    ++copies;
    t = {reinterpret_cast<void *>(1 << 20), rows, cols, cols, 1};  // a fresh allocation is aligned
    gmm::describe(t, transpose, m);
  }
  return matrices;
}

py::dict to_dict(const gmm_plan_result &result, int copies) {
  py::dict reasons;
  for (int i = GMM_BACKEND_AUTO + 1; i < GMM_NUM_BACKENDS; ++i) reasons[kBackends[i]] = result.reason[i];
  py::dict dict;
  dict["backend"] = kBackends[result.backend];
  dict["kernel"] = result.kernel;
  dict["tile"] = result.tile_m ? py::object(py::make_tuple(result.tile_m, result.tile_n, result.tile_k)) : py::none();
  dict["launches"] = result.launches;
  dict["streams"] = result.streams;
  dict["workspace_bytes"] = result.workspace_bytes;
  dict["copies"] = copies;
  dict["reasons"] = reasons;
  return dict;
}

py::dict plan(const std::vector<Stored> &a, const std::vector<Stored> &b, const std::vector<Stored> &d,
              const std::optional<std::vector<int64_t>> &bias, const std::string &ab_dtype, const std::string &d_dtype,
              bool trans_a, bool trans_b, bool accumulate, bool allow_tf32, int sm_margin, int device,
              const std::string &backend, const std::string &kernel, std::optional<int> sm, int sm_count) {
  if (a.size() != b.size() || a.size() != d.size() || (bias && a.size() != bias->size()))
    throw py::value_error("a, b, d, bias: expected lists of one length");
  int copies = 0;
  const auto a_matrices = describe_all(a, trans_a, false, copies);
  const auto b_matrices = describe_all(b, trans_b, false, copies);
  const auto d_matrices = describe_all(d, false, true, copies);
  std::vector<const void *> bias_addresses;
  for (int64_t address : bias.value_or(std::vector<int64_t>()))
    bias_addresses.push_back(reinterpret_cast<const void *>(address));

  gmm_args args{};
  args.struct_size = sizeof args;
  args.num_groups = static_cast<int32_t>(a.size());
  args.a = a_matrices.data();
  args.b = b_matrices.data();
  args.d = d_matrices.data();
  args.bias = bias ? bias_addresses.data() : nullptr;
  args.ab_dtype = to_dtype(ab_dtype);
  args.d_dtype = to_dtype(d_dtype);
  args.accumulate = accumulate;
  args.allow_tf32 = allow_tf32;
  args.sm_margin = sm_margin;
  args.device = device;
  args.backend = to_backend(backend);
  args.kernel = kernel.empty() ? nullptr : kernel.c_str();
  const gmm_device what_if{sizeof(gmm_device), sm.value_or(0), sm_count};
  gmm_plan_result result{};
  result.struct_size = sizeof result;
  check(gmm_plan(&args, sm ? &what_if : nullptr, &result));

  return to_dict(result, copies);
}

// An operand of grouped_mm, whose strides may be any.
gmm::Operand operand(const Batched &x) {
  const auto &[address, group_stride, rows, cols, row_stride, col_stride] = x;
  return {{reinterpret_cast<void *>(address), rows, cols, row_stride, col_stride}, group_stride};
}

gmm::Mode to_mode(const std::string &name) {
  if (name == "ragged_m") return gmm::Mode::kRaggedM;
  if (name == "ragged_n") return gmm::Mode::kRaggedN;
  if (name == "ragged_k") return gmm::Mode::kRaggedK;
  if (name == "batched") return gmm::Mode::kBatched;
  throw py::value_error("mode: expected ragged_m, ragged_n, ragged_k or batched, got '" + name + "'");
}

gmm_epilogue to_epilogue(const std::string &name) {
  if (name.empty()) return GMM_EPILOGUE_NONE;
  if (name == "swiglu") return GMM_EPILOGUE_SWIGLU;
  if (name == "swiglu_backward") return GMM_EPILOGUE_SWIGLU_BACKWARD;
  throw py::value_error("epilogue: expected swiglu or swiglu_backward, got '" + name + "'");
}

// The plan of CUTLASS for grouped_mm, in which b is not transposed; or the reason why it refuses. With an epilogue d is
// what that makes of the product.
std::variant<py::dict, std::string> plan_grouped(const std::string &mode, int groups, const Batched &a,
                                                 const Batched &b, const Batched &d,
                                                 const std::optional<std::array<int64_t, 3>> &bias,
                                                 const std::string &ab_dtype, const std::string &d_dtype,
                                                 bool offs_int64, bool accumulate, int sm_margin, int device,
                                                 const std::string &kernel, const std::string &epilogue,
                                                 std::optional<int> sm, int sm_count) {
  gmm_args args{};
  args.struct_size = sizeof args;
  args.ab_dtype = to_dtype(ab_dtype);
  args.d_dtype = to_dtype(d_dtype);
  gmm::GroupedCall call{to_mode(mode), groups, operand(a), operand(b), operand(d)};
  call.ab_itemsize = args.ab_dtype == GMM_FP32 ? 4 : 2;
  call.d_itemsize = args.d_dtype == GMM_FP32 ? 4 : 2;
  if (bias) {
    call.bias = reinterpret_cast<const void *>((*bias)[0]);
    call.bias_group_stride = (*bias)[1];
    call.bias_stride = (*bias)[2];
  }
  gmm::GroupedMatrices matrices;
  if (const char *refusal = gmm::describe_grouped(call, args, matrices)) return refusal;
  args.accumulate = accumulate;
  args.sm_margin = sm_margin;
  args.device = device;
  args.backend = GMM_BACKEND_CUTLASS;
  args.kernel = kernel.empty() ? nullptr : kernel.c_str();
  args.offs = args.form == GMM_LIST ? nullptr : reinterpret_cast<const void *>(1 << 20);  // checked, never followed
  args.offs_int64 = offs_int64;
  args.epilogue = to_epilogue(epilogue);
  if (args.epilogue) {  // a contiguous h, as gmm.moe.feed_forward has it
    const int64_t rows = args.d[0].rows, columns = args.b[0].cols * (args.epilogue == GMM_EPILOGUE_SWIGLU ? 1 : 2);
    args.h = {reinterpret_cast<void *>(1 << 20), rows, columns, std::max<int64_t>(columns, 1), 0};
  }
  gmm_plan_result result{};
  result.struct_size = sizeof result;
  const gmm_device what_if{sizeof(gmm_device), sm.value_or(0), sm_count};
  const gmm_status status = gmm_plan(&args, sm ? &what_if : nullptr, &result);
  if (status == GMM_ERROR_UNSUPPORTED && result.reason[GMM_BACKEND_CUTLASS][0]) {
    return result.reason[GMM_BACKEND_CUTLASS];
  }
  if (status == GMM_ERROR_UNSUPPORTED) return gmm_last_error();
  check(status);
  return to_dict(result, 0);
}

py::dict build_info() {
  py::dict facts;
  std::istringstream lines(gmm_build_info());
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = line.find('=');
    facts[py::str(line.substr(0, equals))] = line.substr(equals + 1);
  }
  return facts;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  using namespace py::literals;
  m.def("plan", &plan, "a"_a, "b"_a, "d"_a, "bias"_a, py::kw_only(), "ab_dtype"_a, "d_dtype"_a, "trans_a"_a,
        "trans_b"_a, "accumulate"_a, "allow_tf32"_a, "sm_margin"_a, "device"_a, "backend"_a, "kernel"_a, "sm"_a,
        "sm_count"_a);
  m.def("plan_grouped", &plan_grouped, py::kw_only(), "mode"_a, "groups"_a, "a"_a, "b"_a, "d"_a, "bias"_a, "ab_dtype"_a,
        "d_dtype"_a, "offs_int64"_a, "accumulate"_a, "sm_margin"_a, "device"_a, "kernel"_a, "epilogue"_a, "sm"_a,
        "sm_count"_a);
  m.def("build_info", &build_info);
  m.def("version", &gmm_version);
  m.def("last_backend", &gmm_last_backend);
  m.def("set_last_backend", &gmm_set_last_backend, "text"_a);
}
