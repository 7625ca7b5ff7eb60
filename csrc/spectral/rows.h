// The vectorised pieces of spectral normalisation on a CPU: what is done to a few rows of a weight.
//
// The same source (rows_kernels.h) is compiled once per instruction set; row_kernels() picks one when first asked.
#pragma once

#include <cstdint>

namespace iecl_fast::spectral {

struct RowKernels {
  const char* name;
  void (*from_float16)(const uint16_t* from, int64_t count, float* to);
  void (*from_bfloat16)(const uint16_t* from, int64_t count, float* to);
  void (*to_float16)(const float* from, int64_t count, uint16_t* to);
  void (*to_bfloat16)(const float* from, int64_t count, uint16_t* to);

  // products[i] = rows[i] . vector
  void (*dots)(const float* rows, int64_t count, int64_t columns, const float* vector, float* products);
  // first . second, not rounded to float: what is taken from it may be nearly as large.
  double (*inner_product)(const float* first, int64_t count, const float* second);
  // sum += sum over i of factors[i] * rows[i]
  void (*accumulate)(const float* rows, int64_t count, int64_t columns, const float* factors, float* sum);
  // to = from / divisor. Written past the caches: nobody reads it soon enough to find it there.
  void (*divide)(const float* from, int64_t count, float divisor, float* to);
  // to[i] = (from[i] - factors[i] * vector) / divisor, factors being multiplied by `factor` first
  void (*subtract_outer)(const float* from, int64_t count, int64_t columns, const float* factors, double factor,
                         const float* vector, float divisor, float* to);
};

const RowKernels& row_kernels();

}  // namespace iecl_fast::spectral
