// The boundaries of two ranks in each row of similarities (N, K).
//
//   select               a block for each row does it all
//   prepare, count, collect, finish    the same by several blocks for each row, for long rows
//   select_candidates    among candidates in segments that another kernel has written
//
// A sample of 512 keys gives the range in which 2044 bins of equal width lie, so that the bins around a rank hold a few
// per mille of the keys whatever the scale of the similarities; the leading bits of floats would put a twentieth of all
// unit vectors' similarities into one bin and its counter. A pass counts the bins, a second one collects the keys of the
// two bins that hold the ranks in shared memory, where a ladder of 10-bit histograms on order keys, and on indices where
// keys are equal, narrows down to the one key. Infinities and NaN have bins of their own. Where the two bins hold more than
// shared memory takes, the second pass finds their lowest and highest key only, and the ladder climbs on the row itself
// until the rest fits: at most 4 passes for keys and 4 for indices, 2 more in all where one value is the rule.
//
// Bytes: 2 * 4 N K, of which the second pass finds what fits in L2; operations: 11 and 10 per similarity. Floor, DRAM:
// 4 N K over the bandwidth. In shared memory one atomic per similarity, on one of 4 copies of its counter by lane, one for
// 4 similarities where those are in one bin: with all similarities equal no more than 8 of a warp's lanes wait for each other.
//
// Atomics count, and append to what is unordered; the result does not depend on the order.
#pragma once

#include "ring/sources.cuh"

namespace iecl_fast::ring::gpu {

constexpr int kBins = 2048;
constexpr int kCopies = 4;  // of each counter
constexpr int kDigitBits = 10;
constexpr int kDigits = 1 << kDigitBits;  // one half of the bins for each rank
constexpr int kMaxPasses = 8;  // 32 bits of a key and of an index are 4 digits each
constexpr int kSampled = kThreads;

constexpr int kBelowRange = 0, kFirstBin = 1, kLastBin = kBins - 4, kInfinity = kBins - 2, kNotANumber = kBins - 1;

// Linear bins between the sample's extremes. Ascends with the value, so it never splits ranks the wrong way round.
struct Scale {
  float low, factor;

  __device__ __forceinline__ int bin(float value) const {
    const float position = fminf(fmaxf((value - low) * factor, 0.0f), float(kLastBin - kFirstBin));
    int bin = __float_as_int(position + 8388608.0f) - 0x4b000000 + kFirstBin;  // 2^23: rounds to an integer
    if (!(fabsf(value) < INFINITY)) bin = value > 0.0f ? kInfinity : value < 0.0f ? kBelowRange : kNotANumber;
    return bin;
  }
};

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
  uint32_t histogram[kBins * kCopies];
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

__device__ __forceinline__ uint32_t* counter(uint32_t* histogram, int bin) {
  return histogram + bin * kCopies + threadIdx.x % kCopies;
}

// Four at once, often in the same bin when many similarities are equal.
__device__ __forceinline__ void count_four(uint32_t* histogram, const int (&bins)[4], int mask) {
  if (mask == 15 && bins[0] == bins[1] && bins[0] == bins[2] && bins[0] == bins[3]) {
    atomicAdd(counter(histogram, bins[0]), 4u);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (mask >> i & 1) atomicAdd(counter(histogram, bins[i]), 1u);
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

// The range of the finite ones among kSampled keys spread over the row.
__device__ __forceinline__ Scale sample_scale(Workspace& shared, const RowSource& source) {
  const float value = source.value(uint32_t(uint64_t(threadIdx.x) * source.size / kSampled));
  const bool finite = fabsf(value) < INFINITY;
  float low = finite ? value : INFINITY, high = finite ? value : -INFINITY;
  for (int distance = 16; distance > 0; distance /= 2) {
    low = fminf(low, __shfl_xor_sync(kAllLanes, low, distance));
    high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, distance));
  }
  if (threadIdx.x % 32 == 0) {
    shared.sampled_low[threadIdx.x / 32] = low;
    shared.sampled_high[threadIdx.x / 32] = high;
  }
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) {
    low = fminf(low, shared.sampled_low[warp]);
    high = fmaxf(high, shared.sampled_high[warp]);
  }
  if (!(low <= high)) low = high = 0.0f;
  // Neither 0 nor infinite, so that no product with it is NaN.
  const float factor = float(kLastBin - kFirstBin) / (high - low);
  return {low, fminf(fmaxf(factor, 1e-37f), 1e37f)};
}

