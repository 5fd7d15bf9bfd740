// The scheduler warp: finds a CTA's tiles.
//
// A cluster's first tile is its own number. Where all tiles take about the same time, it then takes every
// (clusters)th; else it asks the launch's counter (counter.cuh), and the groups come in order of the time that one of
// their tiles takes, the longest first, so that the clusters end together. In the list form the host has sorted them,
// in the ragged forms the warp makes one pass over the groups for each time that occurs.
#pragma once

#include "cutlass/sm90/descriptor_array/config.cuh"
#include "cutlass/sm90/descriptor_array/counter.cuh"

namespace gmm::sm90::descriptor_array {

constexpr int kBandTiles = 12;
constexpr int kMaxSortedGroups = 1024;  // a pass over more would take longer than a tile

// One group, and which of its tiles.
struct Place {
  int group;
  int begin, end;  // tokens: rows of the map of D, or with tokens in K, of A and B
  int tile;
};

template <class C>
CUTLASS_DEVICE int cluster_tiles(int p_tiles, int q_tiles) {
  if constexpr (C::Cluster == 1) return p_tiles * q_tiles;
  return q_tiles * (p_tiles / C::Cluster) + (p_tiles % C::Cluster ? (q_tiles + C::Cluster - 1) / C::Cluster : 0);
}

// Cuts `size` rows into tiles as equal as units of 16 rows allow: full tiles and a short one would cost up to 6 %. The
// longer ones come at other places in each group, because a CTA often meets the same place in every group.
CUTLASS_DEVICE void cut_rows(int size, int tiles, int index, int group, int &begin, int &end) {
  const int units = (size + 15) / 16, each = units / tiles, longer = units - each * tiles;
  const int turn = group * longer % tiles;
  const auto longer_before = [&](int place) {  // of the first `place` tiles, with the turn counted in
    return place < tiles ? min(place, longer) : longer + min(place - tiles, longer);
  };
  const auto start = [&](int i) { return min((i * each + longer_before(i + turn) - longer_before(turn)) * 16, size); };
  begin = start(min(index, tiles));
  end = start(min(index + 1, tiles));
}

template <class C>
CUTLASS_DEVICE Tile cut_tile(const Place &place, int m, int n, int k, int tile_rows, int rank) {
  const int size = place.end - place.begin;
  const int p_tiles = ((C::kTokensInK ? m : n) + C::TileP - 1) / C::TileP;
  const int q_tiles = C::kTokensInK ? (n + C::TileQ - 1) / C::TileQ : (size + tile_rows - 1) / tile_rows;
  const int pairs = p_tiles / C::Cluster;  // p tiles are taken Cluster at a time
  int i = place.tile, p, q;
  Tile tile{};
  if (i < q_tiles * pairs) {
    // Bands of q: the tiles that run at the same time are about as high as wide, so that they share both operands in
    // L2.
    const int bands = (q_tiles + kBandTiles - 1) / kBandTiles, band_tiles = (q_tiles + bands - 1) / bands;
    const int band = i / (band_tiles * pairs), height = min(band_tiles, q_tiles - band * band_tiles);
    i -= band * band_tiles * pairs;
    q = band * band_tiles + i % height;
    p = i / height * C::Cluster + rank;
    tile.shares_q = 1;
  } else {  // a last p tile without a neighbour: the CTAs take two q tiles of it and share P
    q = (i - q_tiles * pairs) * C::Cluster + rank;
    p = p_tiles - 1;
    tile.shares_q = 0;
  }
  tile.p = p * C::TileP;
  tile.group = place.group;
  if constexpr (C::kTokensInK) {
    tile.q = min(q * C::TileQ, n);
    tile.q_end = min(tile.q + C::TileQ, n);
    tile.k = place.begin;
    tile.k_end = place.end;
  } else {
    cut_rows(size, q_tiles, q, place.group, tile.q, tile.q_end);
    tile.q += place.begin;
    tile.q_end += place.begin;
    tile.k_end = k;
  }
  return tile;
}

// The list form: sizes and numbers of tiles are in the parameters.
template <class C, class Params>
class ListFinder {
 public:
  CUTLASS_DEVICE explicit ListFinder(const Params &params) : params_(params) {}

