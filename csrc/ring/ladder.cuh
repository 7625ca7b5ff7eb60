// The ladder by which a block climbs down to the keys of two ranks: histograms, digit by digit, and what it works on.
//
// Counts are taken in shared memory, one atomic per key on one of 4 copies of its counter by lane, one for 4 keys where
// those are in one bin: with all keys equal no more than 8 of a warp's lanes wait for each other.
#pragma once

#include "ring/sources.cuh"

namespace iecl_fast::ring::gpu {

constexpr int kBins = 2048;
constexpr int kCopies = 4;                // of each counter
constexpr int kDigitBits = 10;
constexpr int kDigits = 1 << kDigitBits;  // one half of the bins for each rank
constexpr int kMaxPasses = 8;             // 32 bits of a key and of an index are 4 digits each

// Where a rank's key lies: among `count` keys with low <= order key <= high and first <= index <= last, of which `rank`
// are below it.
struct Target {
  int32_t low, high;
  uint32_t first, last;
  uint32_t rank, count;

  __device__ __forceinline__ bool holds_key(int32_t key) const {
    return uint32_t(key) - uint32_t(low) <= uint32_t(high) - uint32_t(low);
  }
  __device__ __forceinline__ bool holds_index(uint32_t index) const { return index - first <= last - first; }
  __device__ __forceinline__ bool operator==(const Target& other) const {
    return low == other.low && high == other.high && first == other.first && last == other.last;
  }
  // The next digit is one of the key as long as several keys are possible, then one of the index.
  __device__ __forceinline__ uint32_t width() const {
    return low != high ? uint32_t(high) - uint32_t(low) : last - first;
  }
  __device__ __forceinline__ int shift() const { return max(32 - __clz(int(width())) - kDigitBits, 0); }
};

// The bin that holds a rank.
struct Found {
  uint32_t bin, rank, count;  // rank: within the bin
};

struct Workspace {
  alignas(16) uint32_t histogram[kBins * kCopies];  // read and cleared in vectors of four
  int32_t keys[kMaxCollected];
  uint32_t indices[kMaxCollected];
  uint32_t of_warps[kWarps];
  Found found[2];
  int32_t low[2], high[2];
  uint32_t collected;
  int32_t result_keys[2];
  uint32_t result_indices[2];
  float sampled_low[kWarps], sampled_high[kWarps];
};

__device__ __forceinline__ void clear(uint32_t* histogram) {
  uint4* vectors = reinterpret_cast<uint4*>(histogram);
  for (int i = threadIdx.x; i < kBins * kCopies / 4; i += kThreads) vectors[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
}

// One of the copies of a bin's counter. Bins are numbered from `origin`.
__device__ __forceinline__ uint32_t* counter(uint32_t* histogram, uint32_t bin, uint32_t origin = 0) {
  return histogram + (bin * kCopies + (threadIdx.x % kCopies - origin * kCopies));
}

// Four at once, often in the same bin when many similarities are equal.
__device__ __forceinline__ void count_four(uint32_t* histogram, const uint32_t (&bins)[4], int mask,
                                           uint32_t origin = 0) {
  if (mask == 15 && bins[0] == bins[1] && bins[0] == bins[2] && bins[0] == bins[3]) {
    atomicAdd(counter(histogram, bins[0], origin), 4u);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (mask >> i & 1) atomicAdd(counter(histogram, bins[i], origin), 1u);
  }
}

// The bins in which the wanted places of the order lie; counts: of this thread's four bins, 4 * threadIdx.x on.
__device__ __forceinline__ void find_bins(Workspace& shared, const uint32_t (&counts)[4], const uint32_t (&wanted)[2],
                                          Found (&found)[2]) {
  static_assert(kBins == 4 * kThreads, "four bins for each thread");
  uint32_t total;
  uint32_t before = sum_before(counts[0] + counts[1] + counts[2] + counts[3], shared.of_warps, total);
#pragma unroll
  for (int i = 0; i < 4; before += counts[i++]) {
    for (int which = 0; which < 2; ++which) {
      const uint32_t rank = wanted[which] - before;
      if (rank < counts[i]) shared.found[which] = {4 * threadIdx.x + i, rank, counts[i]};
    }
  }
  __syncthreads();
  found[0] = shared.found[0];
  found[1] = shared.found[1];
  __syncthreads();
}

__device__ __forceinline__ void find_bins(Workspace& shared, const uint32_t (&wanted)[2], Found (&found)[2]) {
  __syncthreads();
  uint32_t counts[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    static_assert(kCopies == 4, "a bin's counters are one vector");
    const uint4 copies = reinterpret_cast<const uint4*>(shared.histogram)[4 * threadIdx.x + i];
    counts[i] = copies.x + copies.y + copies.z + copies.w;
  }
  find_bins(shared, counts, wanted, found);
}

// Lowest and highest order key of the keys that belong to a target, and with `store` the keys themselves.
// which(values, mask, index, of) says in `of` the target of each of four keys, -1 for none, and returns the mask of
// those that belong to one. `same`: both targets have the same keys, called those of target 0.
template <class Source, class Which>
__device__ __forceinline__ void gather(Workspace& shared, const Source& source, Target (&targets)[2], bool same,
                                       bool store, const Which& which) {
  if (threadIdx.x == 0) {
    shared.collected = 0;
    for (int i = 0; i < 2; ++i) shared.low[i] = kHighestKey, shared.high[i] = kLowestKey;
  }
  __syncthreads();
  int32_t low[2] = {kHighestKey, kHighestKey}, high[2] = {kLowestKey, kLowestKey};
  source.visit(min(targets[0].first, targets[1].first), max(targets[0].last, targets[1].last),
               [&](const auto& values, int mask, auto index) {
    int of[4];
    mask = which(values, mask, index, of);
    if (mask == 0) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(mask >> i & 1)) continue;
      const int32_t key = order_key(values[i]);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        low[t] = min(low[t], of[i] == t ? key : kHighestKey);
        high[t] = max(high[t], of[i] == t ? key : kLowestKey);
      }
      if (!store) continue;
      const uint32_t slot = atomicAdd(&shared.collected, 1u);
      if (slot < kMaxCollected) {
        shared.keys[slot] = key;
        shared.indices[slot] = index(i);
      }
    }
  });
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    for (int distance = 16; distance > 0; distance /= 2) {
      low[t] = min(low[t], __shfl_xor_sync(kAllLanes, low[t], distance));
      high[t] = max(high[t], __shfl_xor_sync(kAllLanes, high[t], distance));
    }
    if (threadIdx.x % 32 == 0 && low[t] <= high[t]) {
      atomicMin(&shared.low[t], low[t]);
      atomicMax(&shared.high[t], high[t]);
    }
  }
  __syncthreads();
  for (int t = 0; t < 2; ++t) {
    targets[t].low = shared.low[same ? 0 : t];
    targets[t].high = shared.high[same ? 0 : t];
  }
  __syncthreads();
}

