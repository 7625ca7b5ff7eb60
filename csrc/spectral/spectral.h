// Host contract of spectral normalisation: many layers' weights divided by estimates of their largest singular value.
//
// A weight is a matrix W (rows, columns), dense in memory. One step of power iteration, as in torch:
//     u = W v / max(|W v|, eps),   v = W^T u / max(|W^T u|, eps),   sigma = u . W v
// The last equals |W^T u|^2 / max(|W^T u|, eps) with the new v, and W^T (W v) is a sum over rows, so a step reads W
// once: each row is multiplied by v, and by that product added to W^T (W v), while it lies in the nearest cache.
// A weight that v maps to zero keeps u and v, gets sigma = 0 and is passed on undivided.
// All results are independent of the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "matrix.h"
#include "parallel.h"

namespace iecl_fast::spectral {

struct Layer {
  const void* weight;
  Dtype dtype;
  int64_t rows;
  int64_t columns;
  // Column c = channel * positions + position of the matrix lies at position * channels + channel in memory
  // (a channels-last weight). channels = columns where memory has the matrix's own order.
  int64_t channels;

  int64_t positions() const { return channels == 0 ? 0 : columns / channels; }
  int64_t size() const { return rows * columns; }
};

// vectors: u (rows) and v (columns) of the first layer, then of the next, ...; read, and replaced if iterations > 0.
// sigma: (layers,). normalised: (layers,) pointers to weights / sigma in the weights' dtypes, or nullptr.
void norm_cpu(const std::vector<Layer>& layers, int64_t iterations, double eps, float* vectors, float* sigma,
              void* const* normalised, ParallelFor parallel);

// The gradients of the weights, u and v held fixed: (G - <G, W> / sigma u v^T) / sigma, G that of weight / sigma.
// gradients and weight_gradients are laid out as the weights.
void norm_gradient_cpu(const std::vector<Layer>& layers, const void* const* gradients, const float* vectors,
                       const float* sigma, void* const* weight_gradients, ParallelFor parallel);

// The same on the GPU, on a stream (cudaStream_t). The pointers are the device's, except those to arrays of pointers.
// `workspace` takes workspace_bytes_cuda(layers), aligned to 256.
int64_t workspace_bytes_cuda(const std::vector<Layer>& layers);
void norm_cuda(const std::vector<Layer>& layers, int64_t iterations, double eps, float* vectors, float* sigma,
               void* const* normalised, void* workspace, void* stream);
void norm_gradient_cuda(const std::vector<Layer>& layers, const void* const* gradients, const float* vectors,
                        const float* sigma, void* const* weight_gradients, void* workspace, void* stream);

}  // namespace iecl_fast::spectral
