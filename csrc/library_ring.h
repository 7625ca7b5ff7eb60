// The Ring operators on tensors, for library_cuda.cu: checks, results, pointers for the kernels.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "ring/gpu.h"
#include "tensors.h"

namespace iecl_fast::ring::gpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The elements of a tensor that has to be contiguous, of that type and that size, on the same device as `like`.
template <class T>
const T* elements(const Tensor& tensor, const Tensor& like, ScalarType dtype, int64_t count, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype && tensor.is_contiguous() && tensor.numel() == count &&
                      tensor.device() == like.device(),
                  name, " has the wrong device, dtype, layout or size: ", count, " elements in one piece are needed");
  return static_cast<const T*>(tensor.const_data_ptr());
}

inline Similarities similarities_of(const Tensor& similarities) {
  STD_TORCH_CHECK(similarities.dim() == 2 && similarities.scalar_type() == ScalarType::Float,
                  "similarities have to be a float32 matrix");
  const int64_t keys = similarities.size(1);
  STD_TORCH_CHECK(keys <= std::numeric_limits<int32_t>::max(), "similarities with ", keys,
                  " keys: up to 2^31 - 1 are allowed");
  return {static_cast<const float*>(similarities.const_data_ptr()), similarities.size(0), keys, similarities.stride(0),
          similarities.stride(1)};
}

inline Ranks ranks_of(const std::vector<int64_t>& ranks, int64_t keys, bool excludes) {
  const auto fit = [](int64_t lower, int64_t upper, int64_t count) {
    return 0 <= lower && lower <= upper && upper <= count;
  };
  STD_TORCH_CHECK(ranks.size() == 4 && fit(ranks[0], ranks[1], keys) &&
                      (!excludes || fit(ranks[2], ranks[3], keys > 0 ? keys - 1 : 0)),
                  "ranks have to be two ascending pairs within the number of keys, ", keys);
  return {{ranks[0], ranks[1]}, {ranks[2], ranks[3]}};
}

inline const int64_t* excluded_of(const std::optional<Tensor>& exclude, const Tensor& like, int64_t rows) {
  return exclude.has_value() ? elements<int64_t>(*exclude, like, ScalarType::Long, rows, "exclude") : nullptr;
}

// Boundaries that a kernel reads.
inline Boundaries boundaries_of(const Tensor& thresholds, const Tensor& ties, const Tensor& like, int64_t rows) {
  return {const_cast<int32_t*>(elements<int32_t>(thresholds, like, ScalarType::Int, 2 * rows, "thresholds")),
          const_cast<int64_t*>(elements<int64_t>(ties, like, ScalarType::Long, 2 * rows, "ties"))};
}

inline Candidates candidates_of(const Tensor& keys, const Tensor& indices, const Tensor& counts) {
  STD_TORCH_CHECK(keys.dim() == 3, "keys have to be (rows, segments, capacity)");
  const int64_t rows = keys.size(0), segments = keys.size(1), capacity = keys.size(2);
  STD_TORCH_CHECK(segments * capacity <= std::numeric_limits<int32_t>::max(), segments, " segments of ", capacity,
                  " keys: up to 2^31 - 1 keys in a row are allowed");
  const int64_t count = rows * segments * capacity;
  return {elements<int32_t>(keys, keys, ScalarType::Int, count, "keys"),
          elements<int32_t>(indices, keys, ScalarType::Int, count, "indices"),
          elements<int32_t>(counts, keys, ScalarType::Int, rows * segments, "counts"), rows, segments, capacity};
}

// Blocks of a launch that gives each row `splits` of them.
inline int64_t checked_splits(const Similarities& similarities) {
  const int64_t splits = splits_of(similarities.rows, similarities.keys);
  STD_TORCH_CHECK(similarities.rows * splits <= std::numeric_limits<int32_t>::max(), "more than 2^31 - 1 blocks for ",
                  similarities.rows, " rows of ", similarities.keys, " keys");
  return splits;
}

inline Matrix matrix_beside(const Tensor& tensor, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.device() == like.device(), name,
                  " has to be a matrix on the same device");
  return iecl_fast::matrix_of(tensor, name);
}

// Ascending, equal ones in the order in which they came; and where each was before.
inline std::tuple<Tensor, Tensor> stable_sort(const Tensor& values) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  std::array<StableIValue, 4> stack{from(values), from(std::optional<bool>(true)), from(int64_t(-1)), from(false)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sort", "stable", stack.data(), TORCH_ABI_VERSION));
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1])};
}

}  // namespace iecl_fast::ring::gpu
