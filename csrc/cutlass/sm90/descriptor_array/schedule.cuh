// The scheduler warp: finds a CTA's tiles.
//
// A cluster's first tile is its own number; for each other one it asks the launch's counter (counter.cuh). The groups
// come in order of the time that one of their tiles takes, the longest first, so that the clusters end together, and
// those that share operands in L2 are at the same place of K. In the list form the host has sorted them, in the ragged
// forms the warp makes one pass over the groups for each time that occurs.
//
// A tile with few tokens takes as long as its memory traffic, and all of those at the end would leave the tensor cores
// idle, as memory was before. So some clusters begin at the back, with the shortest, and go on until they meet the
// others.
#pragma once

#include "cutlass/sm90/descriptor_array/config.cuh"
#include "cutlass/sm90/descriptor_array/counter.cuh"
#include "cutlass/sm90/descriptor_array/ends.cuh"

namespace gmm::sm90::descriptor_array {

constexpr int kBandTiles = 12;
constexpr int kLongK = 8192;  // tokens in rows: a tile reads more of an operand than the L2 keeps for its neighbours
constexpr int kMaxSortedGroups = 1024;  // a pass over more would take longer than a tile

// a / b, a >= 0, b > 0. The first tile waits for a chain of these, and a signed division takes longer.
CUTLASS_DEVICE int divide(int a, int b) { return unsigned(a) / unsigned(b); }

CUTLASS_DEVICE int ceil_divide(int a, int b) { return divide(a + b - 1, b); }

// One group, and which of its tiles.
struct Place {
  int group;
  int begin, end;  // tokens: rows of the map of D, or with tokens in K, of A and B
  int q_tiles;     // of the group
  int tile;
};

template <class C>
CUTLASS_DEVICE int cluster_tiles(int p_tiles, int q_tiles) {
  return q_tiles * (p_tiles / C::Cluster) + (p_tiles % C::Cluster * q_tiles + C::Cluster - 1) / C::Cluster;
}

// Tiles along Q for `size` rows, or with tokens in K, columns.
template <class C>
CUTLASS_DEVICE int q_tiles_of(int size, int tile_q) {
  return C::kTokensInK ? ceil_divide((size + 63) / 64, tile_q / 64) : ceil_divide(size, tile_q);
}

// Cuts `size` columns into tiles of 192 and then of 128: no column is computed in vain.
CUTLASS_DEVICE void cut_columns(int size, int tiles, int index, int &begin, int &end) {
  const int wide = max((size + 63) / 64 - 2 * tiles, 0);
  const auto start = [&](int i) { return min((2 * i + min(i, wide)) * 64, size); };
  begin = start(index);
  end = index < tiles ? start(index + 1) : size;
}

// `size` rows in tiles as equal as units of 16 rows allow, the longer ones first: full tiles and a short one would cost
// up to 6 %.
struct RowCut {
  int size, tiles, each, longer;  // units of a tile at least, and how many tiles have one more

