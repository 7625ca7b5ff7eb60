// CUDA implementations of the operators of library.cpp. Launches use the current stream of the tensors' device.

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include <optional>
#include <tuple>
#include <vector>

#include "library_ring.h"
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

// ---- ring ------------------------------------------------------------------------------------------------------

namespace ring = iecl_fast::ring::gpu;

std::tuple<Tensor, Tensor> ring_select(const Tensor& similarities, std::vector<int64_t> ranks,
                                       const std::optional<Tensor>& exclude) {
  const torch::stable::accelerator::DeviceGuard guard(similarities.get_device_index());
  const auto input = ring::similarities_of(similarities);
  const auto range = ring::ranks_of(ranks, input.keys, exclude.has_value());
  const int64_t* excluded = ring::excluded_of(exclude, similarities, input.rows);
  const int64_t splits = ring::checked_splits(input);
  Tensor thresholds = iecl_fast::make(similarities, {input.rows, 2}, ring::ScalarType::Int);
  Tensor ties = iecl_fast::make(similarities, {input.rows, 2}, ring::ScalarType::Long);
  Tensor workspace = make_workspace(similarities, ring::select_workspace_bytes(input.rows, input.keys, splits));
  ring::select(input, range, excluded, splits, {iecl_fast::data<int32_t>(thresholds), iecl_fast::data<int64_t>(ties)},
               workspace.mutable_data_ptr(), current_stream(similarities));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {thresholds, ties};
}

std::tuple<Tensor, Tensor> ring_select_candidates(const Tensor& keys, const Tensor& indices, const Tensor& counts,
                                                  const Tensor& ranks) {
  const torch::stable::accelerator::DeviceGuard guard(keys.get_device_index());
  const auto candidates = ring::candidates_of(keys, indices, counts);
  const int64_t* wanted = ring::elements<int64_t>(ranks, keys, ring::ScalarType::Long, 2 * candidates.rows, "ranks");
  Tensor thresholds = iecl_fast::make(keys, {candidates.rows, 2}, ring::ScalarType::Int);
  Tensor ties = iecl_fast::make(keys, {candidates.rows, 2}, ring::ScalarType::Long);
  ring::select_candidates(candidates, wanted, {iecl_fast::data<int32_t>(thresholds), iecl_fast::data<int64_t>(ties)},
                          current_stream(keys));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {thresholds, ties};
}

std::tuple<Tensor, Tensor> ring_compact(const Tensor& similarities, const Tensor& thresholds, const Tensor& ties,
                                        const std::optional<Tensor>& exclude, int64_t size, bool with_indices) {
  const torch::stable::accelerator::DeviceGuard guard(similarities.get_device_index());
  const auto input = ring::similarities_of(similarities);
  const auto boundaries = ring::boundaries_of(thresholds, ties, similarities, input.rows);
  const int64_t* excluded = ring::excluded_of(exclude, similarities, input.rows);
  STD_TORCH_CHECK(0 <= size && size <= input.keys, "size = ", size, " is not within the number of keys, ", input.keys);
  const int64_t splits = ring::checked_splits(input);
  Tensor values = iecl_fast::make(similarities, {input.rows, size}, ring::ScalarType::Float);
  Tensor indices = iecl_fast::make(similarities, {with_indices ? input.rows : 0, size}, ring::ScalarType::Long);
  Tensor workspace = make_workspace(similarities, ring::compact_workspace_bytes(input.rows, splits));
  ring::compact(input, boundaries, excluded, size, splits, iecl_fast::data<float>(values),
                with_indices ? iecl_fast::data<int64_t>(indices) : nullptr, workspace.mutable_data_ptr(),
                current_stream(similarities));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {values, indices};
}

std::tuple<Tensor, Tensor> ring_draw(const Tensor& similarities, const Tensor& thresholds, const Tensor& ties,
                                     const std::optional<Tensor>& exclude, const Tensor& uniform,
                                     std::vector<int64_t> ranks, bool with_indices) {
  const torch::stable::accelerator::DeviceGuard guard(similarities.get_device_index());
  const auto input = ring::similarities_of(similarities);
  const auto range = ring::ranks_of(ranks, input.keys, exclude.has_value());
  const auto boundaries = ring::boundaries_of(thresholds, ties, similarities, input.rows);
  const int64_t* excluded = ring::excluded_of(exclude, similarities, input.rows);
  STD_TORCH_CHECK(uniform.dim() == 2, "uniform has to be a matrix");
  const int64_t samples = uniform.size(1), splits = ring::checked_splits(input);
  const double* numbers =
      ring::elements<double>(uniform, similarities, ring::ScalarType::Double, input.rows * samples, "uniform");
  Tensor values = iecl_fast::make(similarities, {input.rows, samples}, ring::ScalarType::Float);
  Tensor indices = iecl_fast::make(similarities, {with_indices ? input.rows : 0, samples}, ring::ScalarType::Long);
  Tensor workspace = make_workspace(similarities, ring::draw_workspace_bytes(input.rows, range, splits));
  ring::draw(input, boundaries, range, excluded, numbers, samples, splits, iecl_fast::data<float>(values),
             with_indices ? iecl_fast::data<int64_t>(indices) : nullptr, workspace.mutable_data_ptr(),
             current_stream(similarities));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {values, indices};
}