// Counts the linear bins of the keys first .. last. The caller clears the histogram before.
__device__ __forceinline__ void count_bins(Workspace& shared, const RowSource& source, const Scale& scale,
                                           uint32_t first, uint32_t last) {
  source.visit(first, last, [&](const float(&values)[4], int mask, auto) {
    int bins[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bins[i] = scale.bin(values[i]);
    count_four(shared.histogram, bins, mask);
  });
  if (threadIdx.x == 0 && first <= source.excluded && source.excluded <= last) {
    atomicSub(counter(shared.histogram, scale.bin(source.value(source.excluded))), 1u);
  }
}

// Lowest and highest order key of the keys that belong to a target, which which(value, index) says (-1: to none), and
// with `store` the keys themselves. `same`: both targets have the same keys, called those of target 0.
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
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(mask >> i & 1)) continue;
      const int target = which(values[i], i, index);
      if (target < 0) continue;
      const int32_t key = order_key(values[i]);
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        if (target == t) low[t] = min(low[t], key), high[t] = max(high[t], key);
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

// The target whose keys hold this one, or -1. Indices, which may have to be fetched, are looked at only where they matter.
template <class Source, class Value, class Index>
__device__ __forceinline__ int target_of(const Source& source, const Target (&targets)[2], bool same, Value value,
                                         int element, const Index& index) {
  const int32_t key = order_key(value);
  const auto holds = [&](const Target& target) {
    return target.holds_key(key) && (target.low != target.high || target.holds_index(index(element)));
  };
  const int target = holds(targets[0]) ? 0 : !same && holds(targets[1]) ? 1 : -1;
  return target >= 0 && source.excludes(element, index) ? -1 : target;
}

// For gather: the target whose bin holds a key.
__device__ __forceinline__ auto in_bins(const RowSource& source, const Scale& scale, const Found (&found)[2]) {
  return [&source, scale, first = int(found[0].bin), second = int(found[1].bin)](float value, int element,
                                                                                const auto& index) {
    const int bin = scale.bin(value);
    const int target = bin == first ? 0 : bin == second ? 1 : -1;
    return target >= 0 && source.excludes(element, index) ? -1 : target;
  };
}

__device__ __forceinline__ uint32_t remaining(const Target (&targets)[2], bool same) {
  return targets[0].count + (same ? 0 : targets[1].count);
}

