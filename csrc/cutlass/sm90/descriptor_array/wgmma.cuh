// wgmma of 64 x N x 16 for N in steps of 16, both operands in shared memory, fp32 accumulators. CuTe has them too, in a
// header that takes half a minute to compile.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <type_traits>

namespace gmm::sm90::descriptor_array {

// Eight accumulators as operands, and their names in the instruction.
#define GMM_F8(i)                                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define GMM_D16 GMM_F8(0)
#define GMM_R16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define GMM_D32 GMM_D16, GMM_F8(8)
#define GMM_R32 GMM_R16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define GMM_D48 GMM_D32, GMM_F8(16)
#define GMM_R48 GMM_R32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define GMM_D64 GMM_D48, GMM_F8(24)
#define GMM_R64 GMM_R48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define GMM_D80 GMM_D64, GMM_F8(32)
#define GMM_R80 GMM_R64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define GMM_D96 GMM_D80, GMM_F8(40)
#define GMM_R96 GMM_R80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define GMM_D112 GMM_D96, GMM_F8(48)
#define GMM_R112 GMM_R96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define GMM_D128 GMM_D112, GMM_F8(56)
#define GMM_R128 GMM_R112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define GMM_D144 GMM_D128, GMM_F8(64)
#define GMM_R144 GMM_R128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define GMM_D160 GMM_D144, GMM_F8(72)
#define GMM_R160 GMM_R144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define GMM_D176 GMM_D160, GMM_F8(80)
#define GMM_R176 GMM_R160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define GMM_D192 GMM_D176, GMM_F8(88)
#define GMM_R192 GMM_R176 ", %88, %89, %90, %91, %92, %93, %94, %95"

// The other operands follow the accumulators: the two descriptors, whether to add, and which of P and Q are contiguous
// along their own dimension instead of K.
#define GMM_WGMMA(N, TYPE, P, Q, ADD, P_MN, Q_MN)                                            \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD                                   \
               ", 0;\n"                                                                      \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" GMM_R##N \
               "}, " P ", " Q ", add, 1, 1, " P_MN ", " Q_MN ";\n}\n"                        \
               : GMM_D##N                                                                    \
               : "l"(p), "l"(q), "n"(kAdd), "n"(kPMajorMn), "n"(kQMajorMn))
#define GMM_WGMMA_OF(N, P, Q, ADD, P_MN, Q_MN)                                                                        \
  if constexpr (N == kN && std::is_same_v<Element, cutlass::bfloat16_t>) GMM_WGMMA(N, "bf16", P, Q, ADD, P_MN, Q_MN); \
  if constexpr (N == kN && std::is_same_v<Element, cutlass::half_t>) GMM_WGMMA(N, "f16", P, Q, ADD, P_MN, Q_MN)

// d = p @ q (+ d if kAdd), of the blocks that the shared-memory descriptors p (64 x 16) and q (16 x kN) point to.
template <class Element, bool kPMajorMn, bool kQMajorMn, bool kAdd, int kN>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], uint64_t p, uint64_t q) {
  static_assert(kN % 16 == 0 && kN >= 16 && kN <= 192);
  GMM_WGMMA_OF(16, "%8", "%9", "%10", "%11", "%12");
  GMM_WGMMA_OF(32, "%16", "%17", "%18", "%19", "%20");
  GMM_WGMMA_OF(48, "%24", "%25", "%26", "%27", "%28");
  GMM_WGMMA_OF(64, "%32", "%33", "%34", "%35", "%36");
  GMM_WGMMA_OF(80, "%40", "%41", "%42", "%43", "%44");
  GMM_WGMMA_OF(96, "%48", "%49", "%50", "%51", "%52");
  GMM_WGMMA_OF(112, "%56", "%57", "%58", "%59", "%60");
  GMM_WGMMA_OF(128, "%64", "%65", "%66", "%67", "%68");
  GMM_WGMMA_OF(144, "%72", "%73", "%74", "%75", "%76");
  GMM_WGMMA_OF(160, "%80", "%81", "%82", "%83", "%84");
  GMM_WGMMA_OF(176, "%88", "%89", "%90", "%91", "%92");
  GMM_WGMMA_OF(192, "%96", "%97", "%98", "%99", "%100");
}

#undef GMM_F8
#undef GMM_D16
#undef GMM_R16
#undef GMM_D32
#undef GMM_R32
#undef GMM_D48
#undef GMM_R48
#undef GMM_D64
#undef GMM_R64
#undef GMM_D80
#undef GMM_R80
#undef GMM_D96
#undef GMM_R96
#undef GMM_D112
#undef GMM_R112
#undef GMM_D128
#undef GMM_R128
#undef GMM_D144
#undef GMM_R144
#undef GMM_D160
#undef GMM_R160
#undef GMM_D176
#undef GMM_R176
#undef GMM_D192
#undef GMM_R192
#undef GMM_WGMMA
#undef GMM_WGMMA_OF

}  // namespace gmm::sm90::descriptor_array
