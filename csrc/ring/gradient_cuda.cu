// Launches of the gradients' kernels.

#include "ring/gpu.h"
#include "ring/gradient.cuh"

#include <algorithm>
#include <cstdint>

namespace iecl_fast::ring::gpu {

namespace {

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t gradient_splits(int64_t samples) { return std::max<int64_t>(ceil_divide(samples, kSplitSamples), 1); }

// Calls run(T()) with the type that the matrix holds.
template <class Run>
void with_type(const Matrix& matrix, const Run& run) {
  if (matrix.dtype == Dtype::kFloat32) {
    run(float());
  } else if (matrix.dtype == Dtype::kFloat16) {
    run(__half());
  } else {
    run(__nv_bfloat16());
  }
}

}  // namespace

int64_t query_gradient_workspace_bytes(int64_t rows, int64_t samples, int64_t channels) {
  return rows * gradient_splits(samples) * channels * int64_t(sizeof(float));
}

void sample_query_gradient(const float* gradient, const int64_t* indices, int64_t rows, int64_t samples,
                           const Matrix& keys, float* query_gradient, void* workspace, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const int64_t splits = gradient_splits(samples), channels = keys.columns, results = rows * channels;
  if (results == 0) return;
  float* parts = static_cast<float*>(workspace);
  const unsigned blocks = rows * splits * ceil_divide(channels, kWarpChannels);
  with_type(keys, [&](auto type) {
    using T = decltype(type);
    IECL_LAUNCH(query_gradient_kernel<T>, blocks, kGradientThreads, 0, stream, gradient, indices, samples, splits, keys,
                parts);
  });
  IECL_LAUNCH(add_parts_kernel, unsigned(ceil_divide(results, kGradientThreads)), kGradientThreads, 0, stream, parts,
              rows, splits, channels, query_gradient);
}

void sample_keys_gradient(const float* gradient, const int64_t* sorted, const int64_t* order, int64_t samples,
                          const Matrix& query, int64_t num_keys, float* keys_gradient, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (num_keys == 0 || query.columns == 0) return;
  with_type(query, [&](auto type) {
    using T = decltype(type);
    IECL_LAUNCH(keys_gradient_kernel<T>, unsigned(ceil_divide(num_keys, kGradientWarps)), kGradientThreads, 0, stream,
                gradient, sorted, order, samples, query, num_keys, keys_gradient);
  });
}

}  // namespace iecl_fast::ring::gpu
