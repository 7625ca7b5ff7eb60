// Picks the tile kernels for the machine at hand, once.

#include <algorithm>

#include "instruction_set.h"
#include "ring/ring.h"
#include "ring/tile.h"

namespace iecl_fast::ring {

extern const TileKernels kPortableKernels;

#if defined(__x86_64__)
extern const TileKernels kAvx512Kernels;
extern const TileKernels kAvx2Kernels;

static const TileKernels& best_kernels() {
  return choose_kernels(kAvx512Kernels, kAvx2Kernels, kPortableKernels);
}
#else
static const TileKernels& best_kernels() { return kPortableKernels; }
#endif

Limits::Limits(const Window& window) {
  const auto nearest = [](int64_t order) {
    // Beyond the finite keys there are only NaN patterns.
    return similarity_of(static_cast<int32_t>(std::clamp<int64_t>(order, -0x7f800000, 0x7f800000)));
  };
  const Place places[4] = {window.lower, window.inner_lower, window.inner_upper, window.upper};
  for (int i = 0; i < 4; ++i) {
    key[i] = places[i].key;
    index[i] = places[i].index;
    from[i] = nearest(key[i]);
    before[i] = nearest(int64_t{key[i]} + 1);
  }
}

const TileKernels& tile_kernels() {
  static const TileKernels& kernels = best_kernels();
  return kernels;
}

const char* instruction_set() { return tile_kernels().name; }

}  // namespace iecl_fast::ring
