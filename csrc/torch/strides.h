// From a tensor's sizes and strides to the C API's matrices. Free of torch, so that gmm._core describes tensors for
// explain() exactly as the ops do.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "gmm/gmm.h"

namespace gmm {

// A stored [rows, cols] tensor of any strides, in elements.
struct Strided {
  void *data;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;
  int64_t col_stride;
};

// Leading dimension of `lines` runs of `length` adjacent elements each; 0 when the strides are not of that form.
// Strides of a dimension of size 1 mean nothing: a lone line gets a leading dimension that is a multiple of 8 elements,
// as 16-byte loads want it.
inline int64_t leading_dimension(int64_t lines, int64_t length, int64_t line_stride, int64_t element_stride) {
  if (lines == 0 || length == 0 || (lines == 1 && (length == 1 || element_stride == 1)))
    return (std::max<int64_t>(length, 1) + 7) / 8 * 8;
  if (length > 1 && element_stride != 1) return 0;
  return line_stride >= length ? line_stride : 0;
}

// Describes `t` row-major. False when it is not.
inline bool describe_row_major(const Strided &t, gmm_matrix &m) {
  m = {t.data, t.rows, t.cols, leading_dimension(t.rows, t.cols, t.row_stride, t.col_stride), 0};
  return m.ld != 0;
}

// Describes op(`t`), row- or column-major; where both are right (a single row or column), the one with an aligned
// leading dimension. False when neither is: the caller makes a contiguous copy.
inline bool describe(const Strided &t, bool transpose, gmm_matrix &m) {
  const int64_t row_ld = leading_dimension(t.rows, t.cols, t.row_stride, t.col_stride);
  const int64_t col_ld = leading_dimension(t.cols, t.rows, t.col_stride, t.row_stride);
  const bool column_major = row_ld == 0 || (row_ld % 8 != 0 && col_ld != 0 && col_ld % 8 == 0);
  m = {t.data, t.rows, t.cols, column_major ? col_ld : row_ld, column_major};
  if (transpose) {
    std::swap(m.rows, m.cols);
    m.column_major = !m.column_major;
  }
  return m.ld != 0;
}

// Whether two elements may share memory, as in an expanded tensor of up to three dimensions: whether, from the smallest
// stride to the greatest, one is less than what the dimensions before span.
inline bool may_overlap_itself(const int64_t *sizes, const int64_t *strides, int64_t dim) {
  std::pair<int64_t, int64_t> order[3];  // stride and size
  for (int64_t i = 0; i < dim; ++i) {
    if (sizes[i] == 0) return false;
    order[i] = {strides[i], sizes[i]};
  }
  std::sort(order, order + dim);
  int64_t span = 0;  // from the first to the last element of the dimensions so far
  for (int64_t i = 0; i < dim; ++i) {
    const auto [stride, size] = order[i];
    if (size > 1 && stride <= span) return true;
    span += (size - 1) * stride;
  }
  return false;
}

}  // namespace gmm