  // Tile number `t`. Called by a whole warp, with rising t.
  CUTLASS_DEVICE bool find(int t, int rank, Tile &tile) {
    const int lane = threadIdx.x % 32;
    for (;; window_ += 32) {
      if (window_ >= params_.groups) return false;
      const int g = window_ + lane;
      const uint32_t after = __ballot_sync(~0u, g < params_.groups && params_.shapes[g].tiles_end > t);
      if (!after) continue;
      const int group = window_ + __ffs(after) - 1;
      const GroupShape &shape = params_.shapes[group];
      const int begin = C::kTokensInK ? 0 : shape.row_d, size = C::kTokensInK ? shape.k : shape.m;
      const Place place{group, begin, begin + size, t - (group ? params_.shapes[group - 1].tiles_end : 0)};
      tile = cut_tile<C>(place, shape.m, shape.n, shape.k, params_.tile_rows, rank);
      return true;
    }
  }

  // All tiles, once find() has returned false.
  CUTLASS_DEVICE int total() const { return params_.shapes[params_.groups - 1].tiles_end; }

  // Whether all tiles take about the same time, once find() has returned a tile.
  CUTLASS_DEVICE bool equal() const { return params_.equal_tiles; }

 private:
  const Params &params_;
  int window_ = 0;  // the first group to look at
};

// The ragged forms. A lane holds one of 32 groups. Tokens in rows: one more group, of the rows after the last end,
// makes them zero.
template <class C, class Params>
class RaggedFinder {
 public:
  CUTLASS_DEVICE explicit RaggedFinder(const Params &params)
      : params_(params), ragged_(params.ragged), groups_(params.groups + !C::kTokensInK) {
    sorted_ = C::Cluster > 1 && params.groups <= kMaxSortedGroups;
    tile_rows_ = C::kTokensInK || C::Cluster == 1 ? C::TileQ : choose_tile_rows();
    if (!sorted_) time_ = 0;
    load();
  }

  CUTLASS_DEVICE bool find(int t, int rank, Tile &tile) {
    while (t >= window_begin_ + window_tiles_) {
      window_begin_ += window_tiles_;
      window_ += 32;
      if (window_ >= groups_) {
        if (next_time_ < 0) {
          window_tiles_ = 0;
          return false;
        }
        time_ = next_time_;
        next_time_ = -1;
        window_ = 0;
        last_end_ = 0;
      }
      load();
    }
    const int in_window = t - window_begin_;
    const int lane = __ffs(__ballot_sync(~0u, tiles_end_ > in_window)) - 1;
    const Place place{window_ + lane, __shfl_sync(~0u, begin_, lane), __shfl_sync(~0u, end_, lane),
                      in_window - __shfl_sync(~0u, tiles_end_ - tiles_, lane)};
    const int k = place.group < params_.groups ? ragged_.k : 0;
    tile = cut_tile<C>(place, ragged_.m, ragged_.n, k, tile_rows_, rank);
    return true;
  }

  // All tiles, once find() has returned false.
  CUTLASS_DEVICE int total() const { return window_begin_; }

  // Whether all tiles take about the same time, once find() has returned a tile. Tiles of a group differ by one unit of
  // rows, see cut_rows(). With tokens in K the memory decides, and no two take the same.
  CUTLASS_DEVICE bool equal() const { return !C::kTokensInK && shortest_ == longest_; }

 private:
  // The end of group g, and with tokens in rows, of the rows after all groups; not yet clamped to the ends before.
  CUTLASS_DEVICE int end_of(int g) const {
    if (g >= params_.groups) return C::kTokensInK || g > params_.groups || params_.accumulate ? 0 : ragged_.total;
    const int64_t end = ragged_.offs_int64 ? __ldg(static_cast<const long long *>(ragged_.offs) + g)
                                           : __ldg(static_cast<const int *>(ragged_.offs) + g);
    return int(max(int64_t(0), min(end, int64_t(ragged_.total))));
  }

