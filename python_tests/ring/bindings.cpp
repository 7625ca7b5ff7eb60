// The launches of csrc/ring on the host as Python functions: torch's tensors come as their storage and their strides.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

#include "ring/gpu.h"
#include "simt/python.h"

namespace {

using namespace iecl_fast::ring::gpu;
using iecl_fast::Dtype;
using iecl_fast::Matrix;
using simt::Array;

// Where a matrix lies in a storage: offset, sizes, strides.
using Layout = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;
using Optional = std::optional<Array>;

template <class T>
T* pointer(const Optional& array) {
  return array.has_value() ? array->pointer<T>() : nullptr;
}

Similarities similarities_of(const Array& storage, const Layout& layout) {
  const auto [offset, rows, keys, row_stride, key_stride] = layout;
  return {storage.pointer<float>() + offset, rows, keys, row_stride, key_stride};
}

Matrix matrix_of(const Array& storage, const Layout& layout, int dtype) {
  const auto [offset, rows, columns, row_stride, column_stride] = layout;
  const void* data = dtype == 0 ? static_cast<const void*>(storage.pointer<float>() + offset)
                                : storage.pointer<uint16_t>() + offset;
  return {data, Dtype(dtype), rows, columns, row_stride, column_stride};
}

Ranks ranks_of(const std::vector<int64_t>& ranks) { return {{ranks.at(0), ranks.at(1)}, {ranks.at(2), ranks.at(3)}}; }

Boundaries boundaries_of(const Array& thresholds, const Array& ties) {
  return {thresholds.pointer<int32_t>(), ties.pointer<int64_t>()};
}

// Poisoned, and known to the watch.
struct Poisoned {
  explicit Poisoned(int64_t size)
      : bytes((size + 255) / 256 * 256), data(static_cast<char*>(std::aligned_alloc(256, bytes)), &std::free),
        global(data.get(), size) {
    std::memset(data.get(), 0xff, bytes);
  }
  size_t bytes;
  std::unique_ptr<char, decltype(&std::free)> data;
  simt::Global global;
};

}  // namespace

int mutant = -1;  // which mistake the kernels make, if they were compiled with mistakes

PYBIND11_MODULE(SIMT_RING, module) {
  simt::bind(module);
  module.def("set_mutant", [](int number) { mutant = number; });
  module.def("splits_of", &splits_of);
  module.def("select", [](Array storage, Layout layout, std::vector<int64_t> ranks, Optional exclude, int64_t splits,
                          Array thresholds, Array ties) {
    const Similarities similarities = similarities_of(storage, layout);
    Poisoned workspace(select_workspace_bytes(similarities.rows, similarities.keys, splits));
    select(similarities, ranks_of(ranks), pointer<int64_t>(exclude), splits, boundaries_of(thresholds, ties),
           workspace.data.get(), nullptr);
  });
  module.def("select_candidates", [](Array keys, Array indices, Array counts, int64_t segments, int64_t capacity,
                                     Array ranks, Array thresholds, Array ties) {
    select_candidates({keys.pointer<int32_t>(), indices.pointer<int32_t>(), counts.pointer<int32_t>(),
                       ranks.size() / 2, segments, capacity},
                      ranks.pointer<int64_t>(), boundaries_of(thresholds, ties), nullptr);
  });
  module.def("compact", [](Array storage, Layout layout, Array thresholds, Array ties, Optional exclude, int64_t size,
                           int64_t splits, Array values, Optional indices) {
    const Similarities similarities = similarities_of(storage, layout);
    Poisoned workspace(compact_workspace_bytes(similarities.rows, splits));
    compact(similarities, boundaries_of(thresholds, ties), pointer<int64_t>(exclude), size, splits,
            values.pointer<float>(), pointer<int64_t>(indices), workspace.data.get(), nullptr);
  });
  module.def("draw", [](Array storage, Layout layout, Array thresholds, Array ties, std::vector<int64_t> ranks,
                        Optional exclude, Array uniform, int64_t samples, int64_t splits, Array values,
                        Optional indices) {
    const Similarities similarities = similarities_of(storage, layout);
    Poisoned workspace(draw_workspace_bytes(similarities.rows, ranks_of(ranks), splits));
    draw(similarities, boundaries_of(thresholds, ties), ranks_of(ranks), pointer<int64_t>(exclude),
         uniform.pointer<double>(), samples, splits, values.pointer<float>(), pointer<int64_t>(indices),
         workspace.data.get(), nullptr);
  });
  module.def("query_gradient", [](Array gradient, Array indices, int64_t rows, int64_t samples, Array keys,
                                  Layout layout, int dtype, Array result) {
    const Matrix matrix = matrix_of(keys, layout, dtype);
    Poisoned workspace(query_gradient_workspace_bytes(rows, samples, matrix.columns));
    sample_query_gradient(gradient.pointer<float>(), indices.pointer<int64_t>(), rows, samples, matrix,
                          result.pointer<float>(), workspace.data.get(), nullptr);
  });
  module.def("keys_gradient", [](Array gradient, Array sorted, Array order, int64_t samples, Array query, Layout layout,
                                 int dtype, int64_t num_keys, Array result) {
    sample_keys_gradient(gradient.pointer<float>(), sorted.pointer<int64_t>(), order.pointer<int64_t>(), samples,
                         matrix_of(query, layout, dtype), num_keys, result.pointer<float>(), nullptr);
  });
}
