// Between images and features on the CPU. Bound by memory: each number is read once and written once.

#include "saib/saib.h"

namespace iecl_fast::saib {
namespace {

// Calls run(n, c, y, x, position's offset, feature's offset) for each row of pixels of each patch, with the place of the
// first of them, in a task's part of the bands begin .. end - 1.
template <class Run>
void for_rows_of_patches(const Patches& patches, int64_t begin, int64_t end, int64_t task, const Run& run) {
  const int64_t p = patches.size, area = p * p, columns = patches.columns(), rows = patches.rows();
  if (patches.channels_are_batch) {
    // A task is a band of one image.
    const int64_t n = task / (end - begin), band = begin + task % (end - begin), c = band / rows, row = band % rows;
    for (int64_t column = 0, place = 0; column < columns; ++column) {
      for (int64_t i = 0; i < p; ++i, place += p) {
        run(n, c, row * p + i, column * p, band * columns * area + place, task * columns * area + place);
      }
    }
    return;
  }
  // A task is a band: a row of patches of one image.
  const int64_t n = (begin + task) / rows, row = (begin + task) % rows;
  int64_t feature = task * columns * patches.channels * area;
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t c = 0; c < patches.channels; ++c) {
      const int64_t place = ((c * rows + row) * columns + column) * area;
      for (int64_t i = 0; i < p; ++i, feature += p) run(n, c, row * p + i, column * p, place + i * p, feature);
    }
  }
}

int64_t task_count(const Patches& patches, int64_t begin, int64_t end) {
  return (end - begin) * (patches.channels_are_batch ? patches.batch : 1);
}

// kSize: of the patches, 0 where it is not known when this is compiled.
template <int64_t kSize>
void gather(const Patches& patches, const float* image, const float* position, int64_t begin, int64_t end,
            float* features, ParallelFor parallel) {
  const int64_t size = kSize == 0 ? patches.size : kSize, step = kSize == 0 ? patches.stride_x : 1;
  parallel(task_count(patches, begin, end), [&](int64_t task) {
    const auto run = [&](int64_t n, int64_t c, int64_t y, int64_t x, int64_t place, int64_t feature) {
      const float* from = image + patches.offset(n, c, y, x);
      float* to = features + feature;
      if (position == nullptr) {
        for (int64_t j = 0; j < size; ++j) to[j] = from[j * step];
      } else {
        for (int64_t j = 0; j < size; ++j) to[j] = from[j * step] + position[place + j];
      }
    };
    for_rows_of_patches(patches, begin, end, task, run);
  });
}

template <int64_t kSize>
void scatter(const Patches& patches, const float* image, const float* position, const float* features, int64_t begin,
             int64_t end, const Patches& of_result, float* result, ParallelFor parallel) {
  const int64_t size = kSize == 0 ? patches.size : kSize, step = kSize == 0 ? patches.stride_x : 1;
  const int64_t result_step = kSize == 0 ? of_result.stride_x : 1;
  parallel(task_count(patches, begin, end), [&](int64_t task) {
    const auto run = [&](int64_t n, int64_t c, int64_t y, int64_t x, int64_t place, int64_t feature) {
      const float *from = image + patches.offset(n, c, y, x), *branch = features + feature;
      float* to = result + of_result.offset(n, c, y, x);
      if (position == nullptr) {
        for (int64_t j = 0; j < size; ++j) to[j * result_step] = 2.0f * from[j * step] + branch[j];
      } else {
        for (int64_t j = 0; j < size; ++j) {
          const float pixel = from[j * step];
          to[j * result_step] = pixel + ((pixel + position[place + j]) + branch[j]);
        }
      }
    };
    for_rows_of_patches(patches, begin, end, task, run);
  });
}

}  // namespace

void gather_cpu(const Patches& patches, const float* image, const float* position, int64_t begin, int64_t end,
                float* features, ParallelFor parallel) {
  const auto run = [&](const auto& function) { function(patches, image, position, begin, end, features, parallel); };
  if (patches.stride_x != 1) return run(gather<0>);
  if (patches.size == 4) return run(gather<4>);
  if (patches.size == 16) return run(gather<16>);
  run(gather<0>);
}

void scatter_cpu(const Patches& patches, const float* image, const float* position, const float* features,
                 int64_t begin, int64_t end, const Patches& of_result, float* result, ParallelFor parallel) {
  const auto run = [&](const auto& function) {
    function(patches, image, position, features, begin, end, of_result, result, parallel);
  };
  if (patches.stride_x != 1 || of_result.stride_x != 1) return run(scatter<0>);
  if (patches.size == 4) return run(scatter<4>);
  if (patches.size == 16) return run(scatter<16>);
  run(scatter<0>);
}

}  // namespace iecl_fast::saib
