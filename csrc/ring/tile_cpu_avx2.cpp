// Ring's tile kernels for x86-64 with AVX2.

#if defined(__x86_64__)

#include <immintrin.h>
#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "instruction_set.h"
#include "ring/tile.h"

// Only what stands below may use these instructions: the headers above are shared with code for every machine.
IECL_AVX2
#define IECL_LANES_AVX2

namespace iecl_fast::ring {
namespace {

#include "ring/lanes.h"
#include "ring/tile_kernels.h"

}  // namespace

extern const TileKernels kAvx2Kernels;
const TileKernels kAvx2Kernels = table("avx2");

}  // namespace iecl_fast::ring

IECL_END_OF_TARGET

#endif  // __x86_64__
