// From the operands of grouped_mm to gmm.h's forms. Free of torch, so that gmm._core plans calls for explain() exactly
// as the ops make them.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "gmm/gmm.h"
#include "torch/strides.h"

namespace gmm {

// A stored matrix, or a batch of them `group_stride` elements apart.
struct Operand {
  Strided matrix;
  int64_t group_stride;  // 0 without a batch

  Operand transposed() const {
    const Strided &m = matrix;
    return {{m.data, m.cols, m.rows, m.col_stride, m.row_stride}, group_stride};
  }

  Strided of_group(int64_t group, int itemsize) const {
    Strided m = matrix;
    m.data = static_cast<char *>(m.data) + group * group_stride * itemsize;
    return m;
  }
};

// What the groups cut: a's rows, b's columns, what a and b share, or nothing (a batch).
enum class Mode { kRaggedM, kRaggedN, kRaggedK, kBatched };

struct GroupedCall {
  Mode mode;
  int64_t groups;
  Operand a, b, d;
  const void *bias = nullptr;  // [groups, N], in the dtype of d
  int64_t bias_group_stride = 0, bias_stride = 1;
  int ab_itemsize = 2, d_itemsize = 2;

  // d^T = b^T a^T
  void transpose() {
    const Operand left = b.transposed();
    b = a.transposed();
    a = left;
    d = d.transposed();
    if (mode == Mode::kRaggedM)
      mode = Mode::kRaggedN;
    else if (mode == Mode::kRaggedN)
      mode = Mode::kRaggedM;
  }
};

// The arrays that a gmm_args points to.
struct GroupedMatrices {
  std::array<gmm_matrix, 3> ragged;
  std::vector<gmm_matrix> batch;
  std::array<const void *, 1> ragged_bias;
  std::vector<const void *> batch_bias;
};

// One matrix of each operand, in place of `matrices`. False when one has no leading dimension, or d is not row-major.
inline bool describe_group(const GroupedCall &call, int64_t group, gmm_matrix &a, gmm_matrix &b, gmm_matrix &d) {
  return describe(call.a.of_group(group, call.ab_itemsize), false, a) &&
         describe(call.b.of_group(group, call.ab_itemsize), false, b) &&
         describe_row_major(call.d.of_group(group, call.d_itemsize), d);
}

// Fills in form, matrices, strides and bias of `args`, which then points into `matrices`; offs are the caller's.
// Returns null, or why gmm.h has no words for this call.
inline const char *describe_grouped(GroupedCall call, gmm_args &args, GroupedMatrices &matrices) {
  gmm_matrix unused;
  if (call.mode == Mode::kRaggedN || !describe_row_major(call.d.matrix, unused)) {
    if (call.bias) return "it adds a bias only to a row-major out";
    call.transpose();
  }
  if (call.mode == Mode::kRaggedN || !describe_row_major(call.d.matrix, unused))
    return "it takes a row-major out, or a column-major one (which it must be where its columns are the groups')";
  if (call.bias && call.d.matrix.cols > 1 && call.bias_stride != 1) return "its bias must be contiguous within a group";

  args.num_groups = static_cast<int32_t>(call.groups);
  const size_t count = call.mode == Mode::kBatched ? call.groups : 1;
  gmm_matrix *first = matrices.ragged.data();
  if (count > 1) {
    matrices.batch.resize(3 * count);
    first = matrices.batch.data();
  }
  for (size_t i = 0; i < count; ++i)
    if (!describe_group(call, i, first[i], first[count + i], first[2 * count + i]))
      return "it reads matrices that have stride 1 in one dimension, and rows or columns that do not overlap";
  args.a = first;
  args.b = first + count;
  args.d = first + 2 * count;
  args.form = call.mode == Mode::kRaggedM ? GMM_RAGGED_M : call.mode == Mode::kRaggedK ? GMM_RAGGED_K : GMM_LIST;
  args.stride_b = call.mode == Mode::kRaggedM ? call.b.group_stride : 0;
  args.stride_d = call.mode == Mode::kRaggedK ? call.d.group_stride : 0;
  if (!call.bias) return nullptr;
  matrices.ragged_bias[0] = call.bias;
  args.bias = matrices.ragged_bias.data();
  args.stride_bias = call.bias_group_stride;
  if (call.mode == Mode::kBatched) {
    for (int64_t i = 0; i < call.groups; ++i)
      matrices.batch_bias.push_back(static_cast<const char *>(call.bias) +
                                    i * call.bias_group_stride * call.d_itemsize);
    args.bias = matrices.batch_bias.data();
    args.stride_bias = 0;
  }
  return nullptr;
}

}  // namespace gmm
