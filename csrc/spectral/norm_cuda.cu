// Launches of the spectral kernels: the table of layers, the workspace's layout, the grids.

#include "spectral/norm.cuh"
#include "spectral/spectral.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace iecl_fast::spectral {

using namespace gpu;

namespace {

constexpr int64_t kAlignment = 256;
int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct Plan {
  std::vector<Entry> entries;  // layers of no elements have no blocks
  int64_t products = 0;        // floats
  int64_t chunks = 0;
  int64_t slabs = 0;

  explicit Plan(const std::vector<Layer>& layers) {
    int64_t vectors = 0;
    for (const Layer& layer : layers) {
      const int64_t columns = std::max<int64_t>(layer.columns, 1);
      const int64_t chunk_rows = std::clamp<int64_t>(kChunk / columns, 1, kMaxChunkRows);
      const int64_t count = layer.size() == 0 ? 0 : (layer.rows + chunk_rows - 1) / chunk_rows;
      Entry entry{};
      entry.weight = layer.weight;
      entry.rows = layer.rows;
      entry.columns = layer.columns;
      entry.channels = layer.channels;
      entry.positions = layer.size() == 0 ? 1 : layer.positions();
      entry.dtype = layer.dtype;
      entry.vectors = vectors;
      entry.row_products = products;
      entry.parts = products + layer.rows;
      entry.first_chunk = chunks;
      entry.first_slab = slabs;
      entry.chunk_rows = chunk_rows;
      entries.push_back(entry);
      vectors += layer.rows + layer.columns;
      products += layer.rows + std::max<int64_t>(count, 1) * layer.columns;
      chunks += count;
      slabs += layer.size() == 0 ? 0 : (layer.columns + kThreads - 1) / kThreads;
    }
  }

  int64_t table_bytes() const { return aligned(entries.size() * sizeof(Entry)); }
  int64_t squares_bytes() const { return aligned(std::max(chunks, slabs) * sizeof(double)); }
  int64_t bytes() const { return table_bytes() + squares_bytes() + products * sizeof(float); }

  Table upload(float* vectors, float* sigma, void* workspace, cudaStream_t stream) const {
    char* begin = static_cast<char*>(workspace);
    Table table{reinterpret_cast<Entry*>(begin), int(entries.size()), vectors, sigma};
    table.squares = reinterpret_cast<double*>(begin + table_bytes());
    table.products = reinterpret_cast<float*>(begin + table_bytes() + squares_bytes());
    for (int first = 0; first < table.layers; first += kSlice) {
      const int count = std::min(kSlice, table.layers - first);
      Slice slice{};
      std::copy_n(entries.begin() + first, count, slice.entries);
      IECL_LAUNCH(describe_kernel, 1, 64, 0, stream, slice, first, count, table.entries);
    }
    return table;
  }
};

}  // namespace

int64_t workspace_bytes_cuda(const std::vector<Layer>& layers) { return Plan(layers).bytes(); }

void norm_cuda(const std::vector<Layer>& layers, int64_t iterations, double eps, float* vectors, float* sigma,
               void* const* normalised, void* workspace, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  Plan plan(layers);
  if (layers.empty()) return;
  for (size_t i = 0; normalised != nullptr && i < layers.size(); ++i) plan.entries[i].out = normalised[i];
  const Table table = plan.upload(vectors, sigma, workspace, stream);
  const unsigned chunks = plan.chunks, slabs = plan.slabs, count = layers.size();
  for (int64_t i = 0; i < iterations && chunks > 0; ++i) {
    IECL_LAUNCH(multiply_kernel, chunks, kThreads, 0, stream, table, true);
    IECL_LAUNCH(add_parts_kernel, slabs, kThreads, 0, stream, table);
    IECL_LAUNCH(next_vectors_kernel, count, kThreads, 0, stream, table, eps);
  }
  if (iterations == 0 && chunks > 0) {
    IECL_LAUNCH(multiply_kernel, chunks, kThreads, 0, stream, table, false);
    IECL_LAUNCH(sigma_kernel, count, kThreads, 0, stream, table);
  }
  if (normalised != nullptr && chunks > 0) IECL_LAUNCH(divide_kernel, chunks, kThreads, 0, stream, table);
}

void norm_gradient_cuda(const std::vector<Layer>& layers, const void* const* gradients, const float* vectors,
                        const float* sigma, void* const* weight_gradients, void* workspace, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  Plan plan(layers);
  if (plan.chunks == 0) return;
  for (size_t i = 0; i < layers.size(); ++i) {
    plan.entries[i].gradient = gradients[i];
    plan.entries[i].out = weight_gradients[i];
  }
  // The kernels of the gradient only read u, v and sigma.
  const Table table = plan.upload(const_cast<float*>(vectors), const_cast<float*>(sigma), workspace, stream);
  IECL_LAUNCH(inner_product_kernel, unsigned(plan.chunks), kThreads, 0, stream, table);
  IECL_LAUNCH(gradient_kernel, unsigned(plan.chunks), kThreads, 0, stream, table);
}

}  // namespace iecl_fast::spectral
