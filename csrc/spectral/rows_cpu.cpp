// Compiles the row kernels for each instruction set and picks those for the machine at hand, once.
//
// IECL_FAST_ISA = avx512, avx2 or portable asks for a lesser set than the machine has (for tests and comparisons).

#include "spectral/rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdlib>
#include <cstring>

namespace iecl_fast::spectral {

namespace portable {
constexpr const char* kName = "portable";
constexpr int kLanes = 4;
#if defined(__x86_64__)
inline void stream(float* to, __m128 vector) { _mm_stream_ps(to, vector); }
inline void finish_streams() { _mm_sfence(); }
#else
template <class Vector>
inline void stream(float* to, Vector vector) {
  __builtin_memcpy(to, &vector, sizeof vector);
}
inline void finish_streams() {}
#endif
#include "spectral/rows_kernels.h"
}  // namespace portable

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
constexpr const char* kName = "avx2";
constexpr int kLanes = 8;
inline void stream(float* to, __m256 vector) { _mm256_stream_ps(to, vector); }
inline void finish_streams() { _mm_sfence(); }
#include "spectral/rows_kernels.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#define IECL_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#pragma clang attribute push(IECL_AVX512, apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif
namespace avx512 {
constexpr const char* kName = "avx512";
constexpr int kLanes = 16;
inline void stream(float* to, __m512 vector) { _mm512_stream_ps(to, vector); }
inline void finish_streams() { _mm_sfence(); }
#include "spectral/rows_kernels.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

static const RowKernels& best_kernels() {
  const char* wanted = std::getenv("IECL_FAST_ISA");
  const auto allows = [wanted](const RowKernels& kernels) {
    return wanted == nullptr || std::strcmp(wanted, kernels.name) == 0;
  };
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && allows(avx512::kernels)) return avx512::kernels;
  if (has_avx2 && allows(avx2::kernels)) return avx2::kernels;
  return portable::kernels;
}

#else
static const RowKernels& best_kernels() { return portable::kernels; }
#endif

const RowKernels& row_kernels() {
  static const RowKernels& kernels = best_kernels();
  return kernels;
}

}  // namespace iecl_fast::spectral
