#include "kernels.h"

#include "device.h"

namespace {

template <int kThreads, bool kBarrier>
__global__ void __launch_bounds__(kThreads) sum_kernel(const float* __restrict__ values, int count, float* sum) {
  __shared__ float partial[kThreads / 32];
  float total = 0.0f;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) total += values[i];
  for (int offset = 16; offset > 0; offset /= 2) total += __shfl_down_sync(0xffffffffu, total, offset);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = total;
  if (kBarrier) __syncthreads();
  if (threadIdx.x == 0) {
    float all = 0.0f;
    for (int i = 0; i < kThreads / 32; ++i) all += partial[i];
    sum[blockIdx.x] = all;
  }
}

__global__ void reverse_static_kernel(const int* values, int count, int* out, int overrun) {
  __shared__ int buffer[64];
  buffer[threadIdx.x + overrun] = values[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = buffer[count - 1 - threadIdx.x];
}

__global__ void reverse_dynamic_kernel(const int* values, int count, int* out, int overrun) {
  IECL_DYNAMIC_SHARED(int, buffer);
  buffer[threadIdx.x + overrun] = values[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = buffer[count - 1 - threadIdx.x];
}

__global__ void shift_kernel(const int* values, int count, int* out, int offset) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = values[i + offset];
}

__global__ void divergent_kernel(bool early_exit) {
  if (threadIdx.x >= 16) {
    if (early_exit) return;
    __syncwarp(0xffff0000u);
  }
  if (threadIdx.x < 16) __syncthreads();
}

__global__ void two_barriers_kernel() {
  if (threadIdx.x == 3) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void uninitialised_kernel(float* out) {
  __shared__ float buffer[8];
  IECL_DYNAMIC_SHARED(float, more);
  out[threadIdx.x] = buffer[threadIdx.x] + more[threadIdx.x];
  buffer[threadIdx.x] = more[threadIdx.x] = 1.0f;  // is gone in the next block
}

__global__ void warp_staging_kernel(int* out, bool with_barrier) {
  __shared__ int buffer[32];
  for (int round = 0; round < 3; ++round) {
    buffer[threadIdx.x] = threadIdx.x + round;
    if (with_barrier) __syncwarp();
    out[threadIdx.x] = buffer[31 - threadIdx.x];
    if (with_barrier) __syncwarp();
  }
}

__global__ void wrong_mask_kernel(int fault) {
  const int lane = threadIdx.x;
  if (fault == 0) {
    __shfl_sync(0x0000ffffu, lane, 0);  // upper lanes are not in it
  } else if (fault == 1) {
    if (lane >= 8) return;
    __ballot_sync(0xffffffffu, 1);  // named lanes have exited
  } else if (fault == 2) {
    if (lane % 2) {
      __any_sync(0xffffffffu, 1);
    } else {
      __all_sync(0xffffffffu, 1);
    }
  } else {
    if (lane < 8) __shfl_sync(0x000000ffu, lane, 9);  // reads a lane that gives nothing
  }
}

__global__ void warp_results_kernel(const int* values, int* out) {
  const int lane = threadIdx.x, value = values[lane];
  out += lane * 12;
  out[0] = __ballot_sync(0xffffffffu, value > 0);
  out[1] = __any_sync(0xffffffffu, value == 5);
  out[2] = __all_sync(0xffffffffu, value > -100);
  out[3] = __reduce_add_sync(0xffffffffu, value);
  out[4] = __reduce_min_sync(0xffffffffu, value);
  out[5] = __reduce_max_sync(0xffffffffu, value);
  out[6] = __reduce_or_sync(0xffffffffu, unsigned(value));
  out[7] = __reduce_and_sync(0xffffffffu, unsigned(value));
  out[8] = __reduce_xor_sync(0xffffffffu, unsigned(value));
  out[9] = __match_any_sync(0xffffffffu, value);
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;  // two groups of lanes at the same time
  out[10] = __reduce_add_sync(half, value);
  out[11] = __popc(__ballot_sync(half, value > 0));
}

__global__ void shuffles_kernel(const float* values, int width, float* out) {
  const int lane = threadIdx.x;
  out[lane] = __shfl_sync(0xffffffffu, values[lane], 3, width);
  out[32 + lane] = __shfl_up_sync(0xffffffffu, values[lane], 2, width);
  out[64 + lane] = __shfl_down_sync(0xffffffffu, values[lane], 2, width);
  out[96 + lane] = __shfl_xor_sync(0xffffffffu, values[lane], 5, width);
}

__global__ void votes_kernel(const int* predicates, int* out) {
  const int predicate = predicates[threadIdx.x];
  out[threadIdx.x * 3] = __syncthreads_count(predicate);
  out[threadIdx.x * 3 + 1] = __syncthreads_and(predicate);
  out[threadIdx.x * 3 + 2] = __syncthreads_or(predicate);
}

__global__ void histogram_kernel(const int* values, int count, int* bins, int num_bins) {
  IECL_DYNAMIC_SHARED(int, local);
  for (int bin = threadIdx.x; bin < num_bins; bin += blockDim.x) local[bin] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    atomicAdd(&local[values[i]], 1);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < num_bins; bin += blockDim.x) atomicAdd(&bins[bin], local[bin]);
}

__global__ void order_kernel(int* out) { out[atomicAdd(&out[blockDim.x], 1)] = threadIdx.x; }

__global__ void indices_kernel(int* out) {
  const int block = blockIdx.y * gridDim.x + blockIdx.x, thread = threadIdx.y * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y + thread] = 1000 * block + thread;
}