// Narrows both targets down to one key each, the results.
template <class Source>
__device__ __forceinline__ void narrow(Workspace& shared, const Source& source, Target (&targets)[2]) {
  const auto several = [](const Target& target) { return target.count > 1 && target.width() > 0; };
  for (int pass = 0; pass < kMaxPasses && (several(targets[0]) || several(targets[1])); ++pass) {
    const bool same = targets[0] == targets[1];
    const auto which = [&](auto value, int element, const auto& index) {
      return target_of(source, targets, same, value, element, index);
    };
    if constexpr (!Source::kInSharedMemory) {
      if (remaining(targets, same) <= kMaxCollected) {
        gather(shared, source, targets, same, true, which);
        narrow(shared, SharedSource{shared.keys, shared.indices, shared.collected}, targets);
        return;
      }
    }
    clear(shared.histogram);
    const int shifts[2] = {targets[0].shift(), targets[1].shift()};
    const auto digit = [&](const Target& target, int shift, int32_t key, int element, const auto& index) {
      const bool of_key = target.low != target.high;
      return int((of_key ? uint32_t(key) - uint32_t(target.low) : index(element) - target.first) >> shift);
    };
    const auto bin = [&](int t, int32_t key, int element, const auto& index) {
      return t == 0 ? digit(targets[0], shifts[0], key, element, index)
                    : kDigits + digit(targets[1], shifts[1], key, element, index);
    };
    source.visit(min(targets[0].first, targets[1].first), max(targets[0].last, targets[1].last),
                 [&](const auto& values, int mask, auto index) {
      int bins[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = mask >> i & 1 ? which(values[i], i, index) : -1;
        if (t < 0) mask &= ~(1 << i);
        bins[i] = t < 0 ? -1 : bin(t, order_key(values[i]), i, index);
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
  const bool same = targets[0] == targets[1];
  source.visit(min(targets[0].first, targets[1].first), max(targets[0].last, targets[1].last),
               [&](const auto& values, int mask, auto index) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = mask >> i & 1 ? target_of(source, targets, same, values[i], i, index) : -1;
      for (int result = 0; t >= 0 && result < 2; ++result) {
        if (t != result && !same) continue;
        shared.result_keys[result] = order_key(values[i]);
        shared.result_indices[result] = index(i);
      }
    }
  });
  __syncthreads();
}

// The results among the keys whose bins hold the wanted places.
__device__ __forceinline__ void select_in_bins(Workspace& shared, const RowSource& source, const Scale& scale,
                                               const Found (&found)[2]) {
  Target targets[2];
  for (int t = 0; t < 2; ++t) targets[t] = {0, 0, 0, source.size - 1, found[t].rank, found[t].count};
  const bool same = found[0].bin == found[1].bin, fits = remaining(targets, same) <= kMaxCollected;
  gather(shared, source, targets, same, fits, in_bins(source, scale, found));
  if (fits) {
    narrow(shared, SharedSource{shared.keys, shared.indices, shared.collected}, targets);
  } else {
    narrow(shared, source, targets);
  }
}

__device__ __forceinline__ void select_in_row(Workspace& shared, const RowSource& source, const uint32_t (&wanted)[2]) {
  clear(shared.histogram);
  const Scale scale = sample_scale(shared, source);
  count_bins(shared, source, scale, 0, source.size - 1);
  Found found[2];
  find_bins(shared, wanted, found);
  select_in_bins(shared, source, scale, found);
}

// The ranks to look for, or none if both are at an end of the order. Where one is, it takes the other's place.
struct Wanted {
  int64_t ranks[2], candidates;

  __device__ __forceinline__ bool below_all(int t) const { return ranks[t] <= 0; }
  __device__ __forceinline__ bool above_all(int t) const { return ranks[t] >= candidates && !below_all(t); }
  __device__ __forceinline__ bool at_end(int t) const { return below_all(t) || above_all(t); }
  __device__ __forceinline__ bool none() const { return at_end(0) && at_end(1); }
  __device__ __forceinline__ uint32_t place(int t) const {
    return uint32_t((t == 0) != at_end(t) ? ranks[0] : ranks[1]);
  }
};

__device__ __forceinline__ Wanted wanted_of_row(const Ranks& ranks, const RowSource& source) {
  const bool excludes = source.excluded != kNoKey;
  Wanted wanted{{0, 0}, int64_t(source.size) - excludes};
  for (int t = 0; t < 2; ++t) wanted.ranks[t] = excludes ? ranks.rest[t] : ranks.all[t];
  return wanted;
}

// `above_all`: an index above all others.
__device__ __forceinline__ void write_boundaries(const Workspace& shared, const Wanted& wanted, int64_t above_all,
                                                 const Boundaries& boundaries, int64_t row) {
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    if (threadIdx.x != t) continue;
    const bool at_end = wanted.at_end(t), above = wanted.above_all(t);
    boundaries.thresholds[2 * row + t] = !at_end ? shared.result_keys[t] : above ? kHighestKey : kLowestKey;
    boundaries.ties[2 * row + t] = !at_end ? int64_t(shared.result_indices[t]) : above ? above_all : 0;
  }
}

__device__ __forceinline__ RowSource source_of(const Similarities& similarities, const int64_t* exclude, int64_t row) {
  return {similarities.data + row * similarities.row_stride, similarities.key_stride, uint32_t(similarities.keys),
          Ring::excluded_key(exclude, row)};
}

// ---- a block for each row ------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) select_kernel(const Similarities similarities, const Ranks ranks,
                                                          const int64_t* exclude, const Boundaries boundaries) {
  __shared__ Workspace shared;
  const int64_t row = blockIdx.x;
  const RowSource source = source_of(similarities, exclude, row);
  const Wanted wanted = wanted_of_row(ranks, source);
  if (!wanted.none()) select_in_row(shared, source, {wanted.place(0), wanted.place(1)});
  write_boundaries(shared, wanted, source.size, boundaries, row);
}

