#include "core/error.h"

#include <cstdio>

namespace gmm {

std::string format(const char *fmt, ...) {
  char buffer[1024];  // longer texts are cut
  va_list list;
  va_start(list, fmt);
  std::vsnprintf(buffer, sizeof buffer, fmt, list);
  va_end(list);
  return buffer;
}

}  // namespace gmm
