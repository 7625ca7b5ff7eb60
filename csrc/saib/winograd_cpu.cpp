// The Winograd transforms on the CPU. Bound by memory, that is by the caches: over the four frequencies the features'
// transform reads 2 and writes 4 floats for each of them, that of the results reads 4 and updates 1.5 for each of theirs.

#include <array>
#include <memory>
#include <vector>

#include "saib/saib.h"
#include "saib/tiles.h"

namespace iecl_fast::saib {
namespace {

// Row `frequency` of B^T (two of the tile's four rows) and of A (the tile's two rows).
struct Pair {
  int first, second;
  float sign;
};
constexpr Pair kFeatureRows[4] = {{0, 2, -1.0f}, {1, 2, 1.0f}, {2, 1, -1.0f}, {1, 3, -1.0f}};
constexpr float kResultSigns[4][2] = {{1.0f, 0.0f}, {1.0f, 1.0f}, {1.0f, -1.0f}, {0.0f, -1.0f}};

// A row of pixels; those that do not exist are zeros.
template <class Element>
class Pixels {
 public:
  Pixels(const Grid& grid, Element* features, int64_t image, int64_t y, Element* outside)
      : row_(y < 0 || y >= grid.height ? nullptr
                                       : features + (image * grid.height + y) * grid.width * grid.channels),
        width_(grid.width),
        channels_(grid.channels),
        outside_(outside) {}
  Element* operator[](int64_t x) const {
    return row_ == nullptr || x < 0 || x >= width_ ? outside_ : row_ + x * channels_;
  }

 private:
  Element* row_;
  int64_t width_, channels_;
  Element* outside_;
};

// A row of tiles in (4, tiles, channels).
template <class Element>
class TileRow {
 public:
  TileRow(const Grid& grid, Element* tiles, int64_t begin, int64_t end, int64_t row)
      : data_(tiles + (row - begin) * grid.tile_columns() * grid.channels),
        plane_((end - begin) * grid.tile_columns() * grid.channels),
        channels_(grid.channels) {}
  std::array<Element*, 4> operator[](int64_t column) const {
    Element* at = data_ + column * channels_;
    return {at, at + plane_, at + 2 * plane_, at + 3 * plane_};
  }

 private:
  Element* data_;
  int64_t plane_, channels_;
};

}  // namespace

void tiles_of_features_cpu(const Grid& grid, const float* features, int frequency, int64_t begin, int64_t end,
                           float* tiles, ParallelFor parallel) {
  const std::vector<float> zeros(grid.channels);
  const Pair rows = kFeatureRows[frequency];
  parallel(end - begin, [&](int64_t task) {
    const int64_t row = begin + task, image = row / grid.tile_rows(), y = row % grid.tile_rows() * 2 - 1;
    const Pixels<const float> first(grid, features, image, y + rows.first, zeros.data());
    const Pixels<const float> second(grid, features, image, y + rows.second, zeros.data());
    const TileRow<float> to(grid, tiles, begin, end, row);
    for (int64_t column = 0; column < grid.tile_columns(); ++column) {
      const int64_t x = 2 * column - 1;
      const float* const a[] = {first[x], first[x + 1], first[x + 2], first[x + 3]};
      const float* const b[] = {second[x], second[x + 1], second[x + 2], second[x + 3]};
      tile_kernels().features(a, b, rows.sign, grid.channels, to[column].data());
    }
  });
}

void add_to_results_cpu(const Grid& grid, const float* tiles, int frequency, int64_t begin, int64_t end, bool relu,
                        float* results, ParallelFor parallel) {
  parallel(end - begin, [&](int64_t task) {
    const int64_t row = begin + task, image = row / grid.tile_rows();
    const std::unique_ptr<float[]> unused(new float[grid.channels]());
    const TileRow<const float> from(grid, tiles, begin, end, row);
    for (int half = 0; half < 2; ++half) {
      const int64_t y = row % grid.tile_rows() * 2 + half;
      const float sign = kResultSigns[frequency][half];
      if (sign == 0.0f || y >= grid.height) continue;
      const bool add = frequency > half, last = frequency == 2 + half;
      const Pixels<float> to(grid, results, image, y, unused.get());
      for (int64_t column = 0; column < grid.tile_columns(); ++column) {
        float* const pixels[] = {to[2 * column], to[2 * column + 1]};
        tile_kernels().results(from[column].data(), sign, add, relu && last, grid.channels, pixels);
      }
    }
  });
}

void tiles_of_gradients_cpu(const Grid& grid, const float* gradients, int frequency, int64_t begin, int64_t end,
                            float* tiles, ParallelFor parallel) {
  const std::vector<float> zeros(grid.channels);
  const float* signs = kResultSigns[frequency];
  parallel(end - begin, [&](int64_t task) {
    const int64_t row = begin + task, image = row / grid.tile_rows(), y = row % grid.tile_rows() * 2;
    const Pixels<const float> first(grid, gradients, image, y, zeros.data());
    const Pixels<const float> second(grid, gradients, image, y + 1, zeros.data());
    const TileRow<float> to(grid, tiles, begin, end, row);
    for (int64_t column = 0; column < grid.tile_columns(); ++column) {
      const float* const a[] = {first[2 * column], first[2 * column + 1]};
      const float* const b[] = {second[2 * column], second[2 * column + 1]};
      tile_kernels().gradients(a, b, signs[0], signs[1], grid.channels, to[column].data());
    }
  });
}

}  // namespace iecl_fast::saib
