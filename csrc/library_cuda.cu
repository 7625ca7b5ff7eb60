// CUDA implementations of the operators of library.cpp. Launches use the current stream of the tensors' device.

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include <tuple>
#include <vector>

#include "library_spectral.h"

namespace {

using torch::stable::Tensor;

void* current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return stream;
}

Tensor make_workspace(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, torch::headeronly::ScalarType::Byte);
}

// ---- spectral --------------------------------------------------------------------------------------------------

std::tuple<std::vector<Tensor>, Tensor, Tensor> spectral_norm(std::vector<Tensor> weights, const Tensor& vectors,
                                                              int64_t iterations, double eps, bool divide) {
  const torch::stable::accelerator::DeviceGuard guard(vectors.get_device_index());
  const auto run = [&](const auto& layers, float* new_vectors, float* sigma, void* const* normalised) {
    Tensor workspace = make_workspace(vectors, iecl_fast::spectral::workspace_bytes_cuda(layers));
    iecl_fast::spectral::norm_cuda(layers, iterations, eps, new_vectors, sigma, normalised,
                                   workspace.mutable_data_ptr(), current_stream(vectors));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  };
  return iecl_fast::spectral::norm(weights, vectors, divide, run);
}

std::vector<Tensor> spectral_norm_gradient(std::vector<Tensor> gradients, std::vector<Tensor> weights,
                                           const Tensor& vectors, const Tensor& sigma) {
  const torch::stable::accelerator::DeviceGuard guard(vectors.get_device_index());
  const auto run = [&](const auto& layers, const auto&... arguments) {
    Tensor workspace = make_workspace(vectors, iecl_fast::spectral::workspace_bytes_cuda(layers));
    iecl_fast::spectral::norm_gradient_cuda(layers, arguments..., workspace.mutable_data_ptr(),
                                            current_stream(vectors));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  };
  return iecl_fast::spectral::norm_gradient(gradients, weights, vectors, sigma, run);
}

// Lets `iecl-fast doctor` compare the toolkit that compiled this library with the driver that has to run it.
int64_t cuda_toolkit_version() { return CUDART_VERSION; }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(iecl_fast, m) {
  m.def("_spectral_norm_cuda(Tensor[] weights, Tensor vectors, int iterations, float eps, bool divide) "
        "-> (Tensor[], Tensor, Tensor)");
  m.def("_spectral_norm_gradient_cuda(Tensor[] gradients, Tensor[] weights, Tensor vectors, Tensor sigma) -> Tensor[]");
  m.def("cuda_toolkit_version() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(iecl_fast, CUDA, m) {
  m.impl("_spectral_norm_cuda", TORCH_BOX(&spectral_norm));
  m.impl("_spectral_norm_gradient_cuda", TORCH_BOX(&spectral_norm_gradient));
}

STABLE_TORCH_LIBRARY_IMPL(iecl_fast, CompositeImplicitAutograd, m) {
  m.impl("cuda_toolkit_version", TORCH_BOX(&cuda_toolkit_version));
}
