// Where a block finds the keys it selects from: a row of similarities, segments of candidates, or shared memory.
//
// visit(first, last, function) calls function(values, mask, index) for groups of four keys, by any thread in any order:
// mask says which of the four are there, index(i) is a key's index. A row visits first <= index <= last only; elsewhere
// that is the caller's business.
#pragma once

#include "ring/order.cuh"

namespace iecl_fast::ring::gpu {

constexpr int kBatch = 2;                 // vectors that a thread loads before it uses the first
constexpr uint32_t kMaxCollected = 1024;  // candidates in shared memory

__device__ __forceinline__ int32_t order_key(int32_t key) { return key; }

// The vectors of four elements, aligned to 16 bytes where they lie side by side, that hold a piece of a row.
struct Vectors {
  const float* data;  // of the first element of the first vector; up to three elements before the piece
  int64_t stride;
  uint32_t lead;   // elements of the first vector before the piece
  uint32_t end;    // of the piece, in elements from `data`
  uint32_t first;  // index of the piece's first element

  __device__ __forceinline__ Vectors(const float* row, int64_t stride, uint32_t first, uint32_t end_index)
      : stride(stride), first(first) {
    const float* begin = row + first * stride;
    lead = stride == 1 ? reinterpret_cast<uintptr_t>(begin) / sizeof(float) % 4 : 0;
    data = begin - lead;
    end = end_index - first + lead;
  }
  __device__ __forceinline__ uint32_t index(uint32_t vector) const { return first - lead + 4 * vector; }

  // Whether a thread's vectors first, first + kThreads, ... lie side by side in memory, all elements in the piece.
  __device__ __forceinline__ bool whole(uint32_t first, int vectors) const {
    return stride == 1 && 4 * first >= lead && 4 * (first + (vectors - 1) * kThreads) + 4 <= end;
  }
  __device__ __forceinline__ void load_whole(uint32_t vector, float (&values)[4]) const {
    const float4 loaded = reinterpret_cast<const float4*>(data)[vector];
    values[0] = loaded.x, values[1] = loaded.y, values[2] = loaded.z, values[3] = loaded.w;
  }
  // Returns the mask of the elements that belong to the piece.
  __device__ __forceinline__ int load(uint32_t vector, float (&values)[4]) const {
    const uint32_t at = 4 * vector;
    int mask = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = 0.0f;
      if (at + i >= lead && at + i < end) {
        values[i] = data[int64_t(at + i) * stride];
        mask |= 1 << i;
      }
    }
    return mask;
  }

  // Calls function(values, mask, index of the first) for every vector. Whole ones are loaded several ahead.
  template <class Visit>
  __device__ __forceinline__ void visit(const Visit& function) const {
    for (uint32_t begin = threadIdx.x; 4 * begin < end; begin += kThreads * kBatch) {
      float values[kBatch][4];
      if (whole(begin, kBatch)) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) load_whole(begin + i * kThreads, values[i]);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) function(values[i], 15, index(begin + i * kThreads));
        continue;
      }
#pragma unroll 1
      for (uint32_t vector = begin; vector < begin + kBatch * kThreads && 4 * vector < end; vector += kThreads) {
        const int mask = load(vector, values[0]);
        function(values[0], mask, index(vector));
      }
    }
  }
};

struct RowSource {
  const float* row;
  int64_t stride;
  uint32_t size;
  uint32_t excluded;

  template <class Visit>
  __device__ __forceinline__ void visit(uint32_t first, uint32_t last, const Visit& function) const {
    Vectors(row, stride, first, last + 1).visit([&](const float(&values)[4], int mask, uint32_t at) {
      function(values, mask, [=](int element) { return at + element; });
    });
  }
  template <class Index>
  __device__ __forceinline__ bool excludes(int element, const Index& index) const {
    return index(element) == excluded;
  }
  __device__ __forceinline__ float value(uint32_t index) const { return row[index * stride]; }
};

// Warps take turns at pieces of 128 keys, the first of every segment, then the second, ...
struct SegmentSource {
  const int32_t* keys;
  const int32_t* indices;
  const int32_t* counts;
  uint32_t segments;
  int64_t capacity;
  uint32_t longest;  // number of keys in a segment

  __device__ __forceinline__ SegmentSource(const Candidates& candidates, int64_t row, uint32_t longest)
      : keys(candidates.keys + row * candidates.segments * candidates.capacity),
        indices(candidates.indices + row * candidates.segments * candidates.capacity),
        counts(candidates.counts + row * candidates.segments), segments(candidates.segments),
        capacity(candidates.capacity), longest(longest) {}

  template <class Index>
  __device__ __forceinline__ bool excludes(int, const Index&) const {
    return false;
  }
  __device__ __forceinline__ uint32_t count(uint32_t segment) const {
    return max(int64_t(0), min(int64_t(counts[segment]), capacity));
  }

  template <class Visit>
  __device__ __forceinline__ void visit(uint32_t, uint32_t, const Visit& function) const {
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t first = 0; first < longest; first += 128) {
      for (uint32_t segment = threadIdx.x / 32; segment < segments; segment += kWarps) {
        const uint32_t size = count(segment), begin = first + lane;
        if (begin >= size) continue;
        const int64_t at = segment * capacity + begin;
        int32_t values[4];
        int mask = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          values[i] = 0;
          if (begin + 32 * i < size) {
            values[i] = keys[at + 32 * i];
            mask |= 1 << i;
          }
        }
        function(values, mask, [this, at](int element) { return uint32_t(indices[at + 32 * element]); });
      }
    }
  }
};

struct SharedSource {
  const int32_t* keys;
  const uint32_t* indices;
  uint32_t size;

  template <class Index>
  __device__ __forceinline__ bool excludes(int, const Index&) const {
    return false;
  }
  template <class Visit>
  __device__ __forceinline__ void visit(uint32_t, uint32_t, const Visit& function) const {
    for (uint32_t begin = threadIdx.x; begin < size; begin += 4 * kThreads) {
      int32_t values[4];
      int mask = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t at = begin + i * kThreads;
        values[i] = at < size ? keys[at] : 0;
        mask |= (at < size) << i;
      }
      function(values, mask, [this, begin](int element) { return indices[begin + element * kThreads]; });
    }
  }
};

}  // namespace iecl_fast::ring::gpu
