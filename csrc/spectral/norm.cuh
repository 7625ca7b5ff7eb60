// Spectral normalisation on the GPU: kernels over a table of all layers, as many launches for one layer as for hundreds.
//
//   describe    writes the table, from kernel arguments: a captured graph then holds no pointer into the host's memory
//   multiply    W v, and W^T (W v) of each chunk of rows                 reads W (the second product finds it in L2)
//   add_parts   adds up W^T (W v) and its squares                        reads 1 / (rows of a chunk) of W, from L2
//   finish      u, v, sigma
//   divide      W / sigma                                                reads and writes W
//
// The middle three once per iteration. Operations: 4 for each weight and iteration, and a division: far from a limit.
// Floor: 3 passes over the weights in bytes over bandwidth, 2 if they fit into L2.
// No atomics and every sum in a fixed order, so results are the same bits in every run.
#pragma once

#include <cstdint>

#include "device.h"
#include "floats.cuh"
#include "matrix.h"

namespace iecl_fast::spectral::gpu {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kChunk = int64_t{1} << 15;  // elements of a block's rows
constexpr int64_t kMaxChunkRows = 256;

struct Entry {
  const void* weight;
  const void* gradient;  // of the normalised weight
  void* out;
  int64_t rows, columns;
  int64_t vectors;               // offset of u; v follows
  int64_t row_products;          // offset of W v in the workspace
  int64_t parts;                 // offset of the chunks' W^T (W v), which are added up in the first
  uint32_t channels, positions;  // as in Layer: columns < 2^32
  int32_t first_chunk, first_slab;  // of the grids below
  int32_t chunk_rows;
  Dtype dtype;
};

// Arguments of a kernel may take 32 KB since CUDA 12.1, 4 KB before.
#if defined(IECL_SPECTRAL_SLICE)
constexpr int kSlice = IECL_SPECTRAL_SLICE;
#elif CUDART_VERSION >= 12010
constexpr int kSlice = 320;
#else
constexpr int kSlice = 40;
#endif
struct Slice {
  Entry entries[kSlice];
};

struct Table {
  Entry* entries;
  int layers;
  float* vectors;
  float* sigma;
  float* products;    // W v and the parts of W^T (W v) of all layers
  double* squares;    // of the parts' sums, for each slab
};

// Where the v of a column in memory lies, see Layer::channels.
__device__ __forceinline__ int64_t v_index(const Entry& entry, int64_t column) {
  const uint32_t c = column;
  return entry.positions == 1 ? c : c % entry.channels * entry.positions + c / entry.channels;
}

// The layer that a block works for: the last one whose first block is not after it. All threads get the same.
__device__ __forceinline__ int find(const Table& table, int32_t Entry::* first) {
  int low = 0, high = table.layers - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.entries[middle].*first <= static_cast<int32_t>(blockIdx.x)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Calls run(T()) with the type of a layer's elements.
template <class Run>
__device__ __forceinline__ void with_type(const Entry& entry, const Run& run) {
  if (entry.dtype == Dtype::kFloat32) {
    run(float());
  } else if (entry.dtype == Dtype::kFloat16) {
    run(__half());
  } else {
    run(__nv_bfloat16());
  }
}

struct Rows {
  int64_t begin, end;
};
__device__ __forceinline__ Rows rows_of_block(const Entry& entry) {
  const int64_t begin = int64_t(blockIdx.x - entry.first_chunk) * entry.chunk_rows;
  return {begin, min(begin + entry.chunk_rows, entry.rows)};
}

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// The sum over the block's threads, the same bits for each of them.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double of_warps[kWarps];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp];
  __syncthreads();
  return sum;
}

__global__ void describe_kernel(const Slice slice, int first, int count, Entry* entries) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) entries[first + i] = slice.entries[i];
}

