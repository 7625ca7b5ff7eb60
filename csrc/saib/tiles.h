// The vectorised pieces of the Winograd transforms: what is done to the channels of one tile.
//
// The same source (tiles_kernels.h) is compiled once per instruction set; tile_kernels() picks one when first asked.
#pragma once

#include <cstdint>

namespace iecl_fast::saib {

struct TileKernels {
  const char* name;

  // One row of B^T d B: e[s] = first[s] + sign * second[s] at the tile's four columns, tiles[k] = (B^T e)[k].
  void (*features)(const float* const* first, const float* const* second, float sign, int64_t channels,
                   float* const* tiles);
  // One row of A d A^T: e[s] = first_sign * first[s] + second_sign * second[s] at two columns, tiles[k] = (A e)[k].
  void (*gradients)(const float* const* first, const float* const* second, float first_sign, float second_sign,
                    int64_t channels, float* const* tiles);
  // results[s] = sign * (A^T tiles)[s] (+ results[s]) at two columns, negative ones replaced by 0 if asked to.
  void (*results)(const float* const* tiles, float sign, bool add, bool relu, int64_t channels, float* const* results);
};

const TileKernels& tile_kernels();

}  // namespace iecl_fast::saib
