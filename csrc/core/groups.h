// Questions about the groups of a call that every backend asks.
#pragma once

#include "gmm/gmm.h"

namespace gmm {

// Whether group i has something to multiply: M, N and K > 0. The others are core/fill.h's.
inline bool has_product(const gmm_args &args, int i) {
  return args.d[i].rows > 0 && args.d[i].cols > 0 && args.a[i].cols > 0;
}

}  // namespace gmm
