// Compiles the row kernels for each instruction set and picks those for the machine at hand, once.

#include "instruction_set.h"
#include "spectral/rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

IECL_AVX2
namespace avx2 {
constexpr const char* kName = "avx2";
constexpr int kLanes = 8;
inline void stream(float* to, __m256 vector) { _mm256_stream_ps(to, vector); }
inline void finish_streams() { _mm_sfence(); }
#include "spectral/rows_kernels.h"
}  // namespace avx2
IECL_END_OF_TARGET

IECL_AVX512
namespace avx512 {
constexpr const char* kName = "avx512";
constexpr int kLanes = 16;
inline void stream(float* to, __m512 vector) { _mm512_stream_ps(to, vector); }
inline void finish_streams() { _mm_sfence(); }
#include "spectral/rows_kernels.h"
}  // namespace avx512
IECL_END_OF_TARGET

static const RowKernels& best_kernels() {
  return choose_kernels(avx512::kernels, avx2::kernels, portable::kernels);
}

#else
static const RowKernels& best_kernels() { return portable::kernels; }
#endif

const RowKernels& row_kernels() {
  static const RowKernels& kernels = best_kernels();
  return kernels;
}

}  // namespace iecl_fast::spectral
