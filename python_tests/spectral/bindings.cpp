#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "simt/python.h"
#include "spectral/spectral.h"

namespace {

using iecl_fast::Dtype;
using iecl_fast::spectral::Layer;
using simt::Array;


std::vector<Layer> layers_of(const std::vector<Array>& weights, const std::vector<std::tuple<int, int, int>>& shapes,
                             int dtype) {
  std::vector<Layer> layers;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto [rows, columns, channels] = shapes[i];
    const void* data = dtype == 0 ? static_cast<const void*>(weights[i].pointer<float>()) : weights[i].pointer<uint16_t>();
    layers.push_back({data, Dtype(dtype), rows, columns, channels});
  }
  return layers;
}

// Poisoned, and known to the watch.
struct Workspace {
  explicit Workspace(const std::vector<Layer>& layers)
      : bytes(iecl_fast::spectral::workspace_bytes_cuda(layers)),
        data(static_cast<char*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256)), &std::free),
        global(data.get(), bytes) {
    std::memset(data.get(), 0xff, bytes);
  }
  size_t bytes;
  std::unique_ptr<char, decltype(&std::free)> data;
  simt::Global global;
};

std::vector<void*> pointers(const std::vector<Array>& arrays, int dtype) {
  std::vector<void*> result;
  for (const Array& array : arrays) {
    result.push_back(dtype == 0 ? static_cast<void*>(array.pointer<float>()) : array.pointer<uint16_t>());
  }
  return result;
}

}  // namespace

PYBIND11_MODULE(simt_spectral, module) {
  simt::bind(module);
  using Shapes = std::vector<std::tuple<int, int, int>>;
  module.def("norm", [](std::vector<Array> weights, Shapes shapes, int dtype, int iterations, double eps, Array vectors,
                        Array sigma, std::vector<Array> normalised) {
    const auto layers = layers_of(weights, shapes, dtype);
    Workspace workspace(layers);
    const auto to = pointers(normalised, dtype);
    iecl_fast::spectral::norm_cuda(layers, iterations, eps, vectors.pointer<float>(), sigma.pointer<float>(),
                                   to.empty() ? nullptr : to.data(), workspace.data.get(), nullptr);
  });
  module.def("norm_gradient", [](std::vector<Array> gradients, std::vector<Array> weights, Shapes shapes, int dtype,
                                 Array vectors, Array sigma, std::vector<Array> results) {
    const auto layers = layers_of(weights, shapes, dtype);
    Workspace workspace(layers);
    const auto from = pointers(gradients, dtype), to = pointers(results, dtype);
    const std::vector<const void*> slopes(from.begin(), from.end());
    iecl_fast::spectral::norm_gradient_cuda(layers, slopes.data(), vectors.pointer<float>(), sigma.pointer<float>(),
                                            to.data(), workspace.data.get(), nullptr);
  });
}
