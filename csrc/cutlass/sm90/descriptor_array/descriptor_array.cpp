#include "cutlass/sm90/descriptor_array/descriptor_array.h"

#include <algorithm>
#include <atomic>
#include <random>
#include <type_traits>

#include "core/groups.h"
#include "cutlass/sm90/descriptor_array/encode.h"
#include "cutlass/sm90/descriptor_array/heuristics.h"
#include "cutlass/sm90/descriptor_array/params.h"
#include "cutlass/sm90/tma.h"

namespace gmm::sm90::descriptor_array {
namespace {

// A tag that no launch has had, in this process or another.
TileCounter new_counter(void *workspace) {
  static std::atomic<uint64_t> launches{uint64_t(std::random_device()()) << 32 | std::random_device()() | 1};
  return {static_cast<uint64_t *>(workspace), launches.fetch_add(1)};
}

// What every launch of a call shares.
struct Launch {
  const gmm_args &args;
  const Kernel &kernel;
  Encoder encoder;
  void *workspace;
  int tile_q, few_tokens, sm_count;
  cudaStream_t stream;

  bool tokens_in_k() const { return &kernel == &k128x192; }

  template <class Params>
  void operator()(bool b_column_major, Params &params) const {
    params.counter = new_counter(workspace);
    params.tile_q = tile_q;
    params.accumulate = args.accumulate;
    params.add_in_l2 = kAddInL2;
    params.few_tokens = few_tokens;
    const bool d_fp32 = args.d_dtype == GMM_FP32;
    if constexpr (std::is_same_v<Params, SmallParams>) {
      if (args.epilogue)
        return args.ab_dtype == GMM_BF16 ? launch_swiglu<GMM_BF16>(kernel, b_column_major, params, sm_count, stream)
                                         : launch_swiglu<GMM_FP16>(kernel, b_column_major, params, sm_count, stream);
    }
    if (args.ab_dtype == GMM_BF16)
      descriptor_array::launch<GMM_BF16>(kernel, b_column_major, d_fp32, params, sm_count, stream);
    else
      descriptor_array::launch<GMM_FP16>(kernel, b_column_major, d_fp32, params, sm_count, stream);
  }
};

// Tokens in rows: the map, or the two, of D.
void encode_rows_of_d(const gmm_args &args, const Encoder &encoder, const gmm_matrix &d, CUtensorMap *maps) {
  const int box_rows = args.d_dtype == GMM_FP32 ? Chunk<4, false>::kRows : Chunk<2, false>::kRows;
  encoder.store_rows(&maps[0], d, box_rows);
  if (reads_d(args)) encoder.load_rows(&maps[1], d, box_rows);
}

// ------------------------------------------------------------------------------------------------------- list form

// Collects the groups of one launch. Tokens in rows: rows that follow one another in one buffer become one matrix with
// one map.
class Batch {
 public:
  explicit Batch(const Launch &launch)
      : launch_(launch), d_bytes_(bytes_of(launch.args.d_dtype)), maps_of_d_(1 + reads_d(launch.args)) {
    params_.groups = 0;
    params_.ragged.offs = nullptr;
  }

  bool empty() const { return params_.groups == 0; }

  // False, and nothing changed, when the group does not fit any more.
  bool add(int group) {
    const gmm_matrix &a = launch_.args.a[group], &b = launch_.args.b[group], &d = launch_.args.d[group];
    const bool shares = !empty() && !launch_.tokens_in_k();
    const bool continues_a = shares && continues(*last_a_, a, 2),
               continues_d = shares && continues(*last_d_, d, d_bytes_);
    const int maps = (continues_a ? 0 : 1) + 1 + (continues_d ? 0 : maps_of_d_);
    if (maps_ + maps > kLarge.maps || params_.groups == kLarge.groups) return false;
    GroupShape &shape = params_.shapes[params_.groups++];
    shape.m = int(d.rows);
    shape.n = int(d.cols);
    shape.k = int(a.cols);
    shape.bias = launch_.args.bias ? launch_.args.bias[group] : nullptr;
    if (!continues_a) map_a_ = open(a);
    if (!continues_d) map_d_ = open(d, maps_of_d_);
    shape.map_a = map_a_;
    shape.map_d = map_d_;
    shape.map_b = open(b);
    shape.row_a = append_rows(map_a_, a, continues_a);
    shape.row_d = append_rows(map_d_, d, continues_d);
    last_a_ = &a;
    last_d_ = &d;
    return true;
  }