  // Begin and end of the lane's group, in windows from the first on. Ends that decrease are raised to the greatest
  // before.
  CUTLASS_DEVICE void load_ends(int window) {
    const int lane = threadIdx.x % 32;
    int end = end_of(window + lane);
    CUTE_UNROLL
    for (int i = 1; i < 32; i *= 2) {
      const int before = __shfl_up_sync(~0u, end, i);
      if (lane >= i) end = max(end, before);
    }
    end_ = max(end, last_end_);
    const int before = __shfl_up_sync(~0u, end_, 1);
    begin_ = lane ? before : last_end_;
    last_end_ = __shfl_sync(~0u, end_, 31);
  }

  // The rows of a tile at most: minimises (rounds) x (mean time of a tile). A tile's time grows with its rows, plus
  // about 20 rows' worth for filling the pipeline and the epilogue (measured on an H200).
  CUTLASS_DEVICE int choose_tile_rows() {
    constexpr int kMinRows = C::TileQ / 2, kChoices = (C::TileQ - kMinRows) / 16 + 1, kOverheadRows = 20;
    int tiles[kChoices] = {}, rows = 0;
    for (int window = 0; window < params_.groups; window += 32) {
      load_ends(window);
      const int size = window + int(threadIdx.x) % 32 < params_.groups ? end_ - begin_ : 0;
      rows += (size + 15) / 16 * 16;
      CUTE_UNROLL
      for (int i = 0; i < kChoices; ++i) tiles[i] += (size + kMinRows + i * 16 - 1) / (kMinRows + i * 16);
    }
    last_end_ = 0;
    rows = __reduce_add_sync(~0u, rows);
    const float rounds_a_row_tile = float((ragged_.n + C::TileP - 1) / C::TileP) / float(gridDim.x);
    int best_rows = C::TileQ;
    float best = 3e38f;
    CUTE_UNROLL
    for (int i = kChoices - 1; i >= 0; --i) {
      const float row_tiles = float(__reduce_add_sync(~0u, tiles[i])), rounds = row_tiles * rounds_a_row_tile;
      const float estimate = (float(rows) + row_tiles * kOverheadRows) * ceilf(rounds) / rounds;
      if (estimate < best) best = estimate, best_rows = kMinRows + i * 16;
    }
    return best_rows;
  }

  // The tiles of the lane's group in this pass, and of the lanes before.
  CUTLASS_DEVICE void load() {
    if (!have_ends_) load_ends(window_);
    have_ends_ = groups_ <= 32;
    const int size = end_ - begin_, lane = threadIdx.x % 32;
    int time = 0, tiles = 0;
    if constexpr (C::kTokensInK) {
      const int p_tiles = (ragged_.m + C::TileP - 1) / C::TileP, q_tiles = (ragged_.n + C::TileQ - 1) / C::TileQ;
      if (window_ + lane < params_.groups && (size > 0 || !params_.accumulate))
        tiles = cluster_tiles<C>(p_tiles, q_tiles);
      const int blocks = (size + kBlockK - 1) / kBlockK, shift = max(28 - __clz(blocks), 0);
      time = shift * 8 + (blocks >> shift);  // rising with the blocks, equal for those that differ by less than 1/8
    } else {
      const int q_tiles = (size + tile_rows_ - 1) / tile_rows_;
      if (size > 0) {
        tiles = cluster_tiles<C>((ragged_.n + C::TileP - 1) / C::TileP, q_tiles);
        if (window_ + lane < params_.groups) time = ((size + 15) / 16 + q_tiles - 1) / q_tiles;
      }
    }
    if (!sorted_) time = 0;
    next_time_ = max(next_time_, __reduce_max_sync(~0u, tiles > 0 && time < time_ ? time : -1));
    if (time_ == INT32_MAX) {
      longest_ = next_time_;
      shortest_ = min(shortest_, __reduce_min_sync(~0u, tiles > 0 && time > 0 ? time : INT32_MAX));
    }
    tiles_ = time == time_ ? tiles : 0;
    tiles_end_ = tiles_;
    CUTE_UNROLL
    for (int i = 1; i < 32; i *= 2) {
      const int before = __shfl_up_sync(~0u, tiles_end_, i);
      if (lane >= i) tiles_end_ += before;
    }
    window_tiles_ = __shfl_sync(~0u, tiles_end_, 31);
  }

