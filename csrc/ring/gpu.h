// Host contract of the Ring kernels on the GPU: selection of ranks, compaction, draws and gradients of similarities
// that lie in memory. Pointers are the device's, `stream` is a cudaStream_t, launches return at once.
//
// Keys are ranked in ascending (similarity, key index) as in ring.h. The boundary of rank r is the place of the key
// with that rank: its order key (order.cuh) and its index. A key lies below it if its order key is lower, or equal and
// its index is lower. The boundary of rank 0 is (INT32_MIN, 0), and that of the number of candidates is above all keys.
#pragma once

#include <cstdint>

#include "matrix.h"

namespace iecl_fast::ring::gpu {

constexpr uint32_t kNoKey = UINT32_MAX;

// (rows, keys), keys < 2^31, strides in elements.
struct Similarities {
  const float* data;
  int64_t rows;
  int64_t keys;
  int64_t row_stride;
  int64_t key_stride;
};

// Ascending ranks: the ring's lower and upper one among all keys, and for rows that exclude one among the others.
struct Ranks {
  int64_t all[2];
  int64_t rest[2];
};

struct Boundaries {
  int32_t* thresholds;  // (rows, 2) order keys, for the lower and the upper rank
  int64_t* ties;        // (rows, 2) key indices
};

// The numbers of candidates that each row's segments hold, and they themselves.
struct Candidates {
  const int32_t* keys;     // (rows, segments, capacity) order keys
  const int32_t* indices;  // (rows, segments, capacity) key indices
  const int32_t* counts;   // (rows, segments)
  int64_t rows;
  int64_t segments;
  int64_t capacity;
};

// How many blocks share a row, by its length and the number of rows.
int64_t splits_of(int64_t rows, int64_t keys);

// exclude: (rows,) the key that is no candidate, -1 for none; or nullptr.
// Workspaces take as many bytes as the function before says, aligned to 256.
int64_t select_workspace_bytes(int64_t rows, int64_t keys, int64_t splits);
void select(const Similarities& similarities, const Ranks& ranks, const int64_t* exclude, int64_t splits,
            const Boundaries& boundaries, void* workspace, void* stream);

// ranks: (rows, 2) among each row's candidates, ascending; any others give any result.
void select_candidates(const Candidates& candidates, const int64_t* ranks, const Boundaries& boundaries, void* stream);

// The first `size` members of each row's ring in ascending index: values (rows, size) and, unless nullptr, their
// indices. Where there are fewer, the rest of the row is left as it was.
int64_t compact_workspace_bytes(int64_t rows, int64_t splits);
void compact(const Similarities& similarities, const Boundaries& boundaries, const int64_t* exclude, int64_t size,
             int64_t splits, float* values, int64_t* indices, void* workspace, void* stream);

// The members at the places floor(uniform * M) of that order, uniform (rows, samples) in [0, 1) and M the row's own
// number of members by its ranks: values (rows, samples) and, unless nullptr, their indices.
int64_t draw_workspace_bytes(int64_t rows, const Ranks& ranks, int64_t splits);
void draw(const Similarities& similarities, const Boundaries& boundaries, const Ranks& ranks, const int64_t* exclude,
          const double* uniform, int64_t samples, int64_t splits, float* values, int64_t* indices, void* workspace,
          void* stream);

// query_gradient (rows, C): the sum over m of gradient[n, m] * keys[indices[n, m]].
int64_t query_gradient_workspace_bytes(int64_t rows, int64_t samples, int64_t channels);
void sample_query_gradient(const float* gradient, const int64_t* indices, int64_t rows, int64_t samples,
                           const Matrix& keys, float* query_gradient, void* workspace, void* stream);

// keys_gradient (num_keys, C): for each key the sum of gradient[n, m] * query[n] over all (n, m) with that index.
// sorted: the indices in ascending order; order: where each was in (rows, samples) before, ascending among equal ones.
void sample_keys_gradient(const float* gradient, const int64_t* sorted, const int64_t* order, int64_t samples,
                          const Matrix& query, int64_t num_keys, float* keys_gradient, void* stream);

}  // namespace iecl_fast::ring::gpu