  void launch() {
    const bool b_column_major = matrices_[params_.shapes[0].map_b].column_major;
    for (int i = 0; i < params_.groups; ++i) encode(params_.shapes[i]);
    order_shapes();
    if (maps_ <= kSmall.maps && params_.groups <= kSmall.groups) {
      SmallParams params;
      std::copy_n(params_.maps, maps_, params.maps);
      std::copy_n(params_.shapes, params_.groups, params.shapes);
      params.ragged = params_.ragged;
      params.groups = params_.groups;
      params.clusters_at_back = params_.clusters_at_back;
      launch_(b_column_major, params);
    } else {
      launch_(b_column_major, params_);
    }
    params_.groups = maps_ = 0;
  }

 private:
  int open(const gmm_matrix &m, int maps = 1) {
    matrices_[maps_] = m;
    maps_ += maps;
    return maps_ - maps;
  }

  // Where the rows of `m` begin in the map, which now holds them.
  int append_rows(int map, const gmm_matrix &m, bool continues) {
    if (!continues) return 0;
    const int first = int(matrices_[map].rows);
    matrices_[map].rows += m.rows;
    return first;
  }

  void encode(GroupShape &shape) {
    const Encoder &encoder = launch_.encoder;
    const gmm_matrix &a = matrices_[shape.map_a], &b = matrices_[shape.map_b], &d = matrices_[shape.map_d];
    shape.rows_d = int(d.rows);
    if (launch_.tokens_in_k()) {
      encoder.load_tokens(&params_.maps[shape.map_a], a.data, a.rows, a.cols, a.ld, kBoxTokensA);
      encoder.load_tokens(&params_.maps[shape.map_b], b.data, b.cols, b.rows, b.ld, kBoxTokensB);
      encoder.store_batch(&params_.maps[shape.map_d], d, 1, d.ld);
    } else {
      if (shape.row_a == 0) encoder.load_rows(&params_.maps[shape.map_a], a, kBoxRowsA);
      encoder.load_b(&params_.maps[shape.map_b], b, 1, b.ld);
      if (shape.row_d == 0) encode_rows_of_d(launch_.args, encoder, d, &params_.maps[shape.map_d]);
    }
  }

  // The groups whose tiles take longest first, and the numbers of tiles (see schedule.cuh).
  void order_shapes() {
    const auto time = [&](const GroupShape &shape) -> int64_t {
      if (launch_.tokens_in_k()) return shape.k;
      const int m_tiles = (shape.m + launch_.tile_q - 1) / launch_.tile_q;
      return int64_t((shape.m + m_tiles - 1) / m_tiles) * shape.k;
    };
    constexpr int64_t kMaxTime = int64_t(1) << 47;
    uint64_t order[kLarge.groups];  // time and index: sorts as one number, equal times in the caller's order
    const int groups = params_.groups;
    for (int i = 0; i < groups; ++i) order[i] = uint64_t(kMaxTime - time(params_.shapes[i])) << 16 | i;
    if (!std::is_sorted(order, order + groups)) {
      std::sort(order, order + groups);
      GroupShape shapes[kLarge.groups];
      std::copy_n(params_.shapes, groups, shapes);
      for (int i = 0; i < groups; ++i) params_.shapes[i] = shapes[uint16_t(order[i])];
    }
    int64_t tiles = 0;
    double work = 0, few_work = 0;  // relative to the columns and K of the groups, as these may differ here
    for (int i = 0; i < groups; ++i) {
      GroupShape &shape = params_.shapes[i];
      shape.tiles_end = int(tiles += cluster_tiles(shape));
      const bool in_k = launch_.tokens_in_k();
      const int tokens = in_k ? shape.k : shape.m;
      const double mine = double(tokens + kTileOverhead) * shape.n * (in_k ? shape.m : shape.k);
      work += mine;
      if (tokens <= launch_.few_tokens) few_work += mine;
    }
    const int cluster = launch_.kernel.cluster_m * launch_.kernel.cluster_n, clusters = launch_.sm_count / cluster;
    params_.clusters_at_back =
        cluster > 1 && tiles >= clusters ? choose_clusters_at_back(clusters, float(few_work), float(work)) : 0;
  }

  // Tiles of a cluster: pairs along one dimension of D, and a last one without a neighbour shared by two along the
  // other.
  int64_t cluster_tiles(const GroupShape &shape) const {
    const Kernel &kernel = launch_.kernel;
    const auto tiles = [](int64_t size, int tile) { return (size + tile - 1) / tile; };
    const bool in_k = launch_.tokens_in_k();
    const int64_t p_tiles = in_k ? tiles(shape.m, kernel.tile_m) : tiles(shape.n, kernel.tile_n);
    const int64_t q_tiles = in_k ? tiles(shape.n, launch_.tile_q) : tiles(shape.m, launch_.tile_q);
    const int cluster = kernel.cluster_m * kernel.cluster_n;
    return q_tiles * (p_tiles / cluster) + tiles(p_tiles % cluster * q_tiles, cluster);
  }

