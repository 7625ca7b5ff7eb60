// The order of a row's keys, and sums over a block: what every Ring kernel is made of.
//
// Ranks ascend by (order key, key index), as one 64-bit integer where both are needed. A boundary is such a place: of
// rank r it is the place of the key that has rank r, so r keys lie below it.
#pragma once

#include <cstdint>

#include "device.h"
#include "ring/gpu.h"

namespace iecl_fast::ring::gpu {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

constexpr int32_t kLowestKey = INT32_MIN;
constexpr int32_t kHighestKey = INT32_MAX;  // of NaN

// Ascends with the similarity, -0 being 0 and NaN of either sign the highest.
__device__ __forceinline__ int32_t order_key(float similarity) {
  const int32_t bits = __float_as_int(similarity + 0.0f);
  const int32_t key = bits ^ ((bits >> 31) & 0x7fffffff);
  return similarity != similarity ? kHighestKey : key;
}

__device__ __forceinline__ int64_t place(int32_t key, uint32_t index) {
  return int64_t(uint64_t(uint32_t(key)) << 32 | index);
}

// The key that is no candidate for a row, or kNoKey.
__device__ __forceinline__ uint32_t excluded_key(const int64_t* exclude, int64_t row) {
  return exclude != nullptr && exclude[row] >= 0 ? uint32_t(exclude[row]) : kNoKey;
}

// The sum of `value` over the threads before this one. `of_warps` holds kWarps values; a barrier has to follow before
// it is used again. `total` becomes the sum over all threads.
template <class T>
__device__ __forceinline__ T sum_before(T value, T* of_warps, T& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T sum = value;
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  T before = 0;
  total = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i == warp) before = total;
    total += of_warps[i];
  }
  return before + sum - value;
}

}  // namespace iecl_fast::ring::gpu