  CUTLASS_DEVICE RowCut(int size, int tiles) : size(size), tiles(tiles) {
    const int units = (size + 15) / 16;
    each = divide(units, tiles);
    longer = units - each * tiles;
  }
  CUTLASS_DEVICE int start(int index) const {
    index = min(index, tiles);
    return min((index * each + min(index, longer)) * 16, size);
  }
};

template <class C>
CUTLASS_DEVICE Tile cut_tile(const Place &place, int m, int n, int k, int rank) {
  const int size = place.end - place.begin, q_tiles = place.q_tiles;
  const int p_tiles = ((C::kTokensInK ? m : n) + C::TileP - 1) / C::TileP;
  const int pairs = p_tiles / C::Cluster;  // p tiles are taken Cluster at a time
  const RowCut cut(size, q_tiles);
  int i = place.tile, p, q;
  Tile tile{};
  if (i < q_tiles * pairs) {
    // Bands of q: the tiles that run at the same time are about as high as wide, so that they share both operands in
    // L2. Along a long K, too, if they keep pace: there no band has tiles of both lengths.
    int first = 0, count = q_tiles;
    if (!C::kTokensInK && k >= kLongK) {
      if (i < cut.longer * pairs)
        count = cut.longer;
      else
        first = cut.longer, count -= cut.longer, i -= cut.longer * pairs;
    }
    if (count > kBandTiles) {
      const int bands = (count + kBandTiles - 1) / kBandTiles, band_tiles = ceil_divide(count, bands);
      const int band = divide(i, band_tiles * pairs);
      i -= band * band_tiles * pairs;
      first += band * band_tiles;
      count = min(band_tiles, count - band * band_tiles);
    }
    const int column = divide(i, count);
    q = first + i - column * count;
    p = column * C::Cluster + rank;
    tile.shares_q = 1;
  } else {  // a last p tile without a neighbour: the CTAs take two q tiles of it and share P
    q = (i - q_tiles * pairs) * C::Cluster + rank;
    p = p_tiles - 1;
    tile.shares_q = 0;
  }
  tile.p = p * C::TileP;
  tile.group = place.group;
  if constexpr (C::kTokensInK) {
    cut_columns(n, q_tiles, q, tile.q, tile.q_end);
    tile.k = place.begin;
    tile.k_end = place.end;
  } else {
    tile.q = place.begin + cut.start(q);
    tile.q_end = place.begin + cut.start(q + 1);
    tile.k_end = k;
  }
  return tile;
}

// The list form: sizes and numbers of tiles are in the parameters.
template <class C, class Params>
class ListFinder {
 public:
  CUTLASS_DEVICE explicit ListFinder(const Params &params)
      : params_(params), at_back_(int(blockIdx.x) / C::Cluster < params.clusters_at_back) {}

  // How many clusters take tiles from the back, and whether this one does.
  CUTLASS_DEVICE int clusters_at_back() const { return params_.clusters_at_back; }
  CUTLASS_DEVICE bool at_back() const { return at_back_; }

  // Tile number `t` from its end, which clusters_at_back() precede at the front; none if it is negative. Called by a
  // whole warp, with rising t.
  CUTLASS_DEVICE bool find(int t, int rank, Tile &tile) {
    if (t < 0) return false;
    const int lane = threadIdx.x % 32;
    const int number = at_back_ ? total() - 1 - t : t - params_.clusters_at_back;
    if (at_back_) window_ = 0;
    for (;; window_ += 32) {
      if (window_ >= params_.groups) return false;
      const int g = window_ + lane;
      const uint32_t after = __ballot_sync(~0u, g < params_.groups && params_.shapes[g].tiles_end > number);
      if (!after) continue;
      const int group = window_ + __ffs(after) - 1;
      const GroupShape &shape = params_.shapes[group];
      const int begin = C::kTokensInK ? 0 : shape.row_d, size = C::kTokensInK ? shape.k : shape.m;
      const int q_tiles = q_tiles_of<C>(C::kTokensInK ? shape.n : size, params_.tile_q);
      const Place place{group, begin, begin + size, q_tiles,
                        number - (group ? params_.shapes[group - 1].tiles_end : 0)};
      tile = cut_tile<C>(place, shape.m, shape.n, shape.k, rank);
      return true;
    }
  }

  CUTLASS_DEVICE int total() const { return params_.shapes[params_.groups - 1].tiles_end; }

 private:
  const Params &params_;
  const bool at_back_;
  int window_ = 0;  // the first group to look at
};

// The ragged forms. A lane holds one of a window of 32 groups; passes over the windows find out the extent of a tile,
// the time of the longest tile and which part of the work has few tokens, and then the tiles of each time. Whatever
// stands before the first tile delays every call, and an instruction that runs once costs most in being fetched: so the
// code is short, and has one place for all passes.
template <class C, class Params>
class RaggedFinder {
 public:
  CUTLASS_DEVICE RaggedFinder(const Params &params, bool rehearses)
      : params_(params),
        ragged_(params.ragged),
        sorted_(C::Cluster > 1 && params.groups <= kMaxSortedGroups),
        ends_(params, rehearses) {
    if (rehearses) ends_.prefetch();
  }

  CUTLASS_DEVICE int clusters_at_back() const { return clusters_at_back_; }
  CUTLASS_DEVICE bool at_back() const { return at_back_; }

