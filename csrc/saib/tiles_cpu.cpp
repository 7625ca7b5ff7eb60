// Compiles the tile kernels for each instruction set and picks those for the machine at hand, once.

#include "saib/tiles.h"

#include "instruction_set.h"

namespace iecl_fast::saib {

namespace portable {
constexpr const char* kName = "portable";
#include "saib/tiles_kernels.h"
}  // namespace portable

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
constexpr const char* kName = "avx2";
#include "saib/tiles_kernels.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#define IECL_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#pragma clang attribute push(IECL_AVX512, apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#endif
namespace avx512 {
constexpr const char* kName = "avx512";
#include "saib/tiles_kernels.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

static const TileKernels& best_kernels() {
  return choose_kernels(avx512::kernels, avx2::kernels, portable::kernels);
}

#else
static const TileKernels& best_kernels() { return portable::kernels; }
#endif

const TileKernels& tile_kernels() {
  static const TileKernels& kernels = best_kernels();
  return kernels;
}

}  // namespace iecl_fast::saib
