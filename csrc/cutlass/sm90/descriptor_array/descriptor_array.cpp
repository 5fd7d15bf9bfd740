#include "cutlass/sm90/descriptor_array/descriptor_array.h"

#include <algorithm>

#include "core/error.h"
#include "core/groups.h"
#include "cutlass/sm90/descriptor_array/heuristics.h"
#include "cutlass/sm90/descriptor_array/params.h"

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

class Encoder {
 public:
  explicit Encoder(gmm_dtype dtype)
      : encode_(encode_tiled()),
        type_(dtype == GMM_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16) {}

  // A matrix of `lines` lines of `extent` contiguous elements, read in boxes of kBlockK x box_lines.
  void load(CUtensorMap *map, const gmm_matrix &m, int box_lines) const {
    const int64_t extent = m.column_major ? m.rows : m.cols, lines = m.column_major ? m.cols : m.rows;
    const cuuint64_t dims[] = {cuuint64_t(extent), cuuint64_t(lines)}, strides[] = {cuuint64_t(m.ld) * 2};
    const cuuint32_t box[] = {kBlockK, cuuint32_t(box_lines)};
    encode(map, 2, m.data, dims, strides, box);
  }

  // D, written in boxes of kChunk columns x kChunk rows that end at any row. Both row dimensions step one row, and the
  // base lies M rows before D: (col, M - count + r, end) is row end - count + r of D, which for r >= count lies outside
  // the second dimension and is dropped.
  void store(CUtensorMap *map, const gmm_matrix &d) const {
    const cuuint64_t rows = cuuint64_t(d.rows), row_bytes = cuuint64_t(d.ld) * 2;
    const cuuint64_t dims[] = {cuuint64_t(d.cols), rows, rows + 1}, strides[] = {row_bytes, row_bytes};
    const cuuint32_t box[] = {kChunk, kChunk, 1};
    encode(map, 3, static_cast<char *>(d.data) - row_bytes * rows, dims, strides, box);
  }

 private:
  void encode(CUtensorMap *map, int rank, void *data, const cuuint64_t *dims, const cuuint64_t *strides,
              const cuuint32_t *box) const {
    const cuuint32_t element_strides[] = {1, 1, 1};
    const CUresult result =
        encode_(map, type_, rank, data, dims, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
      throw Error(GMM_ERROR_CUDA, format("cuTensorMapEncodeTiled failed with %d for a matrix of %llu x %llu",
                                         int(result), (unsigned long long)dims[1], (unsigned long long)dims[0]));
  }

  EncodeTiled encode_;
  CUtensorMapDataType type_;
};

// Collects the groups of one launch. Rows that follow one another in one buffer become one matrix with one map.
class Batch {
 public:
  Batch() { params_.groups = 0; }

  bool empty() const { return params_.groups == 0; }

  // False, and nothing changed, when the group does not fit any more.
  bool add(const gmm_matrix &a, const gmm_matrix &b, const gmm_matrix &d) {
    const bool continues_a = !empty() && continues(last_a_, a), continues_d = !empty() && continues(last_d_, d);
    if (maps_ + 3 - continues_a - continues_d > kLarge.maps || params_.groups == kLarge.groups) return false;
    GroupShape &shape = params_.shapes[params_.groups++];
    shape.m = int(d.rows);
    shape.n = int(d.cols);
    shape.k = int(a.cols);
    shape.map_a = continues_a ? params_.shapes[params_.groups - 2].map_a : open(a);
    shape.map_d = continues_d ? params_.shapes[params_.groups - 2].map_d : open(d);
    shape.map_b = open(b);
    shape.row_a = append_rows(shape.map_a, a, continues_a);
    shape.row_d = append_rows(shape.map_d, d, continues_d);
    last_a_ = a;
    last_d_ = d;
    return true;
  }

