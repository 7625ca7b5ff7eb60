// Launches of the selection kernels: how many blocks share a row, and the workspace's layout.

#include "ring/gpu.h"
#include "ring/pieces.h"
#include "ring/select.cuh"

#include <algorithm>
#include <cstdint>

namespace iecl_fast::ring::gpu {

namespace {

Splits splits_in(Pieces& pieces, int64_t rows, int64_t keys, int64_t count) {
  Splits splits{count, uint32_t((keys + count - 1) / count)};
  splits.scales = pieces.take<Scale>(rows);
  splits.histogram = pieces.take<uint32_t>(rows * kBins);
  splits.ranks = pieces.take<int64_t>(2 * rows);
  const int64_t candidates = rows * count * kMaxCollected;
  splits.candidates = {pieces.take<int32_t>(candidates), pieces.take<int32_t>(candidates),
                       pieces.take<int32_t>(rows * count), rows, count, kMaxCollected};
  return splits;
}

}  // namespace

int64_t splits_of(int64_t rows, int64_t keys) {
  constexpr int64_t kLeast = 1 << 16, kMost = 1 << 17, kBlocks = 256;
  const int64_t to_fill_the_chip = (kBlocks + rows - 1) / std::max<int64_t>(rows, 1);
  const int64_t wanted = std::max(to_fill_the_chip, (keys + kMost - 1) / kMost);
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(keys / kLeast, 1));
}

int64_t select_workspace_bytes(int64_t rows, int64_t keys, int64_t splits) {
  if (splits == 1) return 0;
  Pieces pieces(nullptr);
  splits_in(pieces, rows, keys, splits);
  return pieces.bytes();
}

void select(const Similarities& similarities, const Ranks& ranks, const int64_t* exclude, int64_t splits,
            const Boundaries& boundaries, void* workspace, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const unsigned rows = similarities.rows, blocks = similarities.rows * splits;
  if (rows == 0) return;
  if (splits == 1) {
    IECL_LAUNCH(select_kernel, rows, kThreads, 0, stream, similarities, ranks, exclude, boundaries);
    return;
  }
  Pieces pieces(workspace);
  const Splits shared_out = splits_in(pieces, similarities.rows, similarities.keys, splits);
  IECL_LAUNCH(prepare_kernel, rows, kThreads, 0, stream, similarities, shared_out);
  IECL_LAUNCH(count_kernel, blocks, kThreads, 0, stream, similarities, exclude, shared_out);
  IECL_LAUNCH(collect_kernel, blocks, kThreads, 0, stream, similarities, ranks, exclude, shared_out);
  IECL_LAUNCH(finish_kernel, rows, kThreads, 0, stream, similarities, ranks, exclude, shared_out, boundaries);
}

void select_candidates(const Candidates& candidates, const int64_t* ranks, const Boundaries& boundaries,
                       void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (candidates.rows == 0) return;
  IECL_LAUNCH(select_candidates_kernel, unsigned(candidates.rows), kThreads, 0, stream, candidates, ranks, boundaries);
}

}  // namespace iecl_fast::ring::gpu
