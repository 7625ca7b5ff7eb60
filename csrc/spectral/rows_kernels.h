// Definitions of RowKernels for one instruction set. Included inside a namespace and under a target pragma, with kLanes
// (floats in a vector register) defined; see rows_cpu.cpp.

typedef float Floats __attribute__((vector_size(kLanes * 4)));

inline Floats load(const float* from) {
  Floats vector;
  __builtin_memcpy(&vector, from, sizeof vector);
  return vector;
}
inline void store(float* to, Floats vector) { __builtin_memcpy(to, &vector, sizeof vector); }
inline Floats floats(float value) { return value - Floats{}; }

#include "half.h"

// Rounds to nearest, ties to even. Below the normal numbers the addition of 0.5 rounds at the right bit.
void to_float16(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t raw;
    __builtin_memcpy(&raw, from + i, sizeof raw);
    const uint32_t sign = raw >> 16 & 0x8000, magnitude = raw & 0x7fffffff;
    float small;
    __builtin_memcpy(&small, &magnitude, sizeof small);
    small += 0.5f;
    uint32_t subnormal;
    __builtin_memcpy(&subnormal, &small, sizeof subnormal);
    const uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    to[i] = sign | (magnitude >= 0x47800000 ? special : magnitude < 0x38800000 ? subnormal - 0x3f000000 : normal);
  }
}

void to_bfloat16(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t raw;
    __builtin_memcpy(&raw, from + i, sizeof raw);
    const uint32_t rounded = (raw + 0x7fff + (raw >> 16 & 1)) >> 16;
    to[i] = (raw & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
  }
}

// In pairs: one after another, the last additions would cost most of the product's accuracy.
inline float sum_of_lanes(Floats vector) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) vector[lane] += vector[lane + half];
  }
  return vector[0];
}

template <int kRows, class Product>
inline void dots_block(const float* rows, int64_t columns, const float* vector, Product* products) {
  Floats sums[kRows][2] = {};
  int64_t c = 0;
  for (; c + 2 * kLanes <= columns; c += 2 * kLanes) {
    const Floats first = load(vector + c), second = load(vector + c + kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      sums[r][0] += load(rows + r * columns + c) * first;
      sums[r][1] += load(rows + r * columns + c + kLanes) * second;
    }
  }
  const int64_t whole = c + kLanes <= columns ? c + kLanes : c;
  for (int r = 0; r < kRows; ++r) {
    if (c < whole) sums[r][0] += load(rows + r * columns + c) * load(vector + c);
    double product = sum_of_lanes(sums[r][0] + sums[r][1]);
    for (int64_t i = whole; i < columns; ++i) product += double(rows[r * columns + i]) * vector[i];
    products[r] = product;
  }
}

void dots(const float* rows, int64_t count, int64_t columns, const float* vector, float* products) {
  int64_t r = 0;
  for (; r + 4 <= count; r += 4) dots_block<4>(rows + r * columns, columns, vector, products + r);
  for (; r < count; ++r) dots_block<1>(rows + r * columns, columns, vector, products + r);
}

template <int kRows>
inline void accumulate_block(const float* rows, int64_t columns, const float* factors, int64_t ahead, float* sum) {
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    Floats part = {};
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      __builtin_prefetch(rows + r * columns + c + ahead);
      part += floats(factors[r]) * load(rows + r * columns + c);
    }
    store(sum + c, load(sum + c) + part);
  }
  for (; c < columns; ++c) {
    float part = factors[0] * rows[c];
    for (int r = 1; r < kRows; ++r) part += factors[r] * rows[r * columns + c];
    sum[c] += part;
  }
}

double inner_product(const float* first, int64_t count, const float* second) {
  double product;
  dots_block<1>(first, count, second, &product);
  return product;
}

void accumulate(const float* rows, int64_t count, int64_t columns, const float* factors, float* sum) {
  int64_t r = 0;
  for (; r + 4 <= count; r += 4) accumulate_block<4>(rows + r * columns, columns, factors + r, count * columns, sum);
  for (; r < count; ++r) accumulate_block<1>(rows + r * columns, columns, factors + r, count * columns, sum);
}

void divide(const float* from, int64_t count, float divisor, float* to) {
  int64_t i = 0;
  while (i < count && reinterpret_cast<uintptr_t>(to + i) % sizeof(Floats) != 0) {
    to[i] = from[i] / divisor;
    ++i;
  }
  for (; i + kLanes <= count; i += kLanes) stream(to + i, load(from + i) / floats(divisor));
  for (; i < count; ++i) to[i] = from[i] / divisor;
  finish_streams();
}

void subtract_outer(const float* from, int64_t count, int64_t columns, const float* factors, double factor,
                    const float* vector, float divisor, float* to) {
  for (int64_t r = 0; r < count; ++r, from += columns, to += columns) {
    const float weight = factors[r] * factor;
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) {
      store(to + c, (load(from + c) - floats(weight) * load(vector + c)) / floats(divisor));
    }
    for (; c < columns; ++c) to[c] = (from[c] - weight * vector[c]) / divisor;
  }
}

const RowKernels kernels = {kName, from_float16,  from_bfloat16, to_float16, to_bfloat16,
                            dots,  inner_product, accumulate,    divide,     subtract_outer};
