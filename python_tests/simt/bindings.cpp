#include <pybind11/pybind11.h>

#include "kernels.h"
#include "simt/python.h"

PYBIND11_MODULE(simt_faults, module) {
  simt::bind(module);
  using simt::pointer;
  using Array = simt::Array;
  module.def("block_sum", [](Array values, Array sum, int threads, int blocks) {
    block_sum(pointer<float>(values), int(values.size()), pointer<float>(sum), threads, blocks);
  });
  module.def("block_sum_without_barrier", [](Array values, Array sum, int threads, int blocks) {
    block_sum_without_barrier(pointer<float>(values), int(values.size()), pointer<float>(sum), threads, blocks);
  });
  module.def("reverse", [](Array values, Array out, bool dynamic, int overrun) {
    reverse(pointer<int>(values), int(values.size()), pointer<int>(out), dynamic, overrun);
  });
  module.def("shift_global", [](Array values, Array out, int offset) {
    shift_global(pointer<int>(values), int(out.size()), pointer<int>(out), offset);
  });
  module.def("divergent_barrier", &divergent_barrier);
  module.def("two_barriers", &two_barriers);
  module.def("uninitialised", [](Array out) { uninitialised(pointer<float>(out)); });
  module.def("warp_staging", [](Array out, bool with_barrier) { warp_staging(pointer<int>(out), with_barrier); });
  module.def("wrong_mask", &wrong_mask);
  module.def("warp_results", [](Array values, Array out) { warp_results(pointer<int>(values), pointer<int>(out)); });
  module.def("shuffles", [](Array values, int width, Array out) {
    shuffles(pointer<float>(values), width, pointer<float>(out));
  });
  module.def("votes", [](Array predicates, Array out) {
    votes(pointer<int>(predicates), int(predicates.size()), pointer<int>(out));
  });
  module.def("histogram", [](Array values, Array bins) {
    histogram(pointer<int>(values), int(values.size()), pointer<int>(bins), int(bins.size()));
  });
  module.def("order", [](Array out) { order(pointer<int>(out), int(out.size()) - 1); });
  module.def("indices", [](Array out, unsigned grid_x, unsigned grid_y, unsigned block_x, unsigned block_y) {
    indices(pointer<int>(out), grid_x, grid_y, block_x, block_y);
  });
  module.def("sixteen_bit", [](Array half, Array bfloat16, Array out, Array half_back, Array bfloat16_back) {
    sixteen_bit(pointer<uint16_t>(half), pointer<uint16_t>(bfloat16), int(half.size()), pointer<float>(out),
                pointer<uint16_t>(half_back), pointer<uint16_t>(bfloat16_back));
  });
}