template <class T>
__device__ __forceinline__ void multiply_rows(const Table& table, const Entry& entry, bool transposed_too) {
  __shared__ float factors[kMaxChunkRows];
  __shared__ float sums[kThreads];
  const Rows rows = rows_of_block(entry);
  const T* weight = static_cast<const T*>(entry.weight) + rows.begin * entry.columns;
  const float* v = table.vectors + entry.vectors + entry.rows;
  const int count = rows.end - rows.begin;

  for (int row = threadIdx.x / 32; row < count; row += kWarps) {
    const T* values = weight + row * entry.columns;
    float product = 0.0f;
#pragma unroll 8
    for (int64_t c = threadIdx.x % 32; c < entry.columns; c += 32) {
      product += to_float(values[c]) * v[v_index(entry, c)];
    }
    product = warp_sum(product);
    if (threadIdx.x % 32 == 0) {
      factors[row] = product;
      table.products[entry.row_products + rows.begin + row] = product;
    }
  }
  if (!transposed_too) return;
  __syncthreads();

  // Few columns: several groups of threads share the rows.
  const int width = entry.columns >= kThreads ? kThreads : (int(entry.columns) + 31) / 32 * 32;
  const int groups = kThreads / width, group = threadIdx.x / width;
  float* part = table.products + entry.parts + int64_t(blockIdx.x - entry.first_chunk) * entry.columns;
  for (int64_t first = 0; first < entry.columns; first += width) {
    const int64_t c = first + threadIdx.x % width;
    float sum = 0.0f;
    if (group < groups && c < entry.columns) {
#pragma unroll 8
      for (int row = group; row < count; row += groups) {
        sum += factors[row] * to_float(weight[row * entry.columns + c]);
      }
    }
    if (groups > 1) {
      sums[threadIdx.x] = sum;
      __syncthreads();
      for (int other = 1; group == 0 && other < groups; ++other) sum += sums[threadIdx.x + other * width];
      __syncthreads();
    }
    if (group == 0 && c < entry.columns) part[c] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) multiply_kernel(const Table table, bool transposed_too) {
  const Entry entry = table.entries[find(table, &Entry::first_chunk)];
  with_type(entry, [&](auto type) { multiply_rows<decltype(type)>(table, entry, transposed_too); });
}

// A block adds up the parts of kThreads columns.
__global__ void __launch_bounds__(kThreads) add_parts_kernel(const Table table) {
  const Entry entry = table.entries[find(table, &Entry::first_slab)];
  const int64_t column = int64_t(blockIdx.x - entry.first_slab) * kThreads + threadIdx.x;
  const int64_t count = (entry.rows + entry.chunk_rows - 1) / entry.chunk_rows;
  float* parts = table.products + entry.parts;
  float sum = 0.0f;
  if (column < entry.columns) {
#pragma unroll 8
    for (int64_t part = 0; part < count; ++part) sum += parts[part * entry.columns + column];
    parts[column] = sum;
  }
  const double squares = block_sum(double(sum) * sum);
  if (threadIdx.x == 0) table.squares[blockIdx.x] = squares;
}

// W^T u, when the squares in W^T (W v) leave the range of floats. By one block: nothing here has to be fast.
template <class T>
__device__ __forceinline__ void multiply_transposed(const Entry& entry, const float* u, float* product) {
  const T* weight = static_cast<const T*>(entry.weight);
  for (int64_t c = threadIdx.x; c < entry.columns; c += kThreads) {
    float sum = 0.0f;
    for (int64_t row = 0; row < entry.rows; ++row) sum += u[row] * to_float(weight[row * entry.columns + c]);
    product[c] = sum;
  }
}

// A block for each layer: the next u and v, and sigma. As next_vectors in norm_cpu.cpp.
__global__ void __launch_bounds__(kThreads) next_vectors_kernel(const Table table, double eps) {
  const Entry entry = table.entries[blockIdx.x];
  float* u = table.vectors + entry.vectors;
  float* v = u + entry.rows;
  const float* row_products = table.products + entry.row_products;
  float* product = table.products + entry.parts;
  double square = 0.0;
  for (int64_t row = threadIdx.x; row < entry.rows; row += kThreads) {
    square += double(row_products[row]) * row_products[row];
  }
  const double length = sqrt(block_sum(square));
  if (length == 0.0) {
    if (threadIdx.x == 0) table.sigma[blockIdx.x] = 0.0f;
    return;
  }
  const double u_divisor = max(length, eps);
  for (int64_t row = threadIdx.x; row < entry.rows; row += kThreads) u[row] = row_products[row] / u_divisor;

  square = 0.0;
  const int64_t slabs = (entry.columns + kThreads - 1) / kThreads;
  for (int64_t slab = threadIdx.x; slab < slabs; slab += kThreads) square += table.squares[entry.first_slab + slab];
  double length_of_product = sqrt(block_sum(square)), v_divisor = u_divisor;
  if (!(length_of_product > 1e-28 && length_of_product < 1e36)) {
    with_type(entry, [&](auto type) { multiply_transposed<decltype(type)>(entry, u, product); });
    v_divisor = 1.0;
    square = 0.0;
    for (int64_t c = threadIdx.x; c < entry.columns; c += kThreads) square += double(product[c]) * product[c];
    length_of_product = sqrt(block_sum(square));
  }
  length_of_product /= v_divisor;
  v_divisor *= max(length_of_product, eps);
  for (int64_t c = threadIdx.x; c < entry.columns; c += kThreads) v[v_index(entry, c)] = product[c] / v_divisor;
  if (threadIdx.x == 0) table.sigma[blockIdx.x] = length_of_product * (length_of_product / max(length_of_product, eps));
}

// sigma = u . W v, u and v as they are.
__global__ void __launch_bounds__(kThreads) sigma_kernel(const Table table) {
  const Entry entry = table.entries[blockIdx.x];
  const float* u = table.vectors + entry.vectors;
  const float* row_products = table.products + entry.row_products;
  double sum = 0.0;
  for (int64_t row = threadIdx.x; row < entry.rows; row += kThreads) sum += double(u[row]) * row_products[row];
  sum = block_sum(sum);
  if (threadIdx.x == 0) table.sigma[blockIdx.x] = sum;
}

template <class T>
__device__ __forceinline__ void divide_rows(const Entry& entry, float divisor) {
  const Rows rows = rows_of_block(entry);
  const T* from = static_cast<const T*>(entry.weight);
  T* to = static_cast<T*>(entry.out);
#pragma unroll 8
  for (int64_t i = rows.begin * entry.columns + threadIdx.x; i < rows.end * entry.columns; i += kThreads) {
    to[i] = from_float<T>(to_float(from[i]) / divisor);
  }
}

__global__ void __launch_bounds__(kThreads) divide_kernel(const Table table) {
  const int layer = find(table, &Entry::first_chunk);
  const Entry entry = table.entries[layer];
  const float sigma = table.sigma[layer], divisor = sigma == 0.0f ? 1.0f : sigma;
  with_type(entry, [&](auto type) { divide_rows<decltype(type)>(entry, divisor); });
}

// ---- gradient --------------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ float inner_product_of_thread(const Entry& entry) {
  const Rows rows = rows_of_block(entry);
  const T* weight = static_cast<const T*>(entry.weight);
  const T* gradient = static_cast<const T*>(entry.gradient);
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t i = rows.begin * entry.columns + threadIdx.x; i < rows.end * entry.columns; i += kThreads) {
    sum += to_float(weight[i]) * to_float(gradient[i]);
  }
  return sum;
}