// ---- several blocks for each row -----------------------------------------------------------------------------------

// What the kernels leave for one another.
struct Splits {
  int64_t count;
  uint32_t keys;        // of a split
  Scale* scales;        // (rows,)
  uint32_t* histogram;  // (rows, kBins)
  int64_t* ranks;       // (rows, 2) among the candidates
  Candidates candidates;

  __device__ __forceinline__ int64_t row() const { return blockIdx.x / count; }
  __device__ __forceinline__ int64_t split() const { return blockIdx.x % count; }
};

__global__ void __launch_bounds__(kThreads) prepare_kernel(const Similarities similarities, const Splits splits) {
  __shared__ Workspace shared;
  const int64_t row = blockIdx.x;
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) splits.histogram[row * kBins + bin] = 0;
  const Scale scale = sample_scale(shared, source_of(similarities, nullptr, row));
  if (threadIdx.x == 0) splits.scales[row] = scale;
}

__global__ void __launch_bounds__(kThreads) count_kernel(const Similarities similarities, const int64_t* exclude,
                                                         const Splits splits) {
  __shared__ Workspace shared;
  const int64_t row = splits.row(), begin = splits.split() * splits.keys;
  const int64_t end = min(begin + splits.keys, similarities.keys);
  if (begin >= end) return;
  clear(shared.histogram);
  count_bins(shared, source_of(similarities, exclude, row), splits.scales[row], begin, end - 1);
  __syncthreads();
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    const uint4 copies = reinterpret_cast<const uint4*>(shared.histogram)[bin];
    const uint32_t count = copies.x + copies.y + copies.z + copies.w;
    if (count != 0) atomicAdd(&splits.histogram[row * kBins + bin], count);
  }
}

// A split's keys in the two bins, unless those hold more than all splits have room for.
__global__ void __launch_bounds__(kThreads) collect_kernel(const Similarities similarities, const Ranks ranks,
                                                           const int64_t* exclude, const Splits splits) {
  __shared__ Workspace shared;
  const int64_t row = splits.row(), split = splits.split(), begin = split * splits.keys;
  const int64_t end = min(begin + splits.keys, similarities.keys), slot = row * splits.count + split;
  const RowSource source = source_of(similarities, exclude, row);
  const Wanted wanted = wanted_of_row(ranks, source);
  int32_t* counts = const_cast<int32_t*>(splits.candidates.counts);
  if (wanted.none()) return;
  const uint4 loaded = reinterpret_cast<const uint4*>(splits.histogram + row * kBins)[threadIdx.x];
  Found found[2];
  find_bins(shared, {loaded.x, loaded.y, loaded.z, loaded.w}, {wanted.place(0), wanted.place(1)}, found);
  const bool same = found[0].bin == found[1].bin;
  Target targets[2];
  for (int t = 0; t < 2; ++t) targets[t] = {0, 0, uint32_t(begin), uint32_t(end - 1), found[t].rank, found[t].count};
  if (split == 0 && threadIdx.x < 2) {
    splits.ranks[2 * row + threadIdx.x] =
        threadIdx.x == 0 ? found[0].rank : found[1].rank + (same ? 0 : found[0].count);
  }
  const bool overflows = remaining(targets, same) > splits.count * kMaxCollected;
  if (begin >= end || overflows) {
    if (threadIdx.x == 0) counts[slot] = overflows ? kMaxCollected + 1 : 0;
    return;
  }
  gather(shared, source, targets, same, true, in_bins(source, splits.scales[row], found));
  if (threadIdx.x == 0) counts[slot] = shared.collected;
  for (uint32_t i = threadIdx.x; i < min(shared.collected, kMaxCollected); i += kThreads) {
    const_cast<int32_t*>(splits.candidates.keys)[slot * kMaxCollected + i] = shared.keys[i];
    const_cast<int32_t*>(splits.candidates.indices)[slot * kMaxCollected + i] = int32_t(shared.indices[i]);
  }
}