__global__ void sixteen_bit_kernel(const __half* half, const __nv_bfloat16* bfloat16, float* out, __half* half_back,
                                   __nv_bfloat16* bfloat16_back) {
  const int i = threadIdx.x;
  out[i] = __half2float(half[i]) + __bfloat162float(bfloat16[i]);
  half_back[i] = __float2half_rn(out[i]);
  bfloat16_back[i] = __float2bfloat16_rn(out[i]);
}

}  // namespace

void block_sum(const float* values, int count, float* sum, int threads, int blocks) {
  if (threads == 64) IECL_LAUNCH((sum_kernel<64, true>), blocks, 64, 0, nullptr, values, count, sum);
  if (threads == 256) IECL_LAUNCH((sum_kernel<256, true>), blocks, 256, 0, nullptr, values, count, sum);
}
void block_sum_without_barrier(const float* values, int count, float* sum, int, int blocks) {
  IECL_LAUNCH((sum_kernel<64, false>), blocks, 64, 0, nullptr, values, count, sum);
}
void reverse(const int* values, int count, int* out, bool dynamic, int overrun) {
  if (dynamic) {
    IECL_LAUNCH(reverse_dynamic_kernel, 1, count, count * sizeof(int), nullptr, values, count, out, overrun);
  } else {
    IECL_LAUNCH(reverse_static_kernel, 1, count, 0, nullptr, values, count, out, overrun);
  }
}
void shift_global(const int* values, int count, int* out, int offset) {
  IECL_LAUNCH(shift_kernel, (count + 31) / 32, 32, 0, nullptr, values, count, out, offset);
}
void divergent_barrier(int threads, bool early_exit) {
  IECL_LAUNCH(divergent_kernel, 2, threads, 0, nullptr, early_exit);
}
void two_barriers() { simt::launch(1, 8, 0, nullptr, two_barriers_kernel); }
void uninitialised(float* out) { IECL_LAUNCH(uninitialised_kernel, 2, 8, 8 * sizeof(float), nullptr, out); }
void warp_staging(int* out, bool with_barrier) {
  IECL_LAUNCH(warp_staging_kernel, 1, 32, 0, nullptr, out, with_barrier);
}
void wrong_mask(int fault) { IECL_LAUNCH(wrong_mask_kernel, 1, 32, 0, nullptr, fault); }
void warp_results(const int* values, int* out) { IECL_LAUNCH(warp_results_kernel, 1, 32, 0, nullptr, values, out); }
void shuffles(const float* values, int width, float* out) {
  IECL_LAUNCH(shuffles_kernel, 1, 32, 0, nullptr, values, width, out);
}
void votes(const int* predicates, int threads, int* out) {
  IECL_LAUNCH(votes_kernel, 1, threads, 0, nullptr, predicates, out);
}
void histogram(const int* values, int count, int* bins, int num_bins) {
  IECL_LAUNCH(histogram_kernel, 3, 64, num_bins * sizeof(int), nullptr, values, count, bins, num_bins);
}
void order(int* out, int threads) { IECL_LAUNCH(order_kernel, 1, threads, 0, nullptr, out); }
void indices(int* out, unsigned grid_x, unsigned grid_y, unsigned block_x, unsigned block_y) {
  IECL_LAUNCH(indices_kernel, dim3(grid_x, grid_y), dim3(block_x, block_y), 0, nullptr, out);
}
void sixteen_bit(const uint16_t* half, const uint16_t* bfloat16, int count, float* out, uint16_t* half_back,
                 uint16_t* bfloat16_back) {
  IECL_LAUNCH(sixteen_bit_kernel, 1, count, 0, nullptr, reinterpret_cast<const __half*>(half),
              reinterpret_cast<const __nv_bfloat16*>(bfloat16), out, reinterpret_cast<__half*>(half_back),
              reinterpret_cast<__nv_bfloat16*>(bfloat16_back));
}