Tensor ring_sample_query_gradient(const Tensor& gradient, const Tensor& indices, const Tensor& keys) {
  const torch::stable::accelerator::DeviceGuard guard(keys.get_device_index());
  STD_TORCH_CHECK(indices.dim() == 2, "indices have to be a matrix");
  const int64_t rows = indices.size(0), samples = indices.size(1);
  // Of keys whose channels lie apart each number gathered takes a sector of memory; a copy pays for itself soon.
  const bool copies = keys.dim() == 2 && keys.stride(1) != 1 && 4 * rows * samples > keys.size(0);
  const Tensor gathered = copies ? torch::stable::contiguous(keys) : keys;
  const auto matrix = ring::matrix_beside(gathered, keys, "keys");
  Tensor result = iecl_fast::make(keys, {rows, matrix.columns}, ring::ScalarType::Float);
  Tensor workspace = make_workspace(keys, ring::query_gradient_workspace_bytes(rows, samples, matrix.columns));
  ring::sample_query_gradient(
      ring::elements<float>(gradient, keys, ring::ScalarType::Float, rows * samples, "gradient"),
      ring::elements<int64_t>(indices, keys, ring::ScalarType::Long, rows * samples, "indices"), rows, samples, matrix,
      iecl_fast::data<float>(result), workspace.mutable_data_ptr(), current_stream(keys));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return result;
}

Tensor ring_sample_keys_gradient(const Tensor& gradient, const Tensor& indices, const Tensor& query, int64_t num_keys) {
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  STD_TORCH_CHECK(indices.dim() == 2, "indices have to be a matrix");
  const auto matrix = ring::matrix_beside(query, query, "query");
  const int64_t samples = indices.size(1), count = matrix.rows * samples;
  const float* weights = ring::elements<float>(gradient, query, ring::ScalarType::Float, count, "gradient");
  ring::elements<int64_t>(indices, query, ring::ScalarType::Long, count, "indices");
  const auto [sorted, order] = ring::stable_sort(torch::stable::flatten(indices));
  Tensor result = iecl_fast::make(query, {num_keys, matrix.columns}, ring::ScalarType::Float);
  ring::sample_keys_gradient(weights, static_cast<const int64_t*>(sorted.const_data_ptr()),
                             static_cast<const int64_t*>(order.const_data_ptr()), samples, matrix, num_keys,
                             iecl_fast::data<float>(result), current_stream(query));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return result;
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
  m.def("_ring_select(Tensor similarities, int[] ranks, Tensor? exclude) -> (Tensor thresholds, Tensor ties)");
  m.def("_ring_select_candidates(Tensor keys, Tensor indices, Tensor counts, Tensor ranks) "
        "-> (Tensor thresholds, Tensor ties)");
  m.def("_ring_compact(Tensor similarities, Tensor thresholds, Tensor ties, Tensor? exclude, int size, "
        "bool with_indices) -> (Tensor similarities, Tensor indices)");
  m.def("_ring_draw(Tensor similarities, Tensor thresholds, Tensor ties, Tensor? exclude, Tensor uniform, int[] ranks, "
        "bool with_indices) -> (Tensor similarities, Tensor indices)");
  m.def("_ring_sample_query_gradient_cuda(Tensor gradient, Tensor indices, Tensor keys) -> Tensor");
  m.def("_ring_sample_keys_gradient_cuda(Tensor gradient, Tensor indices, Tensor query, int num_keys) -> Tensor");
  m.def("cuda_toolkit_version() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(iecl_fast, CUDA, m) {
  m.impl("_ring_select", TORCH_BOX(&ring_select));
  m.impl("_ring_select_candidates", TORCH_BOX(&ring_select_candidates));
  m.impl("_ring_compact", TORCH_BOX(&ring_compact));
  m.impl("_ring_draw", TORCH_BOX(&ring_draw));
  m.impl("_ring_sample_query_gradient_cuda", TORCH_BOX(&ring_sample_query_gradient));
  m.impl("_ring_sample_keys_gradient_cuda", TORCH_BOX(&ring_sample_keys_gradient));
  m.impl("_spectral_norm_cuda", TORCH_BOX(&spectral_norm));
  m.impl("_spectral_norm_gradient_cuda", TORCH_BOX(&spectral_norm_gradient));
}

STABLE_TORCH_LIBRARY_IMPL(iecl_fast, CompositeImplicitAutograd, m) {
  m.impl("cuda_toolkit_version", TORCH_BOX(&cuda_toolkit_version));
}
