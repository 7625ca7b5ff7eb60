// Launches of the kernels that write members of the ring.

#include "ring/compact.cuh"
#include "ring/gpu.h"
#include "ring/pieces.h"

#include <algorithm>
#include <cstdint>

namespace iecl_fast::ring::gpu {

namespace {

// The widest of the rows' rings: the indices of all members are kept in that many columns.
int64_t widest(const Ranks& ranks) {
  return std::max<int64_t>({ranks.all[1] - ranks.all[0], ranks.rest[1] - ranks.rest[0], 1});
}

void write_members(const Similarities& similarities, const Boundaries& boundaries, const int64_t* exclude,
                   int64_t splits, uint32_t* counts, const Results& results, cudaStream_t stream) {
  const unsigned blocks = similarities.rows * splits;
  if (splits > 1) {
    IECL_LAUNCH(count_members_kernel, blocks, kThreads, 0, stream, similarities, boundaries, exclude, splits, counts);
  }
  IECL_LAUNCH(compact_kernel, blocks, kThreads, 0, stream, similarities, boundaries, exclude, splits, counts, results);
}

}  // namespace

int64_t compact_workspace_bytes(int64_t rows, int64_t splits) {
  return splits == 1 ? 0 : rows * splits * int64_t(sizeof(uint32_t));
}

void compact(const Similarities& similarities, const Boundaries& boundaries, const int64_t* exclude, int64_t size,
             int64_t splits, float* values, int64_t* indices, void* workspace, void* stream) {
  if (similarities.rows == 0 || size == 0) return;
  write_members(similarities, boundaries, exclude, splits, static_cast<uint32_t*>(workspace),
                {values, indices, nullptr, size}, static_cast<cudaStream_t>(stream));
}

int64_t draw_workspace_bytes(int64_t rows, const Ranks& ranks, int64_t splits) {
  Pieces pieces(nullptr);
  pieces.take<uint32_t>(rows * widest(ranks));
  pieces.take<uint32_t>(rows * splits);
  return pieces.bytes();
}

void draw(const Similarities& similarities, const Boundaries& boundaries, const Ranks& ranks, const int64_t* exclude,
          const double* uniform, int64_t samples, int64_t splits, float* values, int64_t* indices, void* workspace,
          void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const int64_t draws = similarities.rows * samples, width = widest(ranks);
  if (draws == 0) return;
  Pieces pieces(workspace);
  uint32_t* members = pieces.take<uint32_t>(similarities.rows * width);
  uint32_t* counts = pieces.take<uint32_t>(similarities.rows * splits);
  write_members(similarities, boundaries, exclude, splits, counts, {nullptr, nullptr, members, width}, stream);
  IECL_LAUNCH(draw_kernel, unsigned((draws + kThreads - 1) / kThreads), kThreads, 0, stream, similarities, ranks,
              exclude, uniform, samples, members, width, values, indices);
}

}  // namespace iecl_fast::ring::gpu