  const Launch &launch_;
  const int d_bytes_, maps_of_d_;
  LargeParams params_;  // maps are encoded at the launch
  gmm_matrix matrices_[kLarge.maps];
  const gmm_matrix *last_a_ = nullptr, *last_d_ = nullptr;
  int map_a_ = 0, map_d_ = 0, maps_ = 0;
};

void run_list(const Launch &launch) {
  Batch batch(launch);
  for (int i = 0; i < launch.args.num_groups; ++i) {
    if (!has_product(launch.args, i)) continue;
    if (batch.add(i)) continue;
    batch.launch();
    batch.add(i);
  }
  if (!batch.empty()) batch.launch();
}

// ---------------------------------------------------------------------------------------------------- ragged forms

// The maps and values of an epilogue.
void encode_epilogue(const gmm_args &args, const Encoder &encoder, SmallParams &params) {
  const gmm_matrix &d = args.d[0], &h = args.h;
  const auto half = [&](gmm_matrix m, int index) {
    m.cols /= 2;
    m.data = static_cast<char *>(m.data) + index * m.cols * 2;
    return m;
  };
  params.swiglu = {args.row_weights, args.row_sums, static_cast<char *>(h.data), h.ld * 2};
  if (args.epilogue == GMM_EPILOGUE_SWIGLU) {
    constexpr int kRows = Chunk<2, false>::kRows;
    encoder.store_rows(&params.maps[kMapD], d, kRows);
    if (!h.data) return;
    encoder.store_rows(&params.maps[kMapGate], half(h, 0), kRows);
    encoder.store_rows(&params.maps[kMapUp], half(h, 1), kRows);
  } else {
    encoder.store_rows(&params.maps[kMapD], half(d, 0), kBoxRowsBackward);
    encoder.store_rows(&params.maps[kMapUpD], half(d, 1), kBoxRowsBackward);
    encoder.load_rows(&params.maps[kMapGate], half(h, 0), kBoxRowsBackward);
    encoder.load_rows(&params.maps[kMapUp], half(h, 1), kBoxRowsBackward);
  }
}

void run_ragged(const Launch &launch) {
  const gmm_args &args = launch.args;
  const gmm_matrix &a = args.a[0], &b = args.b[0], &d = args.d[0];
  const Encoder &encoder = launch.encoder;
  SmallParams params;
  params.groups = args.num_groups;
  params.ragged = {args.offs,   args.offs_int64, int(launch.tokens_in_k() ? a.cols : a.rows), int(d.rows),
                   int(b.cols), int(a.cols),     args.bias ? args.bias[0] : nullptr,          args.stride_bias};
  const int d_bytes = bytes_of(args.d_dtype);
  params.d = {static_cast<char *>(d.data), d.ld * d_bytes, args.stride_d * d_bytes, d.cols * d_bytes};
  if (launch.tokens_in_k()) {
    const void *a_data = a.data ? a.data : d.data, *b_data = b.data ? b.data : d.data;  // no tokens: no address to read
    encoder.load_tokens(&params.maps[kMapA], a_data, a.rows, a.cols, a.ld, kBoxTokensA);
    encoder.load_tokens(&params.maps[kMapB], b_data, b.cols, b.rows, b.ld, kBoxTokensB);
    encoder.load_tail(&params.maps[kMapTailA], a_data, a.rows, a.ld, kBoxTokensA);
    encoder.load_tail(&params.maps[kMapTailB], b_data, b.cols, b.ld, kBoxTokensB);
    encoder.store_batch(&params.maps[kMapD], d, args.num_groups, args.stride_d);
  } else {
    gmm_matrix a_map = a, b_map = b;  // K = 0, no groups: as above
    if (!a.data) a_map.data = d.data;
    if (!b.data) b_map.data = d.data;
    encoder.load_rows(&params.maps[kMapA], a_map, kBoxRowsA);
    encoder.load_b(&params.maps[kMapB], b_map, args.num_groups, args.stride_b);
    if (args.epilogue)
      encode_epilogue(args, encoder, params);
    else
      encode_rows_of_d(args, encoder, d, &params.maps[kMapD]);
  }
  launch(b.column_major, params);
}

}  // namespace

void run(const gmm_args &args, const Plan &plan, void *workspace, int sm_count, cudaStream_t stream) {
  const Kernel &kernel = *plan.kernel;
  const Launch launch{args,
                      kernel,
                      Encoder(args.ab_dtype, args.d_dtype),
                      workspace,
                      args.form == GMM_LIST ? choose_tile_q(args, kernel, sm_count) : 0,
                      few_tokens(args, kernel),
                      sm_count,
                      stream};
  args.form == GMM_LIST ? run_list(launch) : run_ragged(launch);
}

}  // namespace gmm::sm90::descriptor_array
