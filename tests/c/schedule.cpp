// The scheduler of the descriptor-array kernel on a CPU: random groups, clusters that ask in random order, and each
// element of D in exactly one tile.
#include "cutlass/sm90/descriptor_array/schedule.cuh"

#undef asm
#undef volatile

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

using namespace gmm::sm90::descriptor_array;

namespace {

template <bool TokensInK, int TileP_, int TileQ_, int Cluster_>
struct Config {
  static constexpr bool kTokensInK = TokensInK;
  static constexpr int TileP = TileP_, TileQ = TileQ_, Cluster = Cluster_;
};

struct Params {
  RaggedGroups ragged;
  int groups, tile_q, few_tokens, clusters_at_back;
  std::vector<GroupShape> shapes;
};

struct Case {
  std::vector<int> sizes;
  int m, n, k, clusters;
};

std::mt19937 generator(1);

int random(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }

// Marks the tile's part of D, in cells of a row (tokens in K: a column) and a tile of P; fails if it was marked.
template <class C>
class Marks {
 public:
  explicit Marks(const Case &c) : c_(c), p_tiles_(((C::kTokensInK ? c.m : c.n) + C::TileP - 1) / C::TileP) {
    int rows = 0;
    for (int size : c.sizes) rows += size;
    cells_.resize(size_t(p_tiles_) * (C::kTokensInK ? c.sizes.size() * c.n : rows));
  }

  void mark(const Tile &tile) {
    for (int q = tile.q; q < tile.q_end; ++q) {
      const int line = C::kTokensInK ? tile.group * c_.n + q : q;
      if (cells_.at(size_t(line) * p_tiles_ + tile.p / C::TileP)++) fail("in two tiles");
    }
  }

  void check() const {
    for (size_t i = 0; i < cells_.size(); ++i) {
      const bool has_product = !C::kTokensInK || c_.sizes[i / p_tiles_ / c_.n] > 0;
      if (has_product && !cells_[i]) fail("in no tile");
    }
  }

  void fail(const char *what) const {
    std::printf("an element is %s: m %d, n %d, k %d, %d clusters, tokens", what, c_.m, c_.n, c_.k, c_.clusters);
    for (int size : c_.sizes) std::printf(" %d", size);
    std::printf("\n");
    std::exit(1);
  }

 private:
  const Case &c_;
  const int p_tiles_;
  std::vector<char> cells_;
};

// A cluster's scheduler warps, one for each of its CTAs.
template <class C, class Finder>
struct Cluster {
  std::vector<Finder> lanes[C::Cluster];
  Tile tiles[C::Cluster];

  bool find(int index, int number) {
    bool found = false;
    for (int rank = 0; rank < C::Cluster; ++rank) {
      lanes::block.x = index * C::Cluster + rank;
      lanes::run([&] {
        Tile tile;
        const bool found_here = lanes[rank][lanes::thread.x].find(number, rank, tile);
        if (lanes::thread.x == 0) found = found_here, tiles[rank] = tile;
      });
    }
    return found;
  }
};

// Returns how many clusters took tiles from the back.
template <class C, class Finder, class Make>
int run(const Case &c, const Make &make) {
  lanes::grid.x = c.clusters * C::Cluster;
  Marks<C> marks(c);
  std::vector<Cluster<C, Finder>> clusters(c.clusters);
  std::vector<int> working;
  Taken taken{};
  const auto take = [&](int index, int number) {
    if (!clusters[index].find(index, number)) return false;
    for (const Tile &tile : clusters[index].tiles) marks.mark(tile);
    return true;
  };
  for (int i = 0; i < c.clusters; ++i) {
    for (int rank = 0; rank < C::Cluster; ++rank) {
      lanes::block.x = i * C::Cluster + rank;
      for (int lane = 0; lane < 32; ++lane) {
        lanes::thread.x = lane;
        clusters[i].lanes[rank].push_back(make());
      }
    }
    if (take(i, i)) working.push_back(i);
  }
  while (!working.empty()) {
    const int at = random(0, int(working.size()) - 1), index = working[at];
    const Finder &finder = clusters[index].lanes[0][0];
    const int number = next_number(finder, taken, c.clusters);
    ++(finder.at_back() ? taken.back : taken.front);
    if (!take(index, number)) working.erase(working.begin() + at);
  }
  marks.check();
  return clusters[0].lanes[0][0].clusters_at_back();
}

template <class C>
int run_ragged(const Case &c, int few_tokens) {
  std::vector<int> ends;
  for (int size : c.sizes) ends.push_back((ends.empty() ? 0 : ends.back()) + size);
  Params params{{ends.data(), 0, ends.back(), c.m, c.n, c.k}, int(ends.size()), 0, few_tokens, 0, {}};
  using Finder = RaggedFinder<C, Params>;
  return run<C, Finder>(c, [&] { return Finder(params, false); });
}

// As Batch::order_shapes() does.
template <class C>
int run_list(const Case &c) {
  Params params{};
  params.tile_q = C::TileQ;
  for (int i = 0, begin = 0; i < int(c.sizes.size()); begin += c.sizes[i++]) {
    params.shapes.push_back({C::kTokensInK ? c.m : c.sizes[i], c.n, C::kTokensInK ? c.sizes[i] : c.k, 0, begin});
  }
  int tiles = 0;
  for (GroupShape &shape : params.shapes) {
    const int size = C::kTokensInK ? shape.k : shape.m, p = ((C::kTokensInK ? c.m : c.n) + C::TileP - 1) / C::TileP;
    if (size > 0) tiles += cluster_tiles<C>(p, q_tiles_of<C>(C::kTokensInK ? c.n : size, params.tile_q));
    shape.tiles_end = tiles;
  }
  params.groups = int(params.shapes.size());
  params.clusters_at_back = tiles >= c.clusters ? random(0, c.clusters / 2) : 0;
  using Finder = ListFinder<C, Params>;
  return run<C, Finder>(c, [&] { return Finder(params); });
}

Case random_case() {
  Case c{{}, random(1, 700), random(1, 700), random(0, 3) ? 64 : 8192, random(1, 9)};
  const int groups = random(0, 3) ? random(1, 32) : random(33, 100);
  const double skew = random(0, 2) * .8;
  for (int i = 0; i < groups; ++i) c.sizes.push_back(random(0, 3) ? int(1500 / std::pow(random(1, groups), skew)) : 0);
  return c;
}

}  // namespace

int main() {
  using Rows = Config<false, 128, 192, 2>;
  using FewRows = Config<false, 64, 128, 1>;
  using Tokens = Config<true, 128, 192, 2>;
  int cases = 0, from_back = 0;
  for (; cases < 40; ++cases) {
    Case c = random_case();
    from_back += run_ragged<Rows>(c, kFewRows) > 0;
    run_ragged<FewRows>(c, kFewRows);
    from_back += run_ragged<Tokens>(c, 192) > 0;
    run_list<Rows>(c);
    run_list<Tokens>(c);
  }
  std::printf("%d cases, %d of them from both ends\n", cases, from_back);
  return from_back > cases / 4 ? 0 : 1;
}
