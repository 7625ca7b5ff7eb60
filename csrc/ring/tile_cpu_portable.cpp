// Ring's tile kernels for any machine: 128-bit vectors, which every compiler maps to what it has (SSE2, NEON, ...).

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "ring/tile.h"

namespace iecl_fast::ring {
namespace {

#include "ring/lanes.h"
#include "ring/tile_kernels.h"

}  // namespace

extern const TileKernels kPortableKernels;
const TileKernels kPortableKernels = table("portable");

}  // namespace iecl_fast::ring
