// The boundaries of two ranks in each row of similarities (N, K).
//
//   select               a block for each row does it all
//   prepare, count, collect, finish    the same by several blocks for each row, for long rows
//   select_candidates    among candidates in segments that another kernel has written
//
// A sample of 512 keys gives the range in which 2044 bins of equal width lie, so that the bins around a rank hold a few
// per mille of the keys whatever the scale of the similarities; the leading bits of floats would put a twentieth of all
// unit vectors' similarities into one bin and its counter. A pass counts the bins, a second one collects the keys of
// the two bins that hold the ranks in shared memory, where a ladder of 10-bit histograms on order keys, and on indices
// where keys are equal, narrows down to the one key. Infinities and NaN have bins of their own. Where the two bins hold
// more than shared memory takes, the second pass finds their lowest and highest key only, and the ladder climbs on the
// row itself until the rest fits: at most 4 passes for keys and 4 for indices, one in all where one value is the rule.
//
// Bytes: 2 * 4 N K, of which the second pass finds in L2 what fits there. Operations: about 12 and 11 instructions per
// similarity, and an atomic in shared memory. Floor: 4 N K over the bandwidth.
//
// Atomics count, and append to what is unordered; the result does not depend on the order.
#pragma once

#include "ring/ladder.cuh"

namespace iecl_fast::ring::gpu {

constexpr int kSampled = kThreads;

// Linear bins are numbered as the bits of 2^23 + i are, which is how a float is rounded to an integer.
constexpr uint32_t kOrigin = 0x4b000000;
constexpr uint32_t kBelowRange = kOrigin, kFirstBin = kOrigin + 1, kLastBin = kOrigin + kBins - 4;
constexpr uint32_t kInfinity = kOrigin + kBins - 2, kNotANumber = kOrigin + kBins - 1;

// Linear bins between the sample's extremes. They ascend with the value, so none comes between the ranks of another.
struct Scale {
  float low, factor;

  __device__ __forceinline__ uint32_t finite_bin(float value) const {
    const float position = fminf(fmaxf((value - low) * factor, 1.0f), float(kLastBin - kOrigin));
    return uint32_t(__float_as_int(position + 8388608.0f));
  }
  __device__ __forceinline__ uint32_t bin(float value) const {
    if (fabsf(value) < INFINITY) return finite_bin(value);
    return value > 0.0f ? kInfinity : value < 0.0f ? kBelowRange : kNotANumber;
  }
  __device__ __forceinline__ void bins(const float (&values)[4], uint32_t (&bins)[4]) const {
    float sum = 0.0f;  // NaN unless all four are finite
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = __fmaf_rn(values[i], 0.0f, sum);
#pragma unroll
    for (int i = 0; i < 4; ++i) bins[i] = finite_bin(values[i]);
    if (sum == 0.0f) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) bins[i] = bin(values[i]);
  }
};

// A thread's one of kSampled keys spread over the row.
__device__ __forceinline__ float sample(const RowSource& source) {
  return source.value(uint32_t(uint64_t(threadIdx.x) * source.size / kSampled));
}

// The range of the finite ones among the sampled values.
__device__ __forceinline__ Scale scale_of(Workspace& shared, float value) {
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
__device__ __forceinline__ void count_bins(Workspace& shared, const RowSource& source, const Scale scale,
                                           uint32_t first, uint32_t last) {
  source.visit(first, last, [&](const float(&values)[4], int mask, auto) {
    uint32_t bins[4];
    scale.bins(values, bins);
    count_four(shared.histogram, bins, mask, kOrigin);
  });
  if (threadIdx.x == 0 && first <= source.excluded && source.excluded <= last) {
    atomicSub(counter(shared.histogram, scale.bin(source.value(source.excluded)), kOrigin), 1u);
  }
}

// For gather: by the targets' bins.
struct InBins {
  const RowSource& source;
  Scale scale;
  uint32_t first, second;

  template <class Index>
  __device__ __forceinline__ int operator()(const float (&values)[4], int mask, const Index& index,
                                            int (&of)[4]) const {
    uint32_t bins[4];
    scale.bins(values, bins);
    int hits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) hits |= (bins[i] == first || bins[i] == second) << i;
    mask &= hits;
    if (mask == 0) return 0;  // as nearly always
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of[i] = !(mask >> i & 1) ? -1 : bins[i] == first ? 0 : 1;
      if (of[i] >= 0 && source.excludes(i, index)) of[i] = -1;
      if (of[i] < 0) mask &= ~(1 << i);
    }
    return mask;
  }
};

__device__ __forceinline__ InBins in_bins(const RowSource& source, const Scale scale, const Found (&found)[2]) {
  return {source, scale, kOrigin + found[0].bin, kOrigin + found[1].bin};
}

// The results among the keys whose bins hold the wanted places.
__device__ __forceinline__ void select_in_bins(Workspace& shared, const RowSource& source, const Scale scale,
                                               const Found (&found)[2]) {
  Target targets[2];
  for (int t = 0; t < 2; ++t) targets[t] = {0, 0, 0, source.size - 1, found[t].rank, found[t].count};
  const bool same = found[0].bin == found[1].bin, fits = remaining(targets, same) <= kMaxCollected;
  gather(shared, source, targets, same, fits, in_bins(source, scale, found));
  if (!fits) collect(shared, source, targets);
  finish(shared, targets);
}

__device__ __forceinline__ void select_in_row(Workspace& shared, const RowSource& source, const uint32_t (&wanted)[2]) {
  const float sampled = sample(source);  // on its way while the counts are cleared
  clear(shared.histogram);
  const Scale scale = scale_of(shared, sampled);
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
          excluded_key(exclude, row)};
}

// ---- a block for each row ------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 2) select_kernel(const Similarities similarities, const Ranks ranks,
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
  const Scale scale = scale_of(shared, sample(source_of(similarities, nullptr, row)));
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

// For gather: everything belongs to target 0.
struct AllOfFirst {
  template <class Index>
  __device__ __forceinline__ int operator()(const int32_t (&)[4], int mask, const Index&, int (&of)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) of[i] = 0;
    return mask;
  }
};

__device__ __forceinline__ void select_in_segments(Workspace& shared, const SegmentSource& source, uint32_t total,
                                                   const uint32_t (&wanted)[2]) {
  Target targets[2];
  for (int t = 0; t < 2; ++t) targets[t] = {0, 0, 0, uint32_t(INT32_MAX), wanted[t], total};
  const bool fits = total <= kMaxCollected;
  gather(shared, source, targets, true, fits, AllOfFirst());
  if (!fits) collect(shared, source, targets);
  finish(shared, targets);
}

__global__ void __launch_bounds__(kThreads, 2) finish_kernel(const Similarities similarities, const Ranks ranks,
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

__global__ void __launch_bounds__(kThreads, 2) select_candidates_kernel(const Candidates candidates,
                                                                        const int64_t* ranks,
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
