// Picks the tile kernels for the machine at hand, once.
//
// IECL_FAST_ISA = avx512, avx2 or portable asks for a lesser set than the machine has (for tests and comparisons).

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "ring/ring.h"
#include "ring/tile.h"

namespace iecl_fast::ring {

extern const TileKernels kPortableKernels;

#if defined(__x86_64__)
extern const TileKernels kAvx512Kernels;
extern const TileKernels kAvx2Kernels;

static const TileKernels& best_kernels() {
  const char* wanted = std::getenv("IECL_FAST_ISA");
  const auto allows = [wanted](const TileKernels& kernels) {
    return wanted == nullptr || std::strcmp(wanted, kernels.name) == 0;
  };
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && allows(kAvx512Kernels)) return kAvx512Kernels;
  if (avx2 && allows(kAvx2Kernels)) return kAvx2Kernels;
  return kPortableKernels;
}
#else
static const TileKernels& best_kernels() { return kPortableKernels; }
#endif

Limits::Limits(const Window& window) {
  const auto similarity_of = [](int64_t order) {
    // Beyond the finite keys there are only NaN patterns.
    const auto bounded = static_cast<int32_t>(std::clamp<int64_t>(order, -0x7f800000, 0x7f800000));
    const int32_t raw = bounded ^ (bounded >> 31 & 0x7fffffff);
    float similarity;
    std::memcpy(&similarity, &raw, sizeof raw);
    return similarity;
  };
  const Place places[4] = {window.lower, window.inner_lower, window.inner_upper, window.upper};
  for (int i = 0; i < 4; ++i) {
    key[i] = places[i].key;
    index[i] = places[i].index;
    from[i] = similarity_of(key[i]);
    before[i] = similarity_of(int64_t{key[i]} + 1);
  }
}

const TileKernels& tile_kernels() {
  static const TileKernels& kernels = best_kernels();
  return kernels;
}

const char* instruction_set() { return tile_kernels().name; }

}  // namespace iecl_fast::ring
