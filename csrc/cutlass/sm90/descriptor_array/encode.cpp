#include "cutlass/sm90/descriptor_array/encode.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "core/error.h"
#include "cutlass/sm90/descriptor_array/params.h"
#include "cutlass/sm90/tma.h"

namespace gmm::sm90::descriptor_array {
namespace {

using EncodeTiled = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                 const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Through the runtime, so that the library does not link to the driver and loads without one.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void *entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    GMM_CUDA_CHECK(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess)
      throw Error(GMM_ERROR_CUDA, "the CUDA driver has no cuTensorMapEncodeTiled: CUDA 12.0 or newer is needed");
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return function;
}

// What a map depends on, and nothing else.
struct Key {
  const void *data;
  cuuint64_t dims[4], strides[3];
  cuuint32_t box[4];
  CUtensorMapDataType type;
  int rank;

  bool operator==(const Key &other) const { return std::memcmp(this, &other, sizeof(Key)) == 0; }
};
static_assert(std::has_unique_object_representations_v<Key>, "compared as bytes");

struct Encoded {
  Key key;  // all zero: none
  CUtensorMap map;
};

// The maps of this thread's last calls: weights come again in every step.
Encoded &remembered(const Key &key) {
  constexpr size_t kEntries = 512;
  thread_local const std::unique_ptr<Encoded[]> entries(new Encoded[kEntries]());
  const uint64_t mixed = (reinterpret_cast<uintptr_t>(key.data) >> 4 ^ key.dims[1] << 7) * 0x9E3779B97F4A7C15;
  return entries[mixed >> 55];
}

// dims from the contiguous one on, in elements; strides of the others, in bytes.
template <int kRank>
void encode(CUtensorMap *map, CUtensorMapDataType type, const void *data, const cuuint64_t (&dims)[kRank],
            const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  Key key{};
  key.data = data;
  key.type = type;
  key.rank = kRank;
  std::copy_n(dims, kRank, key.dims);
  std::copy_n(strides, kRank - 1, key.strides);
  std::copy_n(box, kRank, key.box);
  Encoded &encoded = remembered(key);
  if (!(encoded.key == key)) {
    const cuuint32_t element_strides[] = {1, 1, 1, 1};
    const CUresult result = encode_tiled()(&encoded.map, type, kRank, const_cast<void *>(data), dims, strides, box,
                                           element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
      encoded.key = Key{};
      throw Error(GMM_ERROR_CUDA,
                  format("cuTensorMapEncodeTiled failed with CUresult %d for a matrix of %llu x %llu. The error may "
                         "come from earlier work on this device.",
                         int(result), (unsigned long long)dims[1], (unsigned long long)dims[0]));
    }
    encoded.key = key;
  }
  *map = encoded.map;
}

// A stride that nothing is ever read with, of a dimension of one or of none: still a multiple of 16 bytes.
cuuint64_t stride_bytes(int64_t elements, int element_bytes) { return cuuint64_t(elements) * element_bytes; }

// An extent; a map has none of zero, and of an empty operand nothing is ever read.
cuuint64_t extent(int64_t elements) { return cuuint64_t(std::max<int64_t>(elements, 1)); }

}  // namespace

Encoder::Encoder(gmm_dtype ab_dtype, gmm_dtype d_dtype)
    : ab_type_(ab_dtype == GMM_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16),
      d_type_(d_dtype == GMM_FP32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : ab_type_),
      d_bytes_(bytes_of(d_dtype)) {}

void Encoder::load_rows(CUtensorMap *map, const gmm_matrix &a, int box_rows) const {
  encode<2>(map, ab_type_, a.data, {extent(a.cols), extent(a.rows)}, {stride_bytes(a.ld, 2)},
            {64, cuuint32_t(box_rows)});
}

void Encoder::load_b(CUtensorMap *map, const gmm_matrix &b, int64_t batch, int64_t stride) const {
  const int64_t inner = b.column_major ? b.rows : b.cols, lines = b.column_major ? b.cols : b.rows;
  encode<3>(map, ab_type_, b.data, {extent(inner), extent(lines), extent(batch)},
            {stride_bytes(b.ld, 2), stride_bytes(stride, 2)},
            {kBlockK, cuuint32_t(b.column_major ? kBoxRowsB : kBlockK), 1});
}

void Encoder::store_rows(CUtensorMap *map, const gmm_matrix &d, int box_rows) const {
  const cuuint64_t row = stride_bytes(d.ld, d_bytes_);
  const cuuint32_t columns = d_bytes_ == 2 ? Chunk<2, false>::kBoxColumns : Chunk<4, false>::kBoxColumns;
  encode<3>(map, d_type_, static_cast<char *>(d.data) - row * cuuint64_t(d.rows),
            {extent(d.cols), extent(d.rows), cuuint64_t(d.rows) + 1}, {row, row}, {columns, cuuint32_t(box_rows), 1});
}

void Encoder::load_tokens(CUtensorMap *map, const void *data, int64_t columns, int64_t tokens, int64_t ld,
                          int box) const {
  encode<2>(map, ab_type_, data, {extent(columns), extent(tokens)}, {stride_bytes(ld, 2)}, {64, cuuint32_t(box)});
}

void Encoder::load_tail(CUtensorMap *map, const void *data, int64_t columns, int64_t ld, int box) const {
  const cuuint64_t token = stride_bytes(ld, 2);
  encode<4>(map, ab_type_, data, {extent(columns), cuuint64_t(1) << 30, 0x7fff0000, 0x7fff0000},
            {token, token, (cuuint64_t(1) << 35) - token}, {64, cuuint32_t(box), 1, 1});
}

void Encoder::store_batch(CUtensorMap *map, const gmm_matrix &d, int64_t batch, int64_t stride) const {
  using Chunk16 = Chunk<2, true>;
  using Chunk32 = Chunk<4, true>;
  static_assert(Chunk16::kRows == 64 && Chunk32::kRows == 64, "one wgmma");
  const cuuint32_t columns = d_bytes_ == 2 ? Chunk16::kBoxColumns : Chunk32::kBoxColumns;
  encode<3>(map, d_type_, d.data, {extent(d.cols), extent(d.rows), extent(batch)},
            {stride_bytes(d.ld, d_bytes_), stride_bytes(stride, d_bytes_)}, {columns, 64, 1});
}

}  // namespace gmm::sm90::descriptor_array