// Number of candidates in a row's segments, and in the longest one, as they say themselves.
__device__ __forceinline__ uint32_t count_candidates(Workspace& shared, const Candidates& candidates, int64_t row,
                                                     int64_t& longest) {
  if (threadIdx.x == 0) shared.collected = 0, shared.high[0] = 0;
  __syncthreads();
  for (int64_t segment = threadIdx.x; segment < candidates.segments; segment += kThreads) {
    const int32_t count = max(candidates.counts[row * candidates.segments + segment], 0);
    atomicAdd(&shared.collected, uint32_t(min(int64_t(count), candidates.capacity)));
    atomicMax(&shared.high[0], count);
  }
  __syncthreads();
  longest = shared.high[0];
  const uint32_t total = shared.collected;
  __syncthreads();
  return total;
}

__device__ __forceinline__ void select_in_segments(Workspace& shared, const SegmentSource& source, uint32_t total,
                                                   const uint32_t (&wanted)[2]) {
  Target targets[2];
  for (int t = 0; t < 2; ++t) targets[t] = {0, 0, 0, uint32_t(INT32_MAX), wanted[t], total};
  const bool fits = total <= kMaxCollected;
  gather(shared, source, targets, true, fits, [](int32_t, int, const auto&) { return 0; });
  if (fits) {
    narrow(shared, SharedSource{shared.keys, shared.indices, shared.collected}, targets);
  } else {
    narrow(shared, source, targets);
  }
}

__global__ void __launch_bounds__(kThreads, 1) finish_kernel(const Similarities similarities, const Ranks ranks,
                                                          const int64_t* exclude, const Splits splits,
                                                          const Boundaries boundaries) {
  __shared__ Workspace shared;
  const int64_t row = blockIdx.x;
  const RowSource source = source_of(similarities, exclude, row);
  const Wanted wanted = wanted_of_row(ranks, source);
  if (!wanted.none()) {
    int64_t longest;
    const uint32_t total = count_candidates(shared, splits.candidates, row, longest);
    if (longest > kMaxCollected) {
      select_in_row(shared, source, {wanted.place(0), wanted.place(1)});
    } else {
      const int64_t* among = splits.ranks + 2 * row;
      select_in_segments(shared, {splits.candidates, row, uint32_t(longest)}, total,
                         {uint32_t(among[0]), uint32_t(among[1])});
    }
  }
  write_boundaries(shared, wanted, source.size, boundaries, row);
}

// ---- candidates ----------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) select_candidates_kernel(const Candidates candidates, const int64_t* ranks,
                                                                     const Boundaries boundaries) {
  __shared__ Workspace shared;
  const int64_t row = blockIdx.x;
  int64_t longest;
  const uint32_t total = count_candidates(shared, candidates, row, longest);
  const int64_t lower = ranks[2 * row], upper = max(lower, ranks[2 * row + 1]);
  const Wanted wanted{{lower, upper}, total};
  if (!wanted.none()) {
    select_in_segments(shared, {candidates, row, uint32_t(min(longest, candidates.capacity))}, total,
                       {wanted.place(0), wanted.place(1)});
  }
  write_boundaries(shared, wanted, INT64_MAX, boundaries, row);
}

}  // namespace iecl_fast::ring::gpu
