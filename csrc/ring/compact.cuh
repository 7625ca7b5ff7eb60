// The members of each row's ring in ascending key index, all of them or draws.
//
//   count_members   how many lie in each split of a row; with one split not needed
//   compact         writes them side by side
//   draw            the members at random places, from their indices side by side
//
// A tile of 4096 keys at a time: each thread counts its own members, a sum over the threads before it says where they
// go, and they are written out from shared memory, neighbours by neighbours. No atomics, so the order is that of the
// keys.
//
// Bytes: 4 N K read (twice with several splits), 4 or 12 N M written; draws: 4 N K read, 4 N M written, a sector of 32
// for each of N S places and values, 4 or 12 N S written. Operations: about 35 instructions per similarity, 8 to count
// only. Floor: bytes over the bandwidth.
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

// The places between which a row's members lie: lower <= place(key, index) < upper.
struct Ring {
  int64_t lower, upper;
  float low, high;    // the boundaries' similarities, NaN as infinity
  uint32_t excluded;  // index of the key that is no candidate, or kNoKey

  __device__ __forceinline__ Ring(const Boundaries& boundaries, const int64_t* exclude, int64_t row)
      : lower(boundary(boundaries, 2 * row)), upper(boundary(boundaries, 2 * row + 1)),
        low(similarity(boundaries.thresholds[2 * row])), high(similarity(boundaries.thresholds[2 * row + 1])),
        excluded(excluded_key(exclude, row)) {}

  // The mask of those among four keys, index the first one's, of which `mask` says that they are there.
  __device__ __forceinline__ int members(const float (&values)[4], int mask, uint32_t index) const {
    int members = 0, others = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      members |= int(low < values[i] && values[i] < high) << i;
      others |= int(values[i] < low || high < values[i]) << i;
    }
    if ((members | others) != 15) {  // equal to a boundary, or NaN
      members = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t at = place(order_key(values[i]), index + i);
        members |= int(lower <= at && at < upper) << i;
      }
    }
    if (excluded - index < 4) members &= ~(1 << (excluded - index));
    return members & mask;
  }

 private:
  static __device__ __forceinline__ int64_t boundary(const Boundaries& boundaries, int64_t i) {
    return place(boundaries.thresholds[i], uint32_t(min(boundaries.ties[i], int64_t(kNoKey))));
  }
  static __device__ __forceinline__ float similarity(int32_t key) {
    const float value = __int_as_float(key ^ ((key >> 31) & 0x7fffffff));
    return value == value ? value : key < 0 ? -INFINITY : INFINITY;
  }
};

__global__ void __launch_bounds__(kThreads) count_members_kernel(const Similarities similarities,
                                                                 const Boundaries boundaries, const int64_t* exclude,
                                                                 int64_t splits, uint32_t* counts) {
  __shared__ uint32_t of_warps[kWarps];
  const Piece piece(similarities, splits);
  const Ring ring(boundaries, exclude, piece.row);
  const Vectors vectors = piece.vectors(similarities);
  uint32_t count = 0;
  vectors.visit([&](const float(&values)[4], int mask, uint32_t index) {
    count += __popc(ring.members(values, mask, index));
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
  __shared__ uint2 tile_members[kTile];  // bits of the value, index
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
      members[i] = ring.members(values[i], members[i], vectors.index(tile + i * kThreads));
      own |= uint32_t(__popc(members[i])) << 16 * i;
    }
    uint32_t totals;
    const uint32_t before = sum_before(own, of_warps, totals);
    uint32_t earlier = 0;  // members of the vectors of a lower i, which come first
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t index = vectors.index(tile + i * kThreads);
      uint32_t slot = earlier + (before >> 16 * i & 0xffff);
      earlier += totals >> 16 * i & 0xffff;
#pragma unroll
      for (int element = 0; element < 4; ++element) {
        if (!(members[i] >> element & 1)) continue;
        tile_members[slot++] = make_uint2(__float_as_uint(values[i][element]), index + element);
      }
    }
    __syncthreads();
    for (uint32_t slot = threadIdx.x; slot < earlier; slot += kThreads) {
      if (written + slot >= results.size) break;
      const int64_t to = piece.row * results.size + written + slot;
      const uint2 member = tile_members[slot];
      if (results.values != nullptr) results.values[to] = __uint_as_float(member.x);
      if (results.indices != nullptr) results.indices[to] = member.y;
      if (results.short_indices != nullptr) results.short_indices[to] = member.y;
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
  const bool rest = excluded_key(exclude, row) != kNoKey;
  const int64_t size = rest ? ranks.rest[1] - ranks.rest[0] : ranks.all[1] - ranks.all[0];
  const int64_t member = max(min(int64_t(uniform[draw] * double(size)), size - 1), int64_t(0));
  const uint32_t index = members[row * width + member];
  values[draw] = similarities.data[row * similarities.row_stride + index * similarities.key_stride];
  if (indices != nullptr) indices[draw] = index;
}

}  // namespace iecl_fast::ring::gpu
