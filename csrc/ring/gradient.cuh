// Gradients of gathered similarities: s[n, m] = query[n] . keys[indices[n, m]].
//
//   query_gradient   partial sums over m of gradient[n, m] * key, by 8 warps for each of a row's splits
//   add_parts        their sum
//   keys_gradient    for each key the sum over the places where it was gathered
//
// Every sum has a fixed order: the same bits in every run. No atomics.
//
// Bytes: query gradient 12 N M (gradient, indices), and N M C keys, gathered from L2 if they fit; operations: 2 N M C.
// Keys gradient: 16 N M (sorted indices, order), 4 N M gathered, N M C of queries from L1 and L2, 4 K C written.
// Floor: bytes over the bandwidth, N M C over that of L2.
#pragma once

#include <cstdint>

#include "device.h"
#include "floats.cuh"
#include "matrix.h"
#include "ring/order.cuh"

namespace iecl_fast::ring::gpu {

constexpr int kGradientThreads = 256;
constexpr int kGradientWarps = kGradientThreads / 32;
constexpr int kLaneChannels = 4;
constexpr int kWarpChannels = 32 * kLaneChannels;
constexpr int64_t kSplitSamples = 1024;  // of a block

// Rows of a matrix, four channels at a time for each lane.
template <class T>
struct Rows {
  const T* data;
  int64_t row_stride, channel_stride, channels;
  bool in_vectors;  // four neighbours lie side by side, aligned

  __device__ __forceinline__ explicit Rows(const Matrix& matrix)
      : data(static_cast<const T*>(matrix.data)), row_stride(matrix.row_stride),
        channel_stride(matrix.column_stride), channels(matrix.columns) {
    in_vectors = channel_stride == 1 && row_stride % 4 == 0 &&
                 reinterpret_cast<uintptr_t>(data) % (4 * sizeof(T)) == 0;
  }

  __device__ __forceinline__ void load(int64_t row, int64_t channel, float (&values)[kLaneChannels]) const {
    const T* from = data + row * row_stride;
    if (in_vectors && channel + kLaneChannels <= channels) {
      if constexpr (sizeof(T) == 4) {
        const float4 loaded = *reinterpret_cast<const float4*>(from + channel);
        values[0] = loaded.x, values[1] = loaded.y, values[2] = loaded.z, values[3] = loaded.w;
      } else {
        alignas(8) T loaded[kLaneChannels];
        *reinterpret_cast<uint2*>(loaded) = *reinterpret_cast<const uint2*>(from + channel);
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) values[i] = to_float(loaded[i]);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      values[i] = channel + i < channels ? to_float(from[(channel + i) * channel_stride]) : 0.0f;
    }
  }
};

// Adds gradient * row for count pairs, which pair(i, gradient, row) names, in ascending order.
template <class T, class Pair>
__device__ __forceinline__ void weighted_sum(const Rows<T>& rows, int64_t channel, int64_t begin, int64_t end,
                                             int64_t step, const Pair& pair, float (&sum)[kLaneChannels]) {
  constexpr int kAhead = 4;
  for (; begin < end; begin += kAhead * step) {
    float weights[kAhead], values[kAhead][kLaneChannels];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (begin + a * step >= end) continue;
      int64_t row;
      pair(begin + a * step, weights[a], row);
      rows.load(row, channel, values[a]);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (begin + a * step >= end) continue;
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) sum[i] += weights[a] * values[a][i];
    }
  }
}

// The sum over the block's warps, in their order, to `to` by the first warp.
__device__ __forceinline__ void add_warps(float (&of_warps)[kGradientWarps][kWarpChannels],
                                          const float (&sum)[kLaneChannels], int64_t channel, int64_t channels,
                                          float* to) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) of_warps[warp][lane * kLaneChannels + i] = sum[i];
  __syncthreads();
  if (warp == 0) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      float total = 0.0f;
      for (int w = 0; w < kGradientWarps; ++w) total += of_warps[w][lane * kLaneChannels + i];
      if (channel + i < channels) to[channel + i] = total;
    }
  }
  __syncthreads();
}

