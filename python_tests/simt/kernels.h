// Sound and faulty kernels that the tests of csrc/simt launch.
#pragma once

#include <cstdint>

void block_sum(const float* values, int count, float* sum, int threads, int blocks);
void block_sum_without_barrier(const float* values, int count, float* sum, int threads, int blocks);
void reverse(const int* values, int count, int* out, bool dynamic, int overrun);
void shift_global(const int* values, int count, int* out, int offset);
void divergent_barrier(int threads, bool early_exit);
void two_barriers();
void uninitialised(float* out);
void warp_staging(int* out, bool with_barrier);
void wrong_mask(int fault);
void warp_results(const int* values, int* out);
void shuffles(const float* values, int width, float* out);
void votes(const int* predicates, int threads, int* out);
void histogram(const int* values, int count, int* bins, int num_bins);
void order(int* out, int threads);
void indices(int* out, unsigned grid_x, unsigned grid_y, unsigned block_x, unsigned block_y);
void sixteen_bit(const uint16_t* half, const uint16_t* bfloat16, int count, float* out, uint16_t* half_back,
                 uint16_t* bfloat16_back);
