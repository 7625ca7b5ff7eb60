// Spectral normalisation on the CPU. Bound by memory: a step of power iteration reads W once, the division reads and
// writes it once more, the reading mostly from a cache. The gradient reads W once, G twice and writes once.

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "spectral/layers.h"
#include "spectral/rows.h"
#include "spectral/spectral.h"

namespace iecl_fast::spectral {
namespace {

constexpr int64_t kBlock = int64_t{1} << 13;  // elements of the rows that are multiplied twice: a first-level cache

int64_t block_rows(const Layer& layer) { return std::max<int64_t>(4, kBlock / layer.columns); }

int64_t bytes_each(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

template <class Pointer>
Pointer at_row(Pointer data, const Layer& layer, int64_t row) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
  return static_cast<Byte*>(data) + row * layer.columns * bytes_each(layer.dtype);
}

// Rows as floats: where they lie if they are floats, else converted into a buffer.
class RowReader {
 public:
  RowReader(const Layer& layer, const void* data, int64_t rows) : layer_(layer), data_(data) {
    if (layer.dtype != Dtype::kFloat32) buffer_.resize(rows * layer.columns);
  }
  const float* read(int64_t begin, int64_t count) {
    const void* from = at_row(data_, layer_, begin);
    if (layer_.dtype == Dtype::kFloat32) return static_cast<const float*>(from);
    const auto convert = layer_.dtype == Dtype::kFloat16 ? row_kernels().from_float16 : row_kernels().from_bfloat16;
    convert(static_cast<const uint16_t*>(from), count * layer_.columns, buffer_.data());
    return buffer_.data();
  }

 private:
  const Layer& layer_;
  const void* data_;
  std::vector<float> buffer_;
};

void write_rows(const Layer& layer, const float* from, int64_t count, void* to) {
  const auto convert = layer.dtype == Dtype::kFloat16 ? row_kernels().to_float16 : row_kernels().to_bfloat16;
  convert(from, count * layer.columns, static_cast<uint16_t*>(to));
}

double norm(const float* values, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += double(values[i]) * values[i];
  return std::sqrt(sum);
}

// u and v of all layers, v in the order of the weight's memory.
class Vectors {
 public:
  Vectors(const std::vector<Layer>& layers, const float* vectors) : layers_(layers) {
    int64_t size = 0;
    for (const Layer& layer : layers) {
      begins_.push_back(size);
      size += layer.rows + layer.columns;
    }
    values_.assign(vectors, vectors + size);
    for (size_t i = 0; i < layers.size(); ++i) reorder(i, vectors + begins_[i] + layers[i].rows);
  }
  float* u(int64_t layer) { return values_.data() + begins_[layer]; }
  float* v(int64_t layer) { return u(layer) + layers_[layer].rows; }

  void write(float* vectors) {
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      float* to = vectors + begins_[layer];
      std::copy(u(layer), v(layer), to);
      const int64_t channels = layers_[layer].channels, positions = layers_[layer].positions();
      for (int64_t position = 0; position < positions; ++position) {
        for (int64_t channel = 0; channel < channels; ++channel) {
          to[layers_[layer].rows + channel * positions + position] = v(layer)[position * channels + channel];
        }
      }
    }
  }

 private:
  void reorder(int64_t layer, const float* from) {
    const int64_t channels = layers_[layer].channels, positions = layers_[layer].positions();
    for (int64_t channel = 0; channel < channels; ++channel) {
      for (int64_t position = 0; position < positions; ++position) {
        v(layer)[position * channels + channel] = from[channel * positions + position];
      }
    }
  }

  const std::vector<Layer>& layers_;
  std::vector<int64_t> begins_;
  std::vector<float> values_;
};

// W v and W^T (W v) of one layer.
struct Products {
  float* of_rows;
  float* of_columns;  // one part for each chunk, to be added up
};

// W^T factors, added up in `sum`.
void multiply_transposed(const Layer& layer, const float* factors, float* sum) {
  const int64_t step = block_rows(layer);
  RowReader rows(layer, layer.weight, step);
  std::fill_n(sum, layer.columns, 0.0f);
  for (int64_t row = 0; row < layer.rows; row += step) {
    const int64_t count = std::min(step, layer.rows - row);
    row_kernels().accumulate(rows.read(row, count), count, layer.columns, factors + row, sum);
  }
}

// Replaces u and v by the next ones, given W v and the parts of W^T (W v). Returns sigma.
double next_vectors(const Layer& layer, double eps, const Products& products, float* u, float* v) {
  const int64_t parts = chunk_count(layer);
  float* product = products.of_columns;
  const std::vector<float> ones(parts, 1.0f);
  row_kernels().accumulate(product + layer.columns, parts - 1, layer.columns, ones.data(), product);
  const double length = norm(products.of_rows, layer.rows);
  if (length == 0.0) return 0.0;

  const double u_divisor = std::max(length, eps);
  for (int64_t r = 0; r < layer.rows; ++r) u[r] = products.of_rows[r] / u_divisor;
  double v_divisor = u_divisor;  // product = W^T u * v_divisor
  double length_of_product = norm(product, layer.columns);
  if (!(length_of_product > 1e-28 && length_of_product < 1e36)) {
    // sigma^2 is beyond the range of floats: multiply by the unit vector instead.
    multiply_transposed(layer, u, product);
    v_divisor = 1.0;
    length_of_product = norm(product, layer.columns);
  }
  length_of_product /= v_divisor;
  v_divisor *= std::max(length_of_product, eps);
  for (int64_t c = 0; c < layer.columns; ++c) v[c] = product[c] / v_divisor;
  return length_of_product * (length_of_product / std::max(length_of_product, eps));
}

}  // namespace

