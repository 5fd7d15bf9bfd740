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

int choose_streams(const gmm_args &args) {
  constexpr double kManyTiles = 4096. * 128 * 128;
  int products = 0;
  bool fills = true;  // each product the GPU many times over
  for (int i = 0; i < args.num_groups; ++i) {
    if (!has_product(args, i)) continue;
    ++products;
    fills = fills && double(args.d[i].rows) * double(args.d[i].cols) >= kManyTiles;
  }
  return fills ? 1 : std::clamp(products, 1, max_streams());
}

}  // namespace gmm::cublas
