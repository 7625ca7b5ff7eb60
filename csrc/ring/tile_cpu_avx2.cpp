// Ring's tile kernels for x86-64 with AVX2.

#if defined(__x86_64__)

#include <immintrin.h>
#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "ring/tile.h"

// Only what stands below may use these instructions: the headers above are shared with code for every machine.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define IECL_LANES_AVX2

namespace iecl_fast::ring {
namespace {

#include "ring/lanes.h"
#include "ring/tile_kernels.h"

}  // namespace

extern const TileKernels kAvx2Kernels;
const TileKernels kAvx2Kernels = {
    "avx2",     kGroup,       from_float16, from_bfloat16, pack_keys,          pack_queries, copy_rows,
    similarities, split,        mask,         filter,        maximum,            exponentials, weighted_sum,
    list_exponentials,          list_weighted_sums,          group_weighted_sum, scatter,      order_keys,
    select,       places_near,
};

}  // namespace iecl_fast::ring

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__
