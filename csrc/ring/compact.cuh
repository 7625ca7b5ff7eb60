// The members of each row's ring in ascending key index, all of them or draws.
//
//   count_members   how many lie in each split of a row; with one split not needed
//   compact         writes them side by side
//   draw            the members at random places, from their indices side by side
//
// A tile of 4096 keys at a time: each thread counts its own members, a sum over the threads before it says where they go,
// and they are written out from shared memory, neighbours by neighbours. No atomics, so the order is that of the keys.
//
// Bytes: 4 N K read (twice with several splits), 4 or 12 N M written; operations: 11 per similarity. Floor: bytes over the
// bandwidth. Draws: 4 N K read, 4 N M written and read, 32 N S for the gathered values (a sector each), 4 or 12 N S written.
#pragma once

#include "ring/sources.cuh"

namespace iecl_fast::ring::gpu {

constexpr int kTile = 4 * kBatch * kThreads;

// What a block works on: a row, or a split of one.
struct Piece {
  int64_t row, split;
  uint32_t begin, end;

  __device__ __forceinline__ Piece(const Similarities& similarities, int64_t splits)
      : row(blockIdx.x / splits), split(blockIdx.x % splits) {
    const int64_t keys = (similarities.keys + splits - 1) / splits;
    begin = uint32_t(min(split * keys, similarities.keys));
    end = uint32_t(min((split + 1) * keys, similarities.keys));
  }
  __device__ __forceinline__ Vectors vectors(const Similarities& similarities) const {
    return {similarities.data + row * similarities.row_stride, similarities.key_stride, begin, end};
  }
};

__device__ __forceinline__ int members_of(const Ring& ring, const float (&values)[4], int mask, uint32_t index) {
  int members = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) members |= int(ring.contains(values[i], index + i)) << i;
  return members & mask;
}

__global__ void __launch_bounds__(kThreads) count_members_kernel(const Similarities similarities,
                                                                 const Boundaries boundaries, const int64_t* exclude,
                                                                 int64_t splits, uint32_t* counts) {
  __shared__ uint32_t of_warps[kWarps];
  const Piece piece(similarities, splits);
  const Ring ring(boundaries, exclude, piece.row);
  const Vectors vectors = piece.vectors(similarities);
  uint32_t count = 0;
  vectors.visit([&](const float(&values)[4], int mask, uint32_t index) {
    count += __popc(members_of(ring, values, mask, index));
  });
  uint32_t total;
  sum_before(count, of_warps, total);
  if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

// Any of the results may be nullptr. `size` is the width of each of them.
struct Results {
  float* values;
  int64_t* indices;
  uint32_t* short_indices;
  int64_t size;
};

// counts: (rows, splits), unless there is one split.
__global__ void __launch_bounds__(kThreads) compact_kernel(const Similarities similarities, const Boundaries boundaries,
                                                           const int64_t* exclude, int64_t splits,
                                                           const uint32_t* counts, const Results results) {
  __shared__ float tile_values[kTile];
  __shared__ uint32_t tile_indices[kTile];
  __shared__ uint32_t of_warps[kWarps];
  const Piece piece(similarities, splits);
  const Ring ring(boundaries, exclude, piece.row);
  const Vectors vectors = piece.vectors(similarities);
  int64_t written = 0;
  for (int64_t split = 0; split < piece.split; ++split) written += counts[piece.row * splits + split];

  for (uint32_t tile = threadIdx.x; 4 * (tile - threadIdx.x) < vectors.end; tile += kThreads * kBatch) {
    float values[kBatch][4];
    int members[kBatch];
    uint32_t own = 0;  // 16 bits for each vector
    const bool whole = vectors.whole(tile, kBatch);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      members[i] = 15;
      if (whole) vectors.load_whole(tile + i * kThreads, values[i]);
      if (!whole) members[i] = vectors.load(tile + i * kThreads, values[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      members[i] = members_of(ring, values[i], members[i], vectors.index(tile + i * kThreads));
      own |= uint32_t(__popc(members[i])) << 16 * i;
    }
    uint32_t totals;
    const uint32_t before = sum_before(own, of_warps, totals);
    uint32_t earlier = 0;  // members of the vectors of a lower i, which come first
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      uint32_t slot = earlier + (before >> 16 * i & 0xffff);
      earlier += totals >> 16 * i & 0xffff;
#pragma unroll
      for (int element = 0; element < 4; ++element) {
        if (!(members[i] >> element & 1)) continue;
        tile_values[slot] = values[i][element];
        tile_indices[slot++] = vectors.index(tile + i * kThreads) + element;
      }
    }
    __syncthreads();
    for (uint32_t slot = threadIdx.x; slot < earlier; slot += kThreads) {
      if (written + slot >= results.size) break;
      const int64_t to = piece.row * results.size + written + slot;
      if (results.values != nullptr) results.values[to] = tile_values[slot];
      if (results.indices != nullptr) results.indices[to] = tile_indices[slot];
      if (results.short_indices != nullptr) results.short_indices[to] = tile_indices[slot];
    }
    written += earlier;  // the next tile's sums wait until all of this one is read
  }
}

// A thread for each draw. members: (rows, width) indices of each row's members.
__global__ void __launch_bounds__(kThreads) draw_kernel(const Similarities similarities, const Ranks ranks,
                                                        const int64_t* exclude, const double* uniform, int64_t samples,
                                                        const uint32_t* members, int64_t width, float* values,
                                                        int64_t* indices) {
  const int64_t draw = int64_t(blockIdx.x) * kThreads + threadIdx.x, row = draw / samples;
  if (row >= similarities.rows) return;
  const bool rest = Ring::excluded_key(exclude, row) != kNoKey;
  const int64_t size = rest ? ranks.rest[1] - ranks.rest[0] : ranks.all[1] - ranks.all[0];
  const int64_t member = max(min(int64_t(uniform[draw] * double(size)), size - 1), int64_t(0));
  const uint32_t index = members[row * width + member];
  values[draw] = similarities.data[row * similarities.row_stride + index * similarities.key_stride];
  if (indices != nullptr) indices[draw] = index;
}

}  // namespace iecl_fast::ring::gpu