  // As in the list form.
  CUTLASS_DEVICE bool find(int t, int rank, Tile &tile) {
    while (pass_ != kTake || t >= window_begin_ + window_tiles_)
      if (!next_window()) return false;
    if (t < 0) return false;
    const int in_window = at_back_ ? window_begin_ + window_tiles_ - 1 - t : t - window_begin_;
    const int lane = __ffs(__ballot_sync(~0u, tiles_end_ > in_window)) - 1;
    const Place place{window_ + lane, __shfl_sync(~0u, ends_.begin, lane), __shfl_sync(~0u, ends_.end, lane),
                      __shfl_sync(~0u, q_tiles_, lane), in_window - __shfl_sync(~0u, tiles_end_ - tiles_, lane)};
    tile = cut_tile<C>(place, ragged_.m, ragged_.n, ragged_.k, rank);
    return true;
  }

  // All tiles: where some are taken from the back, from the first on, else once find() has returned false.
  CUTLASS_DEVICE int total() const { return clusters_at_back_ ? total_ : window_begin_; }

 private:
  enum Pass { kSurvey, kCount, kTake };  // kCount: all tiles, where that has to be known

  CUTLASS_DEVICE bool next_window() {
    window_begin_ += window_tiles_;
    window_tiles_ = 0;
    window_ += at_back_ ? -32 : 32;
    if (unsigned(window_) >= unsigned(params_.groups)) {
      if (!next_pass()) return false;
      window_ = at_back_ ? (params_.groups - 1) / 32 * 32 : 0;
    }
    if (params_.groups > 32 || !have_ends_) ends_.load(window_);
    have_ends_ = true;
    if (pass_ == kSurvey)
      survey();
    else
      count_tiles();
    if (pass_ == kCount) {
      total_ += window_tiles_;
      window_tiles_ = 0;
    }
    return true;
  }

  CUTLASS_DEVICE bool next_pass() {
    const int clusters = gridDim.x / C::Cluster;
    if (pass_ == kTake) {
      if (next_time_ == kNoTime) return false;
      time_ = next_time_;
    } else {
      const bool surveyed = pass_ == kSurvey;
      if (surveyed) {
        choose_tile();
        if (sorted_) clusters_at_back_ = choose_clusters_at_back(clusters, float(few_work_), float(work_));
        if (C::kTokensInK) total_ = surveyed_ * tiles_in_k(tile_q_);
      }
      if (surveyed && clusters_at_back_ && !C::kTokensInK) {
        pass_ = kCount;
      } else {
        pass_ = kTake;
        if (total_ < clusters) clusters_at_back_ = 0;
        at_back_ = int(blockIdx.x) / C::Cluster < clusters_at_back_;
        window_begin_ = at_back_ ? 0 : clusters_at_back_;
        time_ = !sorted_ || at_back_ ? 0 : C::kTokensInK ? next_time_ : tile_q_ / 16;
      }
    }
    next_time_ = kNoTime;
    return true;
  }

  // Tokens in rows: a lane counts the row tiles of all groups for a choice of kMinRows + 16 * lane rows a tile. A last
  // lane counts the rows, in units of 16.
  static constexpr int kMinRows = C::TileQ / 2, kChoices = (C::TileQ - kMinRows) / 16 + 1, kOverheadRows = 20;

  CUTLASS_DEVICE void survey() {
    const int lane = threadIdx.x % 32, size = window_ + lane < params_.groups ? ends_.end - ends_.begin : 0;
    const unsigned work = size > 0 ? size + kTileOverhead : 0;
    work_ += __reduce_add_sync(~0u, work);
    few_work_ += __reduce_add_sync(~0u, size <= params_.few_tokens ? work : 0u);
    if constexpr (C::kTokensInK) {
      surveyed_ += __popc(__ballot_sync(~0u, size > 0));  // groups with tokens
      next_time_ = max(next_time_, __reduce_max_sync(~0u, time_in_k(size)));
    } else if constexpr (C::Cluster > 1) {
      CUTE_UNROLL
      for (int i = 0; i <= kChoices; ++i) {
        const int rows = i < kChoices ? kMinRows + i * 16 : 16;
        const int sum = __reduce_add_sync(~0u, (size + rows - 1) / rows);
        if (lane == i) surveyed_ += sum;
      }
    }
  }

