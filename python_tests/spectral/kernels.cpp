// The launches of csrc/spectral on the host, with tables so small that several slices are needed.
#define IECL_SPECTRAL_SLICE 2
#include "spectral/norm_cuda.cu"