  void launch(const Encoder &encoder, const gmm_args &args, const Kernel &kernel, int tile_rows, int sm_count,
              cudaStream_t stream) {
    const bool b_column_major = matrices_[params_.shapes[0].map_b].column_major;
    int64_t tiles = 0;
    for (int i = 0; i < params_.groups; ++i) {
      GroupShape &shape = params_.shapes[i];
      const gmm_matrix &d = matrices_[shape.map_d];
      shape.rows_d = int(d.rows);
      shape.tiles_end = int(tiles += cluster_tiles(shape, kernel, tile_rows));
      if (shape.row_a == 0) encoder.load(&params_.maps[shape.map_a], matrices_[shape.map_a], kBoxRowsA);
      encoder.load(&params_.maps[shape.map_b], matrices_[shape.map_b], b_column_major ? kBoxRowsB : kBlockK);
      if (shape.row_d == 0) encoder.store(&params_.maps[shape.map_d], d);
    }
    params_.tile_rows = tile_rows;
    if (maps_ <= kSmall.maps && params_.groups <= kSmall.groups)
      launch_dtype(args, kernel, b_column_major, small(), sm_count, stream);
    else
      launch_dtype(args, kernel, b_column_major, params_, sm_count, stream);
    params_.groups = maps_ = 0;
  }

 private:
  int open(const gmm_matrix &m) {
    matrices_[maps_] = m;
    return maps_++;
  }

  // Where the rows of `m` begin in the map, which now holds them.
  int append_rows(int map, const gmm_matrix &m, bool continues) {
    if (!continues) return 0;
    const int first = int(matrices_[map].rows);
    matrices_[map].rows += m.rows;
    return first;
  }

  // Tiles of a cluster: pairs of column tiles, and a last one without a neighbour shared by two row tiles.
  static int64_t cluster_tiles(const GroupShape &shape, const Kernel &kernel, int tile_rows) {
    const int64_t m_tiles = (shape.m + tile_rows - 1) / tile_rows;
    const int64_t n_tiles = (shape.n + kernel.tile_n - 1) / kernel.tile_n;
    const int64_t left = n_tiles % kernel.cluster_n;
    return m_tiles * (n_tiles / kernel.cluster_n) + (left ? (m_tiles + kernel.cluster_n - 1) / kernel.cluster_n : 0);
  }

  SmallParams small() const {
    SmallParams params;
    std::copy_n(params_.maps, maps_, params.maps);
    std::copy_n(params_.shapes, params_.groups, params.shapes);
    params.groups = params_.groups;
    params.tile_rows = params_.tile_rows;
    return params;
  }

  template <class Params>
  static void launch_dtype(const gmm_args &args, const Kernel &kernel, bool b_column_major, const Params &params,
                           int sm_count, cudaStream_t stream) {
    if (args.ab_dtype == GMM_BF16)
      descriptor_array::launch<GMM_BF16>(kernel, b_column_major, params, sm_count, stream);
    else
      descriptor_array::launch<GMM_FP16>(kernel, b_column_major, params, sm_count, stream);
  }

  LargeParams params_;  // maps are encoded at the launch
  gmm_matrix matrices_[kLarge.maps];
  gmm_matrix last_a_, last_d_;
  int maps_ = 0;
};

}  // namespace

void run(const gmm_args &args, const Plan &plan, int sm_count, cudaStream_t stream) {
  const Encoder encoder(args.ab_dtype);
  const int tile_rows = choose_tile_rows(args, *plan.kernel, sm_count);
  Batch batch;
  for (int i = 0; i < args.num_groups; ++i) {
    if (!has_product(args, i)) continue;
    if (batch.add(args.a[i], args.b[i], args.d[i])) continue;
    batch.launch(encoder, args, *plan.kernel, tile_rows, sm_count, stream);
    batch.add(args.a[i], args.b[i], args.d[i]);
  }
  if (!batch.empty()) batch.launch(encoder, args, *plan.kernel, tile_rows, sm_count, stream);
}

}  // namespace gmm::sm90::descriptor_array