  CUTLASS_DEVICE void choose_tile() {
    if constexpr (C::kTokensInK)
      tile_q_ = choose_tile_columns();
    else if constexpr (C::Cluster > 1)
      tile_q_ = choose_tile_rows();
  }

  // Minimises (rounds) x (mean time of a tile). A tile's time grows with its rows, plus about 20 rows' worth for
  // filling the pipeline and the epilogue (measured on an H200).
  CUTLASS_DEVICE int choose_tile_rows() const {
    const int lane = threadIdx.x % 32;
    const float rows = float(__shfl_sync(~0u, surveyed_, kChoices)) * 16, row_tiles = float(surveyed_);
    const float rounds = row_tiles * __fdividef(float((ragged_.n + C::TileP - 1) / C::TileP), float(gridDim.x));
    const float estimate = (rows + row_tiles * kOverheadRows) * __fdividef(ceilf(rounds), rounds);
    // Of equal estimates the most rows; positive numbers compare as their bits do.
    const unsigned least = __reduce_min_sync(~0u, lane < kChoices ? __float_as_uint(estimate) : ~0u);
    const unsigned best = __ballot_sync(~0u, lane < kChoices && __float_as_uint(estimate) == least);
    return kMinRows + (31 - __clz(best)) * 16;
  }

  // Tokens in K: cluster tiles of a group.
  CUTLASS_DEVICE int tiles_in_k(int tile_q) const {
    return cluster_tiles<C>((ragged_.m + C::TileP - 1) / C::TileP, q_tiles_of<C>(ragged_.n, tile_q));
  }

  // Tokens in K: the columns of a tile at most. Where the groups with tokens have few tiles, those of 128 columns may
  // spread over the clusters more evenly; they take as long as 160 of the wide ones (L2 traffic; measured on an H200).
  CUTLASS_DEVICE int choose_tile_columns() const {
    const int clusters = gridDim.x / C::Cluster, wide = surveyed_ * tiles_in_k(192);
    if (wide > 4 * clusters) return 192;
    const int narrow = surveyed_ * tiles_in_k(128);
    return ceil_divide(narrow, clusters) * 160 < ceil_divide(wide, clusters) * (192 + 32) ? 128 : 192;
  }

  // Tokens in K: a measure of time, rising with the blocks, equal for those that differ by less than 1/8.
  CUTLASS_DEVICE static int time_in_k(int size) {
    const int blocks = (size + kBlockK - 1) / kBlockK, shift = max(28 - __clz(blocks), 0);
    return shift * 8 + (blocks >> shift);
  }

  // The tiles of the lane's group in this pass, and of the lanes before.
  CUTLASS_DEVICE void count_tiles() {
    const int size = ends_.end - ends_.begin, lane = threadIdx.x % 32;
    int time = 0, tiles = 0;
    if (window_ + lane < params_.groups && size > 0 && (C::kTokensInK || ragged_.k > 0)) {
      if constexpr (C::kTokensInK) {
        q_tiles_ = q_tiles_of<C>(ragged_.n, tile_q_);
        tiles = tiles_in_k(tile_q_);
        time = time_in_k(size);
      } else {
        q_tiles_ = q_tiles_of<C>(size, tile_q_);
        tiles = cluster_tiles<C>((ragged_.n + C::TileP - 1) / C::TileP, q_tiles_);
        time = ceil_divide((size + 15) / 16, q_tiles_);
      }
    }
    if (!sorted_) time = 0;
    if (at_back_) time = -time;
    next_time_ = max(next_time_, __reduce_max_sync(~0u, tiles > 0 && time < time_ ? time : kNoTime));
    tiles_ = pass_ == kCount || time == time_ ? tiles : 0;
    tiles_end_ = tiles_;
    CUTE_NO_UNROLL
    for (int i = 1; i < 32; i *= 2) {
      const int before = __shfl_up_sync(~0u, tiles_end_, i);
      if (lane >= i) tiles_end_ += before;
    }
    window_tiles_ = __shfl_sync(~0u, tiles_end_, 31);
  }

