// Host contract of SAIB on the CPU: the pieces between the matrix products, which are torch's own. float32.
//
// Features lie as (images, height, width, channels), so that every 1x1 convolution is a plain product. "Channels are the
// batch": one image of the size R x p*p, a channel for each member of the batch. Else an image for each member of the
// batch, of the size H/p x W/p, with C*p*p channels.
//
// The 3x3 convolutions are products in the Winograd domain, F(2x2, 3x3) of Lavin and Gray, "Fast Algorithms for
// Convolutional Neural Networks": a tile of 2x2 results takes 16 multiplications a channel instead of 36.
//     V = B^T d B of 4x4 features d, U = G g G^T of the weights g, Y = A^T (sum over channels of U V) A.
// The gradient of the features is such a convolution, too; that of U is V (A dY A^T)^T. One of the four rows of the 4x4
// domain is done at a time ("frequency"), so that what lies in memory at once is a quarter. All results are independent
// of the number of threads.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace iecl_fast::saib {

// Images (batch, channels, height, width) in patches; strides in elements.
struct Patches {
  int64_t batch, channels, height, width;
  int64_t stride_n, stride_c, stride_y, stride_x;
  int64_t size;  // a patch is size x size
  bool channels_are_batch;

  int64_t offset(int64_t n, int64_t c, int64_t y, int64_t x) const {
    return n * stride_n + c * stride_c + y * stride_y + x * stride_x;
  }
  int64_t rows() const { return height / size; }
  int64_t columns() const { return width / size; }
  // A band is a row of patches: of one channel in all images, or of all channels in one image.
  int64_t bands() const { return (channels_are_batch ? channels : batch) * rows(); }
  // Positions of the features in a band, and the features' channels.
  int64_t band_positions() const { return channels_are_batch ? columns() * size * size : columns(); }
  int64_t feature_channels() const { return channels_are_batch ? batch : channels * size * size; }
};

// patchify(image) + position of the bands begin .. end - 1: (batch, positions) if channels are the batch, else
// (positions, feature channels). position: (R, size * size), or nullptr.
void gather_cpu(const Patches& patches, const float* image, const float* position, int64_t begin, int64_t end,
                float* features, ParallelFor parallel);

// result = 2 * image + unpatchify(features + position) of these bands. of_result: the patches with the result's strides.
void scatter_cpu(const Patches& patches, const float* image, const float* position, const float* features,
                 int64_t begin, int64_t end, const Patches& of_result, float* result, ParallelFor parallel);

struct Grid {
  int64_t images, height, width, channels;

  int64_t tile_columns() const { return (width + 1) / 2; }
  int64_t tile_rows() const { return (height + 1) / 2; }  // of one image
};

// Tiles of the rows begin .. end - 1 of tiles, those of all images counted through: (4, tiles, channels), one row of the
// 4x4 domain.
//   tiles_of_features     features (grid) -> V
//   add_to_results        U V -> results (grid): added up over the frequencies 0, 1, 2, 3, in this order. The first of
//                         them write, the last of them apply ReLU if asked to.
//   tiles_of_gradients    gradients of the results (grid) -> those of U V
void tiles_of_features_cpu(const Grid& grid, const float* features, int frequency, int64_t begin, int64_t end,
                           float* tiles, ParallelFor parallel);
void add_to_results_cpu(const Grid& grid, const float* tiles, int frequency, int64_t begin, int64_t end, bool relu,
                        float* results, ParallelFor parallel);
void tiles_of_gradients_cpu(const Grid& grid, const float* gradients, int frequency, int64_t begin, int64_t end,
                            float* tiles, ParallelFor parallel);

}  // namespace iecl_fast::saib