  const Params &params_;
  const RaggedGroups &ragged_;
  int groups_;
  bool sorted_;
  int tile_rows_;
  int time_ = INT32_MAX;  // of the tiles that this pass takes; the first pass only looks for the longest
  int longest_ = -1, shortest_ = INT32_MAX;           // of all tiles but empty ones, if sorted
  int next_time_ = -1;                                // the longest below, of the groups that this pass has seen
  int window_ = 0, window_begin_ = 0, window_tiles_;  // first group, number of its first tile, tiles
  int last_end_ = 0;                                  // of the window before
  bool have_ends_ = false;                            // of all groups, which are one window
  int begin_, end_, tiles_, tiles_end_;               // the lane's group; tiles_end_: with those of lower lanes
};

// The counter's next number, for all CTAs of the cluster, in the warp's first lane. `index`: how many came before.
template <class C>
CUTLASS_DEVICE int take_ticket(SharedStorage<C> &shared, const Counter &counter, int rank, int index) {
  if constexpr (C::Cluster == 1) return counter.take();
  const int slot = index % kTileRing, phase = index / kTileRing & 1;
  shared.ticket_full[slot].arrive_and_expect_tx(sizeof shared.tickets[slot]);
  if (rank == 0) {
    shared.ticket_empty[slot].wait(phase ^ 1);
    const uint32_t ticket = counter.take();
    for (int cta = 0; cta < C::Cluster; ++cta)
      store_shared_remote(ticket, cast_smem_ptr_to_uint(&shared.tickets[slot]),
                          cast_smem_ptr_to_uint(&shared.ticket_full[slot]), cta);
  }
  shared.ticket_full[slot].wait(phase);
  compiler_fence();
  const int ticket = int(shared.tickets[slot]);
  compiler_fence();
  shared.ticket_empty[slot].arrive(0u);
  return ticket;
}

template <class C, class Params, class Finder>
CUTLASS_DEVICE void schedule(const Params &params, SharedStorage<C> &shared, int rank, Finder &finder) {
  const bool leader = threadIdx.x % 32 == 0;
  const int clusters = gridDim.x / C::Cluster;
  const Counter counter(params.counter);
  int t = blockIdx.x / C::Cluster;
  int k_blocks = 0, group = -1;
  int ends = 0;  // each warpgroup gets its own
  for (int pos = 0; ends < 2; ++pos) {
    const int slot = pos % kTileRing;
    shared.tile_empty[slot].wait((pos / kTileRing & 1) ^ 1);
    if (pos > 0 && ends == 0 && finder.equal()) {
      t += clusters;
    } else if (pos > 0 && ends == 0) {
      if (leader) {
        if (pos == 1) {
          cutlass::arch::wait_on_dependent_grids();
          if (rank == 0) counter.open();
        }
        t = clusters + take_ticket(shared, counter, rank, pos - 1);
      }
      t = __shfl_sync(~0u, t, 0);
    }
    Tile tile{};
    if (ends > 0 || !finder.find(t, rank, tile)) {
      // Each cluster that had a first tile asks until it gets none: this is the last number that is asked for.
      if (ends == 0 && rank == 0 && leader && t == finder.total() + clusters - 1) counter.close();
      tile.group = -1;
      ++ends;
    } else if (!params.ragged.offs && tile.group != group) {
      group = tile.group;
      if (leader) prefetch_maps(params, group);
    }
    tile.k_blocks_before = k_blocks;
    k_blocks += tile.k_blocks();
    if (leader) {
      shared.tiles[slot] = tile;
      compiler_fence();
      shared.tile_full[slot].arrive();
    }
  }
}

}  // namespace gmm::sm90::descriptor_array