  const Params &params_;
  const RaggedGroups &ragged_;
  const bool sorted_;                             // the groups come in order of their times; else all count as 0
  Pass pass_ = C::Cluster > 1 ? kSurvey : kTake;  // narrow tiles have one extent
  int tile_q_ = C::TileQ;
  int surveyed_ = 0;
  unsigned work_ = 0, few_work_ = 0;  // tokens and what their tiles cost besides; of groups with few alone
  int clusters_at_back_ = 0, total_ = 0;
  bool at_back_ = false;
  static constexpr int kNoTime = INT32_MIN;
  int time_ = 0;                                            // of the tiles that this pass takes; at the back, negative
  int next_time_ = kNoTime;                                 // the greatest below, of the groups this pass has seen
  int window_ = -32, window_begin_ = 0, window_tiles_ = 0;  // first group, number of its first tile, tiles
  Ends<Params> ends_;
  bool have_ends_ = false;
  int q_tiles_ = 0;                // of the lane's group, along Q
  int tiles_ = 0, tiles_end_ = 0;  // its tiles in this pass; and with those of lower lanes
};

// The number of the tile that a cluster gets for asking after those; -1 where the front and the back have met.
template <class Finder>
CUTLASS_DEVICE int next_number(const Finder &finder, const Taken &before, int clusters) {
  if (finder.clusters_at_back() && clusters + before.front + before.back >= finder.total()) return -1;
  return finder.at_back() ? finder.clusters_at_back() + before.back : clusters + before.front;
}

// The number of the cluster's next tile, for all its CTAs, in the warp's first lane. `index`: how many it had before;
// `asked`: how often clusters had asked before, for its first CTA.
template <class C, class Finder>
CUTLASS_DEVICE int take_ticket(SharedStorage<C> &shared, const Counter &counter, const Finder &finder, int rank,
                               int index, int &asked) {
  const auto take = [&] {
    const Taken before = counter.take(finder.at_back());
    asked = before.front + before.back;
    return next_number(finder, before, gridDim.x / C::Cluster);
  };
  if constexpr (C::Cluster == 1) return take();
  const int slot = index % kTileRing, phase = index / kTileRing & 1;
  shared.ticket_full[slot].arrive_and_expect_tx(sizeof shared.tickets[slot]);
  if (rank == 0) {
    shared.ticket_empty[slot].wait(phase ^ 1);
    const uint32_t ticket = take();
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

// Until the first tile is found, this touches no barrier: meanwhile they are set up, in all CTAs of the cluster. A
// rehearsal ends there.
template <class C, class Params, class Finder>
CUTLASS_DEVICE void schedule(const Params &params, SharedStorage<C> &shared, int rank, Finder &finder, bool rehearses) {
  const bool leader = threadIdx.x % 32 == 0;
  Counter counter(params.counter);
  int t = blockIdx.x / C::Cluster, asked = -1;
  int k_blocks = 0, group = -1;
  int ends = 0;  // each warpgroup gets its own
  int ahead = kTilesAhead;
  for (int pos = 0; ends < 2; ++pos) {
    const int slot = pos % kTileRing, before = pos - ahead;  // which its readers have taken up in order
    if (before >= 0) shared.tile_empty[before % kTileRing].wait(before / kTileRing & 1);
    if (pos > 0 && ends == 0) {
      if (leader) {
        if (pos == 1) {
          cutlass::arch::wait_on_dependent_grids();
          if (rank == 0) counter.open(blockIdx.x == 0);
        }
        t = take_ticket(shared, counter, finder, rank, pos - 1, asked);
      }
      t = __shfl_sync(~0u, t, 0);
    }
    Tile tile{};
    if (ends > 0 || !finder.find(t, rank, tile)) {
      // Each cluster that had a first tile asks until it gets none: this is the last number that is asked for.
      if (pos > 0 && ends == 0 && rank == 0 && leader && asked == finder.total() - 1) counter.close();
      tile.group = -1;
      ++ends;
    } else if (!params.ragged.offs && tile.group != group) {
      group = tile.group;
      if (leader) prefetch_maps(params, group);
    }
    if (pos == 0) cluster_wait();
    if (rehearses) return;
    ahead = tile.k_blocks() <= kShortBlocks ? kTileRing : kTilesAhead;
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
