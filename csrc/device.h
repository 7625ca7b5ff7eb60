// What a .cuh file includes: CUDA under nvcc, its model on the host (simt/) under any other compiler.
//
// Device code is plain CUDA C++ but for the two things that have no C++ syntax, launches and dynamic shared memory.
#pragma once

#if defined(__CUDACC__)

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define IECL_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)

// Declares `name` as the block's dynamic shared memory: Type*
#define IECL_DYNAMIC_SHARED(Type, name)                                   \
  extern __shared__ __align__(16) unsigned char iecl_dynamic_shared[];    \
  Type* const name = reinterpret_cast<Type*>(iecl_dynamic_shared)

#else

#include "simt/simt.h"

#define IECL_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ::simt::launch(grid, block, shared_bytes, stream, kernel, __VA_ARGS__)

#define IECL_DYNAMIC_SHARED(Type, name) Type* const name = static_cast<Type*>(::simt::dynamic_shared())

#endif