// parts: (rows, splits, C). A block for each of them and each kWarpChannels channels.
template <class T>
__global__ void __launch_bounds__(kGradientThreads) query_gradient_kernel(const float* gradient, const int64_t* indices,
                                                                          int64_t samples, int64_t splits,
                                                                          const Matrix keys, float* parts) {
  __shared__ float of_warps[kGradientWarps][kWarpChannels];
  const int64_t slices = (keys.columns + kWarpChannels - 1) / kWarpChannels;
  const int64_t part = blockIdx.x / slices, row = part / splits, split = part % splits;
  const int64_t channel = blockIdx.x % slices * kWarpChannels + threadIdx.x % 32 * kLaneChannels;
  const int64_t begin = split * kSplitSamples, end = min(begin + kSplitSamples, samples);
  const float* weights = gradient + row * samples;
  const int64_t* gathered = indices + row * samples;
  float sum[kLaneChannels] = {};
  weighted_sum(Rows<T>(keys), channel, begin + threadIdx.x / 32, end, kGradientWarps,
               [&](int64_t i, float& weight, int64_t& key) { weight = weights[i], key = gathered[i]; }, sum);
  add_warps(of_warps, sum, channel, keys.columns, parts + part * keys.columns);
}

__global__ void __launch_bounds__(kGradientThreads) add_parts_kernel(const float* parts, int64_t rows, int64_t splits,
                                                                     int64_t channels, float* query_gradient) {
  const int64_t at = int64_t(blockIdx.x) * kGradientThreads + threadIdx.x, row = at / channels;
  if (row >= rows) return;
  double sum = 0.0;
  for (int64_t split = 0; split < splits; ++split) {
    sum += parts[(row * splits + split) * channels + at % channels];
  }
  query_gradient[at] = float(sum);
}

// The first place in sorted[0, count) whose value is not below.
__device__ __forceinline__ int64_t lower_bound(const int64_t* sorted, int64_t count, int64_t value) {
  int64_t low = 0;
  while (low < count) {
    const int64_t middle = low + (count - low) / 2;
    if (sorted[middle] < value) {
      low = middle + 1;
    } else {
      count = middle;
    }
  }
  return low;
}

// A warp for each key that was gathered at a few places, the whole block for the others.
template <class T>
__global__ void __launch_bounds__(kGradientThreads, 2)
    keys_gradient_kernel(const float* gradient, const int64_t* sorted, const int64_t* order, int64_t samples,
                         const Matrix query, int64_t num_keys, float* keys_gradient) {
  constexpr int64_t kFew = 1024;
  __shared__ float of_warps[kGradientWarps][kWarpChannels];
  __shared__ int64_t bounds[kGradientWarps + 1];
  const int64_t count = query.rows * samples, first = int64_t(blockIdx.x) * kGradientWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x <= kGradientWarps) bounds[threadIdx.x] = lower_bound(sorted, count, first + threadIdx.x);
  __syncthreads();
  const Rows<T> rows(query);
  const auto pair = [&](int64_t i, float& weight, int64_t& row) {
    const int64_t place = order[i];
    weight = gradient[place], row = place / samples;
  };
  for (int64_t slice = 0; slice < query.columns; slice += kWarpChannels) {
    const int64_t channel = slice + lane * kLaneChannels;
    if (first + warp < num_keys && bounds[warp + 1] - bounds[warp] <= kFew) {
      float sum[kLaneChannels] = {};
      weighted_sum(rows, channel, bounds[warp], bounds[warp + 1], 1, pair, sum);
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) {
        if (channel + i < query.columns) keys_gradient[(first + warp) * query.columns + channel + i] = sum[i];
      }
    }
    for (int key = 0; key < kGradientWarps; ++key) {
      if (first + key >= num_keys || bounds[key + 1] - bounds[key] <= kFew) continue;
      float sum[kLaneChannels] = {};
      weighted_sum(rows, channel, bounds[key] + warp, bounds[key + 1], kGradientWarps, pair, sum);
      add_warps(of_warps, sum, channel, query.columns, keys_gradient + (first + key) * query.columns);
    }
  }
}

}  // namespace iecl_fast::ring::gpu
