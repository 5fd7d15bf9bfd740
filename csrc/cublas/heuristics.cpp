#include "cublas/heuristics.h"

#include <algorithm>
#include <cstdlib>

#include "core/error.h"
#include "core/groups.h"

namespace gmm::cublas {
namespace {

constexpr int kDefaultStreams = 4;
constexpr int kMaxStreams = 16;

// Read once: the pool of streams is sized by it.
int max_streams() {
  static const int streams = [] {
    const char *text = std::getenv("GMM_CUBLAS_STREAMS");
    if (!text || !*text) return kDefaultStreams;
    char *end = nullptr;
    const long value = std::strtol(text, &end, 10);
    GMM_CHECK(*end == '\0' && value >= 1 && value <= kMaxStreams,
              "GMM_CUBLAS_STREAMS: expected a whole number from 1 to %d, got '%s'", kMaxStreams, text);
    return int(value);
  }();
  return streams;
}

}  // namespace

size_t workspace_bytes_per_stream(int sm) { return size_t(sm >= 90 ? 32 : 4) << 20; }

bool accepts(const gmm_args &args, int sm, std::string *why) {
  if (args.ab_dtype == GMM_BF16 && sm < 80) {
    if (why) *why = format("bf16 needs sm80 or newer, the device is sm%d", sm);
    return false;
  }
  return true;
}

int choose_streams(const gmm_args &args, int sm_count) {
  int products = 0;
  double tiles = 0;
  for (int i = 0; i < args.num_groups; ++i) {
    if (!has_product(args, i)) continue;
    const gmm_matrix &d = args.d[i];
    ++products;
    tiles += double((d.rows + 127) / 128) * double((d.cols + 255) / 256);  // cuBLAS's usual large tile on Hopper
  }
  if (products == 0) return 1;
  // A product that nearly fills the GPU by itself only loses L2 to its neighbours when they run side by side.
  if (tiles / products >= 0.7 * sm_count) return 1;
  return std::min(max_streams(), products);
}

}  // namespace gmm::cublas
