// What every test module of device code shows to Python: buffers as global memory, the seed, the counters.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "simt/simt.h"

namespace simt {

// A contiguous Python buffer (a numpy array) that kernels may touch during the call it is handed to.
class Array {
 public:
  explicit Array(const pybind11::buffer& buffer)
      : info_(std::make_shared<pybind11::buffer_info>(buffer.request())),
        global_(std::make_shared<Global>(info_->ptr, size_t(info_->size) * info_->itemsize)) {
    pybind11::ssize_t expected = info_->itemsize;
    for (auto d = info_->ndim; d-- > 0; expected *= info_->shape[d]) {
      if (info_->shape[d] > 1 && info_->strides[d] != expected) throw std::invalid_argument("array is not contiguous");
    }
  }
  template <class T>
  T* pointer() const {
    if (info_->itemsize != sizeof(T)) {
      throw std::invalid_argument("array of " + std::to_string(info_->itemsize) + "-byte elements, expected " +
                                  std::to_string(sizeof(T)));
    }
    return static_cast<T*>(info_->ptr);
  }
  pybind11::ssize_t size() const { return info_->size; }

 private:
  std::shared_ptr<pybind11::buffer_info> info_;
  std::shared_ptr<Global> global_;
};

template <class T>
T* pointer(const Array& array) {
  return array.pointer<T>();
}

inline void bind(pybind11::module_& module) {
  pybind11::class_<Array>(module, "Array", pybind11::module_local()).def(pybind11::init<pybind11::buffer>());
  pybind11::implicitly_convertible<pybind11::buffer, Array>();
  pybind11::class_<Counters>(module, "Counters", pybind11::module_local())
      .def_readonly("global_loads", &Counters::global_loads)
      .def_readonly("global_load_bytes", &Counters::global_load_bytes)
      .def_readonly("global_stores", &Counters::global_stores)
      .def_readonly("global_store_bytes", &Counters::global_store_bytes)
      .def_readonly("shared_loads", &Counters::shared_loads)
      .def_readonly("shared_stores", &Counters::shared_stores)
      .def_readonly("atomics", &Counters::atomics)
      .def_readonly("barriers", &Counters::barriers)
      .def_readonly("launches", &Counters::launches);
  // The counts since the last call.
  module.def("take_counters", [] { return std::exchange(counters, Counters{}); });
  module.def("set_seed", [](uint64_t value) { seed = value; });
}

}  // namespace simt
