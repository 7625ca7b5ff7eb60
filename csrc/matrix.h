// A dense matrix as the kernels see it: a pointer, a type, sizes and strides. No torch.
#pragma once

#include <cstdint>

namespace iecl_fast {

enum class Dtype { kFloat32, kFloat16, kBFloat16 };

struct Matrix {
  const void* data;
  Dtype dtype;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;     // in elements
  int64_t column_stride;  // in elements
};

}  // namespace iecl_fast
