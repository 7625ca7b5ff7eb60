// Compiles the tile kernels for each instruction set and picks those for the machine at hand, once.

#include "saib/tiles.h"

#include "instruction_set.h"

namespace iecl_fast::saib {

namespace portable {
constexpr const char* kName = "portable";
#include "saib/tiles_kernels.h"
}  // namespace portable

#if defined(__x86_64__)

IECL_AVX2
namespace avx2 {
constexpr const char* kName = "avx2";
#include "saib/tiles_kernels.h"
}  // namespace avx2
IECL_END_OF_TARGET

IECL_AVX512
#if !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")  // the compiler chooses the width here, and takes 256 by itself
#endif
namespace avx512 {
constexpr const char* kName = "avx512";
#include "saib/tiles_kernels.h"
}  // namespace avx512
IECL_END_OF_TARGET

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
