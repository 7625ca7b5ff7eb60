// The pieces of SAIB on tensors, for library.cpp: checks, results, pointers for the kernels.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "saib/saib.h"
#include "tensors.h"

namespace iecl_fast::saib {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check_floats(const Tensor& tensor, int64_t dimensions, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == ScalarType::Float && tensor.dim() == dimensions, name,
                  " has to be float32 on the CPU, of ", dimensions, " dimensions");
}

inline const float* floats(const Tensor& tensor, int64_t count, const char* name) {
  check_floats(tensor, tensor.dim(), name);
  STD_TORCH_CHECK(tensor.is_contiguous() && tensor.numel() == count, name, " has the wrong layout or size");
  return static_cast<const float*>(tensor.const_data_ptr());
}

inline Patches patches_of(const Tensor& image, int64_t size, bool channels_are_batch, int64_t begin, int64_t end) {
  check_floats(image, 4, "image");
  const Patches patches{image.size(0),   image.size(1),   image.size(2),   image.size(3), image.stride(0),
                        image.stride(1), image.stride(2), image.stride(3), size,          channels_are_batch};
  STD_TORCH_CHECK(size > 0 && patches.height % size == 0 && patches.width % size == 0, "no whole number of patches");
  STD_TORCH_CHECK(0 <= begin && begin <= end && end <= patches.bands(), "no such bands");
  return patches;
}

inline const float* position_of(const std::optional<Tensor>& position, const Patches& patches) {
  if (!position.has_value()) return nullptr;
  return floats(*position, patches.channels * patches.height * patches.width, "position");
}

// A product's operand: its values whichever of the two dimensions comes first in memory.
inline Tensor gather(const Tensor& image, const std::optional<Tensor>& position, int64_t size, bool channels_are_batch,
                     int64_t begin, int64_t end, ParallelFor parallel) {
  const Patches patches = patches_of(image, size, channels_are_batch, begin, end);
  const int64_t positions = (end - begin) * patches.band_positions(), channels = patches.feature_channels();
  Tensor features = channels_are_batch ? torch::stable::new_empty(image, {channels, positions})
                                       : torch::stable::new_empty(image, {positions, channels});
  gather_cpu(patches, static_cast<const float*>(image.const_data_ptr()), position_of(position, patches), begin, end,
             data<float>(features), parallel);
  return features;
}

inline void scatter(const Tensor& image, const std::optional<Tensor>& position, const Tensor& features, int64_t size,
                    bool channels_are_batch, int64_t begin, int64_t end, Tensor& result, ParallelFor parallel) {
  const Patches patches = patches_of(image, size, channels_are_batch, begin, end);
  const Patches of_result = patches_of(result, size, channels_are_batch, begin, end);
  STD_TORCH_CHECK(of_result.batch == patches.batch && of_result.channels == patches.channels &&
                      of_result.height == patches.height && of_result.width == patches.width,
                  "result has another shape than image");
  const int64_t count = (end - begin) * patches.band_positions() * patches.feature_channels();
  scatter_cpu(patches, static_cast<const float*>(image.const_data_ptr()), position_of(position, patches),
              floats(features, count, "features"), begin, end, of_result, data<float>(result), parallel);
}

inline Grid grid_of(const Tensor& features, int64_t frequency, int64_t begin, int64_t end) {
  check_floats(features, 4, "features");
  STD_TORCH_CHECK(features.is_contiguous(), "features have to be contiguous");
  const Grid grid{features.size(0), features.size(1), features.size(2), features.size(3)};
  STD_TORCH_CHECK(0 <= frequency && frequency < 4, "no such frequency");
  STD_TORCH_CHECK(0 <= begin && begin <= end && end <= grid.images * grid.tile_rows(), "no such rows of tiles");
  return grid;
}

inline int64_t tile_floats(const Grid& grid, int64_t begin, int64_t end) {
  return 4 * (end - begin) * grid.tile_columns() * grid.channels;
}

// Forwards(grid, pixels, frequency, begin, end, tiles)
template <class Forwards>
void tiles_of(const Tensor& pixels, int64_t frequency, int64_t begin, int64_t end, Tensor& tiles, const Forwards& run) {
  const Grid grid = grid_of(pixels, frequency, begin, end);
  floats(tiles, tile_floats(grid, begin, end), "tiles");
  run(grid, static_cast<const float*>(pixels.const_data_ptr()), int(frequency), begin, end, data<float>(tiles));
}

inline void add_tiles(const Tensor& tiles, int64_t frequency, int64_t begin, int64_t end, bool relu, Tensor& results,
                      ParallelFor parallel) {
  const Grid grid = grid_of(results, frequency, begin, end);
  add_to_results_cpu(grid, floats(tiles, tile_floats(grid, begin, end), "tiles"), int(frequency), begin, end, relu,
                     data<float>(results), parallel);
}

}  // namespace iecl_fast::saib
