// The launches of csrc/ring on the host.
#include "ring/compact_cuda.cu"
#include "ring/gradient_cuda.cu"
#include "ring/select_cuda.cu"
