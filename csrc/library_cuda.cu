// CUDA implementations of the operators of library.cpp. Launches use the current stream of the tensors' device.

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/library.h>

namespace {

// Lets `iecl-fast doctor` compare the toolkit that compiled this library with the driver that has to run it.
int64_t cuda_toolkit_version() { return CUDART_VERSION; }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(iecl_fast, m) { m.def("cuda_toolkit_version() -> int"); }

STABLE_TORCH_LIBRARY_IMPL(iecl_fast, CompositeImplicitAutograd, m) {
  m.impl("cuda_toolkit_version", TORCH_BOX(&cuda_toolkit_version));
}