// <G, W> of each chunk, into squares.
__global__ void __launch_bounds__(kThreads) inner_product_kernel(const Table table) {
  const Entry entry = table.entries[find(table, &Entry::first_chunk)];
  float sum;
  with_type(entry, [&](auto type) { sum = inner_product_of_thread<decltype(type)>(entry); });
  const double total = block_sum(sum);
  if (threadIdx.x == 0) table.squares[blockIdx.x] = total;
}

template <class T>
__device__ __forceinline__ void gradient_rows(const Table& table, const Entry& entry, double factor, float divisor) {
  const Rows rows = rows_of_block(entry);
  const float* u = table.vectors + entry.vectors;
  const float* v = u + entry.rows;
  for (int64_t row = rows.begin + threadIdx.x / 32; row < rows.end; row += kWarps) {
    const T* from = static_cast<const T*>(entry.gradient) + row * entry.columns;
    T* to = static_cast<T*>(entry.out) + row * entry.columns;
    const float weight = u[row] * factor;
#pragma unroll 4
    for (int64_t c = threadIdx.x % 32; c < entry.columns; c += 32) {
      to[c] = from_float<T>((to_float(from[c]) - weight * v[v_index(entry, c)]) / divisor);
    }
  }
}

__global__ void __launch_bounds__(kThreads) gradient_kernel(const Table table) {
  const int layer = find(table, &Entry::first_chunk);
  const Entry entry = table.entries[layer];
  const int64_t count = (entry.rows + entry.chunk_rows - 1) / entry.chunk_rows;
  double inner = 0.0;
  for (int64_t chunk = threadIdx.x; chunk < count; chunk += kThreads) inner += table.squares[entry.first_chunk + chunk];
  inner = block_sum(inner);
  const float sigma = table.sigma[layer];
  const float divisor = sigma == 0.0f ? 1.0f : sigma;
  const double factor = sigma == 0.0f ? 0.0 : inner / sigma;
  with_type(entry, [&](auto type) { gradient_rows<decltype(type)>(table, entry, factor, divisor); });
}

}  // namespace iecl_fast::spectral::gpu
