// The spectral operators on tensors, for library.cpp and library_cuda.cu: checks, results, pointers for the kernels.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>
#include <vector>

#include "spectral/spectral.h"
#include "tensors.h"

namespace iecl_fast::spectral {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A weight (rows, ...), contiguous or channels-last.
inline Layer layer_of(const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() >= 2, "a weight has to have two dimensions or more");
  Layer layer{weight.const_data_ptr(), dtype_of(weight, "a weight"), weight.size(0)};
  layer.columns = layer.channels = layer.rows == 0 ? 0 : weight.numel() / layer.rows;
  STD_TORCH_CHECK(layer.columns < (int64_t{1} << 32), "a row of a weight has more than 2^32 elements");
  if (weight.is_contiguous()) return layer;
  layer.channels = weight.size(1);
  int64_t stride = layer.channels;
  bool channels_last = weight.stride(1) == 1;
  for (int64_t d = weight.dim() - 1; d >= 2; stride *= weight.size(d--)) {
    channels_last = channels_last && (weight.size(d) == 1 || weight.stride(d) == stride);
  }
  STD_TORCH_CHECK(channels_last && (layer.rows == 1 || weight.stride(0) == layer.columns),
                  "a weight has to be contiguous or channels-last");
  return layer;
}

// vectors: u and v of all weights, flat.
inline std::vector<Layer> layers_of(const std::vector<Tensor>& weights, const Tensor& vectors) {
  std::vector<Layer> layers;
  int64_t size = 0;
  for (const Tensor& weight : weights) {
    STD_TORCH_CHECK(weight.device() == vectors.device(), "weights and vectors have to be on one device");
    layers.push_back(layer_of(weight));
    size += layers.back().rows + layers.back().columns;
  }
  STD_TORCH_CHECK(vectors.scalar_type() == ScalarType::Float && vectors.is_contiguous() && vectors.numel() == size,
                  "vectors has the wrong dtype, layout or size");
  return layers;
}

// Run(layers, new_vectors, sigma, pointers to the normalised weights or nullptr)
template <class Run>
std::tuple<std::vector<Tensor>, Tensor, Tensor> norm(const std::vector<Tensor>& weights, const Tensor& vectors,
                                                     bool divide, const Run& run) {
  const std::vector<Layer> layers = layers_of(weights, vectors);
  Tensor new_vectors = torch::stable::clone(vectors);
  Tensor sigma = torch::stable::new_empty(vectors, {int64_t(layers.size())}, ScalarType::Float);
  std::vector<Tensor> normalised;
  std::vector<void*> pointers;
  for (size_t i = 0; divide && i < weights.size(); ++i) {
    normalised.push_back(torch::stable::empty_like(weights[i]));
    pointers.push_back(normalised.back().mutable_data_ptr());
  }
  run(layers, static_cast<float*>(new_vectors.mutable_data_ptr()), static_cast<float*>(sigma.mutable_data_ptr()),
      divide ? pointers.data() : nullptr);
  return {normalised, new_vectors, sigma};
}

// Run(layers, pointers to the gradients, vectors, sigma, pointers to the weights' gradients)
template <class Run>
std::vector<Tensor> norm_gradient(const std::vector<Tensor>& gradients, const std::vector<Tensor>& weights,
                                  const Tensor& vectors, const Tensor& sigma, const Run& run) {
  const std::vector<Layer> layers = layers_of(weights, vectors);
  STD_TORCH_CHECK(gradients.size() == weights.size() && sigma.numel() == int64_t(weights.size()) &&
                      sigma.scalar_type() == ScalarType::Float && sigma.device() == vectors.device(),
                  "as many gradients and sigmas as weights are needed");
  std::vector<Tensor> results;
  std::vector<const void*> from;
  std::vector<void*> to;
  for (size_t i = 0; i < weights.size(); ++i) {
    const Layer slope = layer_of(gradients[i]);
    STD_TORCH_CHECK(slope.dtype == layers[i].dtype && slope.rows == layers[i].rows &&
                        slope.columns == layers[i].columns && slope.channels == layers[i].channels &&
                        gradients[i].device() == vectors.device(),
                    "a gradient has to have its weight's shape, dtype, layout and device");
    results.push_back(torch::stable::empty_like(weights[i]));
    from.push_back(slope.weight);
    to.push_back(results.back().mutable_data_ptr());
  }
  run(layers, from.data(), static_cast<const float*>(vectors.const_data_ptr()),
      static_cast<const float*>(sigma.const_data_ptr()), to.data());
  return results;
}

}  // namespace iecl_fast::spectral
