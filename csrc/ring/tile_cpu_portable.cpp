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
const TileKernels kPortableKernels = {
    "portable",     kGroup,       from_float16, from_bfloat16, pack_keys,          pack_queries, copy_rows,
    similarities, split,        mask,         filter,        maximum,            exponentials, weighted_sum,
    list_exponentials,          list_weighted_sums,          group_weighted_sum, scatter,      order_keys,
    select,       places_near,
};

}  // namespace iecl_fast::ring

