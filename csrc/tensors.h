// Tensors and what the kernels take: for the files of the libraries, on any device.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>

#include "matrix.h"

namespace iecl_fast {

inline Dtype dtype_of(const torch::stable::Tensor& tensor, const char* name) {
  using torch::headeronly::ScalarType;
  if (tensor.scalar_type() == ScalarType::Half) return Dtype::kFloat16;
  if (tensor.scalar_type() == ScalarType::BFloat16) return Dtype::kBFloat16;
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, name, " has to be float32, float16 or bfloat16");
  return Dtype::kFloat32;
}

// Of a tensor of two dimensions.
inline Matrix matrix_of(const torch::stable::Tensor& tensor, const char* name) {
  const Dtype dtype = dtype_of(tensor, name);
  return {tensor.const_data_ptr(), dtype, tensor.size(0), tensor.size(1), tensor.stride(0), tensor.stride(1)};
}

inline torch::stable::Tensor make(const torch::stable::Tensor& like, std::initializer_list<int64_t> shape,
                                  torch::headeronly::ScalarType dtype) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(shape.begin(), shape.size()), dtype);
}

template <class Element>
Element* data(torch::stable::Tensor& tensor) {
  return static_cast<Element*>(tensor.mutable_data_ptr());
}

}  // namespace iecl_fast
