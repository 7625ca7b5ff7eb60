// Host contract of the Ring operators: negatives between two ranks of similarity, of all keys, for each query.
//
// Similarity is the dot product with float32 accumulation, summed over channels in ascending order, so the same pair has
// the same bits in every pass. Keys are ranked in ascending (similarity, key index); NaN is above +inf, -0 equals +0.
// All results are independent of the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "matrix.h"
#include "parallel.h"

namespace iecl_fast::ring {

// Members are the ascending ranks lower .. upper - 1.
struct RankRange {
  int64_t lower;
  int64_t upper;
};

struct Problem {
  Matrix query;            // (N, C)
  Matrix keys;             // (K, C), K < 2^32
  RankRange ranks;         // of all K keys
  RankRange ranks_of_rest; // of the K - 1 other keys, for a query that excludes one
  const int64_t* exclude;  // (N,) index of the key that is no candidate, -1 for none; or nullptr
  const RankRange* row_ranks = nullptr;  // (N,) each query's own, any of them empty; `ranks` is then a typical one

  bool excludes_one(int64_t row) const { return exclude && exclude[row] >= 0; }
  RankRange range(int64_t row) const {
    return row_ranks ? row_ranks[row] : excludes_one(row) ? ranks_of_rest : ranks;
  }
};

// similarities (N, M) and, unless nullptr, indices (N, M) of the ring's members in ascending key index.
// M = `size`, the same for every row.
void sample_cpu(const Problem& problem, int64_t size, float* similarities, int64_t* indices, ParallelFor parallel);

// The members at the positions floor(uniform * M) of that order, uniform (N, S) in [0, 1) and M each row's own number of
// members: similarities (N, S) and, unless nullptr, indices (N, S).
void draw_cpu(const Problem& problem, const double* uniform, int64_t num_samples, float* similarities,
              int64_t* indices, ParallelFor parallel);

// loss (N,) = -log(exp(q.k/T) / (exp(q.k/T) + sum over the ring of exp(q.n/T))), and
// log_denominator (N,), the logarithm of what it is divided by.
// Unless nullptr, query_gradient (N, C) is the gradient of each row's loss with respect to its query.
void info_nce_cpu(const Problem& problem, const Matrix& positive, double temperature, float* loss,
                  double* log_denominator, float* query_gradient, ParallelFor parallel);

// log_sum (N,): the logarithm of the sum of exp(q.n/T) over the ring, -inf if it is empty, and unless nullptr mean_key
// (N, C), the mean of its keys with these weights, 0 if it is empty.
void ring_sums_cpu(const Problem& problem, double temperature, double* log_sum, float* mean_key, ParallelFor parallel);

// keys_gradient (K, C): the gradient of sum over n of loss_gradient[n] * loss[n] with respect to the keys.
void info_nce_keys_gradient_cpu(const Problem& problem, double temperature, const double* log_denominator,
                                const float* loss_gradient, float* keys_gradient, ParallelFor parallel);

// The gradients of similarities[n, m] = query[n] . keys[indices[n, m]], given theirs.
void sample_query_gradient_cpu(const float* gradient, const int64_t* indices, int64_t num_samples, const Matrix& keys,
                               int64_t num_queries, float* query_gradient, ParallelFor parallel);
void sample_keys_gradient_cpu(const float* gradient, const int64_t* indices, int64_t num_samples, const Matrix& query,
                              int64_t num_keys, float* keys_gradient, ParallelFor parallel);

// ---- what the holder of a part of the keys does so that all holders find the boundaries of their common ring ----

// similarities (N, size) with `size` sampled keys, the same at each call: one from each of as many equal cells.
void shard_sample_cpu(const Matrix& query, const Matrix& keys, int64_t size, float* similarities, ParallelFor parallel);

// A window for each of a query's two boundaries, and the keys in it.
struct ShardWindows {
  std::vector<int64_t> below;       // [N, 2] keys below each window
  std::vector<int64_t> counts;      // [N, 2] keys in it
  std::vector<int32_t> order_keys;  // of these, one window after the other; they ascend with the similarity
};

// centers (N, 2): how many keys of the sample of `size` lie below each boundary, -1 where none is to be found. A window
// ends `deviations` standard deviations of such a count to both sides of it; without a sample it holds all keys.
ShardWindows shard_windows_cpu(const Problem& problem, const int64_t* centers, int64_t size, double deviations,
                               ParallelFor parallel);

// histogram [L, B, kBins] of lists of order keys, `counts` [L] of them one list after the other: for each of the B ranges
// of a list, low [L, B] to low + kBins * 2^shift - 1, how many keys lie in each kBins-th part of it.
constexpr int64_t kBins = 64;
void order_histogram_cpu(const int32_t* order_keys, const int64_t* counts, int64_t lists, const int64_t* low,
                         int64_t ranges, int shift, int32_t* histogram, ParallelFor parallel);

// Instruction set of the kernels that run on this machine: "avx512", "avx2" or "portable".
const char* instruction_set();

}  // namespace iecl_fast::ring