void norm_cpu(const std::vector<Layer>& layers, int64_t iterations, double eps, float* vectors, float* sigma,
              void* const* normalised, ParallelFor parallel) {
  Vectors current(layers, vectors);
  const auto product_size = [](const Layer& layer) { return layer.rows + layer.columns * chunk_count(layer); };
  int64_t size = 0;
  for (const Layer& layer : layers) size += product_size(layer);
  const std::unique_ptr<float[]> buffer(new float[size]);  // not std::vector, which would fill it first
  std::vector<Products> products;
  for (float* begin = buffer.get(); const Layer& layer : layers) {
    products.push_back({begin, begin + layer.rows});
    begin += product_size(layer);
  }
  std::fill_n(sigma, layers.size(), 0.0f);

  const auto multiply = [&](const Chunk& chunk) {
    const Layer& layer = layers[chunk.layer];
    const int64_t step = block_rows(layer);
    RowReader rows(layer, layer.weight, step);
    float* of_rows = products[chunk.layer].of_rows;
    float* of_columns = products[chunk.layer].of_columns + chunk.number * layer.columns;
    if (iterations > 0) std::fill_n(of_columns, layer.columns, 0.0f);
    for (int64_t row = chunk.begin; row < chunk.end; row += step) {
      const int64_t count = std::min(step, chunk.end - row);
      const float* values = rows.read(row, count);
      row_kernels().dots(values, count, layer.columns, current.v(chunk.layer), of_rows + row);
      if (iterations > 0) row_kernels().accumulate(values, count, layer.columns, of_rows + row, of_columns);
    }
  };
  const auto finish = [&](int64_t layer) {
    if (iterations > 0) {
      sigma[layer] = next_vectors(layers[layer], eps, products[layer], current.u(layer), current.v(layer));
      return;
    }
    double sum = 0.0;
    for (int64_t r = 0; r < layers[layer].rows; ++r) sum += double(current.u(layer)[r]) * products[layer].of_rows[r];
    sigma[layer] = sum;
  };
  const auto divide = [&](const Chunk& chunk) {
    if (normalised == nullptr) return;
    const Layer& layer = layers[chunk.layer];
    const float divisor = sigma[chunk.layer] == 0.0f ? 1.0f : sigma[chunk.layer];
    if (layer.dtype == Dtype::kFloat32) {
      const float* from = static_cast<const float*>(at_row(layer.weight, layer, chunk.begin));
      float* to = static_cast<float*>(at_row(normalised[chunk.layer], layer, chunk.begin));
      row_kernels().divide(from, (chunk.end - chunk.begin) * layer.columns, divisor, to);
      return;
    }
    const int64_t step = block_rows(layer);
    RowReader rows(layer, layer.weight, step);
    std::vector<float> quotients(step * layer.columns);
    for (int64_t row = chunk.begin; row < chunk.end; row += step) {
      const int64_t count = std::min(step, chunk.end - row);
      const float* values = rows.read(row, count);
      for (int64_t i = 0; i < count * layer.columns; ++i) quotients[i] = values[i] / divisor;
      write_rows(layer, quotients.data(), count, at_row(normalised[chunk.layer], layer, row));
    }
  };
  for_layers(layers, std::max<int64_t>(iterations, 1), multiply, finish, divide, parallel);
  if (iterations > 0) current.write(vectors);
}

void norm_gradient_cpu(const std::vector<Layer>& layers, const void* const* gradients, const float* vectors,
                       const float* sigma, void* const* weight_gradients, ParallelFor parallel) {
  Vectors held(layers, vectors);
  std::vector<std::vector<double>> parts(layers.size());
  std::vector<double> inner(layers.size());  // <G, W>
  for (size_t i = 0; i < layers.size(); ++i) parts[i].resize(chunk_count(layers[i]));

  const auto multiply = [&](const Chunk& chunk) {
    const Layer& layer = layers[chunk.layer];
    RowReader weights(layer, layer.weight, 1), slopes(layer, gradients[chunk.layer], 1);
    double sum = 0.0;
    for (int64_t row = chunk.begin; row < chunk.end; ++row) {
      sum += row_kernels().inner_product(slopes.read(row, 1), layer.columns, weights.read(row, 1));
    }
    parts[chunk.layer][chunk.number] = sum;
  };
  const auto finish = [&](int64_t layer) {
    inner[layer] = 0.0;
    for (double part : parts[layer]) inner[layer] += part;
  };
  const auto combine = [&](const Chunk& chunk) {
    const Layer& layer = layers[chunk.layer];
    const bool divided = sigma[chunk.layer] != 0.0f;
    const float divisor = divided ? sigma[chunk.layer] : 1.0f;
    const double factor = divided ? inner[chunk.layer] / divisor : 0.0;
    const int64_t step = block_rows(layer);
    RowReader slopes(layer, gradients[chunk.layer], step);
    std::vector<float> sums(layer.dtype == Dtype::kFloat32 ? 0 : step * layer.columns);
    for (int64_t row = chunk.begin; row < chunk.end; row += step) {
      const int64_t count = std::min(step, chunk.end - row);
      void* to = at_row(weight_gradients[chunk.layer], layer, row);
      float* sum = layer.dtype == Dtype::kFloat32 ? static_cast<float*>(to) : sums.data();
      row_kernels().subtract_outer(slopes.read(row, count), count, layer.columns, held.u(chunk.layer) + row, factor,
                                   held.v(chunk.layer), divisor, sum);
      if (layer.dtype != Dtype::kFloat32) write_rows(layer, sum, count, to);
    }
  };
  for_layers(layers, 1, multiply, finish, combine, parallel);
}

}  // namespace iecl_fast::spectral