// For gather and narrow: by the targets' ranges. Indices, which may have to be fetched, are looked at only where they
// matter.
template <class Source>
struct InRange {
  const Source& source;
  const Target (&targets)[2];
  bool same;

  template <class Value, class Index>
  __device__ __forceinline__ int operator()(const Value (&values)[4], int mask, const Index& index,
                                            int (&of)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t key = order_key(values[i]);
      const auto holds = [&](const Target& target) {
        return target.holds_key(key) && (target.low != target.high || target.holds_index(index(i)));
      };
      of[i] = !(mask >> i & 1) ? -1 : holds(targets[0]) ? 0 : !same && holds(targets[1]) ? 1 : -1;
      if (of[i] >= 0 && source.excludes(i, index)) of[i] = -1;
      if (of[i] < 0) mask &= ~(1 << i);
    }
    return mask;
  }
};

__device__ __forceinline__ uint32_t remaining(const Target (&targets)[2], bool same) {
  return targets[0].count + (same ? 0 : targets[1].count);
}

// One pass of histograms: the digit by which each target's keys differ next.
template <class Source>
__device__ __forceinline__ void narrow(Workspace& shared, const Source& source, Target (&targets)[2], bool same) {
  clear(shared.histogram);
  const int shifts[2] = {targets[0].shift(), targets[1].shift()};
  const auto digit = [](const Target& target, int shift, int32_t key, int element, const auto& index) {
    const bool of_key = target.low != target.high;
    return (of_key ? uint32_t(key) - uint32_t(target.low) : index(element) - target.first) >> shift;
  };
  source.visit(min(targets[0].first, targets[1].first), max(targets[0].last, targets[1].last),
               [&](const auto& values, int mask, auto index) {
    int of[4];
    mask = InRange<Source>{source, targets, same}(values, mask, index, of);
    if (mask == 0) return;
    uint32_t bins[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t key = order_key(values[i]);
      bins[i] = of[i] < 0    ? 0
                : of[i] == 0 ? digit(targets[0], shifts[0], key, i, index)
                             : kDigits + digit(targets[1], shifts[1], key, i, index);
    }
    count_four(shared.histogram, bins, mask);
  });
  const uint32_t wanted[2] = {targets[0].rank, same ? targets[1].rank : targets[0].count + targets[1].rank};
  Found found[2];
  find_bins(shared, wanted, found);
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    Target& target = targets[t];
    const uint32_t begin = (found[t].bin % kDigits) << shifts[t], size = (1u << shifts[t]) - 1;
    const uint32_t end = min(begin + min(size, target.width() - begin), target.width());
    if (target.low != target.high) {
      target.high = int32_t(uint32_t(target.low) + end);
      target.low = int32_t(uint32_t(target.low) + begin);
    } else {
      target.last = target.first + end;
      target.first += begin;
    }
    target.rank = found[t].rank;
    target.count = found[t].count;
  }
}

// The targets' keys in shared memory: narrowed until they fit.
template <class Source>
__device__ __forceinline__ void collect(Workspace& shared, const Source& source, Target (&targets)[2]) {
  for (int pass = 0; pass <= kMaxPasses; ++pass) {
    const bool same = targets[0] == targets[1];
    if (remaining(targets, same) <= kMaxCollected) {
      gather(shared, source, targets, same, true, InRange<Source>{source, targets, same});
      return;
    }
    narrow(shared, source, targets, same);
  }
}

// The results, from the targets' keys in shared memory.
__device__ __forceinline__ void finish(Workspace& shared, Target (&targets)[2]) {
  const SharedSource source{shared.keys, shared.indices, min(shared.collected, kMaxCollected)};
  const auto several = [](const Target& target) { return target.count > 1 && target.width() > 0; };
  for (int pass = 0; pass < kMaxPasses && (several(targets[0]) || several(targets[1])); ++pass) {
    narrow(shared, source, targets, targets[0] == targets[1]);
  }
  const bool same = targets[0] == targets[1];
  source.visit(0, 0, [&](const auto& values, int mask, auto index) {
    int of[4];
    InRange<SharedSource>{source, targets, same}(values, mask, index, of);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int result = 0; result < 2; ++result) {
        if (of[i] != (same ? 0 : result)) continue;
        shared.result_keys[result] = values[i];
        shared.result_indices[result] = index(i);
      }
    }
  });
  __syncthreads();
}

}  // namespace iecl_fast::ring::gpu
