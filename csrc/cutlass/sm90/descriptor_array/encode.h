// TMA descriptors ("maps") of the operands.
#pragma once

#include <cuda.h>

#include "gmm/gmm.h"

namespace gmm::sm90::descriptor_array {

class Encoder {
 public:
  // Of A and B, and of D.
  Encoder(gmm_dtype ab_dtype, gmm_dtype d_dtype);

  // Tokens in rows. A, or D or h as they are read, in boxes of 64 columns x `box_rows` rows. B of `batch` groups
  // `stride` elements apart, in boxes of 64 x 64.
  void load_rows(CUtensorMap *map, const gmm_matrix &a, int box_rows) const;
  void load_b(CUtensorMap *map, const gmm_matrix &b, int64_t batch, int64_t stride) const;

  // Tokens in rows. D, written in boxes that end at any row. Both row dimensions step one row, and the base lies M rows
  // before D: (column, M - count + r, end) is row end - count + r of D, which for r >= count lies outside the second
  // dimension and is dropped. It is not for loads: the TMA unit touches the base for a box that lies outside
  // altogether, and no memory need be there (an illegal address on an H200 where D began a mapping).
  void store_rows(CUtensorMap *map, const gmm_matrix &d, int box_rows) const;

  // Tokens in K. A or B, as stored: a line of `extent` elements a token; read in boxes of 64 x `box` tokens.
  void load_tokens(CUtensorMap *map, const void *data, int64_t extent, int64_t tokens, int64_t ld, int box) const;

  // The same for a group's last tokens: with B = 2^30, (x, B - count + r, end, B) is x of token end - count + r, and
  // for r >= count lies outside the second dimension and reads as zero: the third dimension steps one token as well,
  // and the fourth takes the B tokens of the second back, as its stride is 2^35 bytes less a token and 2^30 * 2^35 =
  // 2^65 is nothing to a 64-bit address.
  void load_tail(CUtensorMap *map, const void *data, int64_t extent, int64_t ld, int box) const;

  // Tokens in K. D of `batch` groups `stride` elements apart, written in boxes of 128 bytes x 64 rows.
  void store_batch(CUtensorMap *map, const gmm_matrix &d, int64_t batch, int64_t stride) const;

 private:
  CUtensorMapDataType ab_type_, d_type_;
  int d_bytes_;
};

}  // namespace gmm::sm90::descriptor_array
