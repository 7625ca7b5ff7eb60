// What kernels for one instruction set are compiled with, and which of the compiled kernels this machine runs.
//
// IECL_FAST_ISA = avx512, avx2 or portable asks for a lesser set than the machine has (for tests and comparisons).
#pragma once

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)

// Between IECL_AVX2 or IECL_AVX512 and IECL_END_OF_TARGET functions may use these instructions. No header is included
// there that others include too: its inline functions would not run on every machine.
#define IECL_PRAGMA(...) _Pragma(#__VA_ARGS__)
#if defined(__clang__)
#define IECL_TARGET(features) \
  IECL_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define IECL_END_OF_TARGET IECL_PRAGMA(clang attribute pop)
#else
#define IECL_TARGET(features) IECL_PRAGMA(GCC push_options) IECL_PRAGMA(GCC target(features))
#define IECL_END_OF_TARGET IECL_PRAGMA(GCC pop_options)
#endif
#define IECL_AVX2 IECL_TARGET("avx2,fma")
#define IECL_AVX512 IECL_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")

namespace iecl_fast {

// The best of three tables of kernels, each with its set's `name`.
template <class Kernels>
const Kernels& choose_kernels(const Kernels& avx512, const Kernels& avx2, const Kernels& portable) {
  const char* wanted = std::getenv("IECL_FAST_ISA");
  const auto allows = [wanted](const Kernels& kernels) {
    return wanted == nullptr || std::strcmp(wanted, kernels.name) == 0;
  };
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && allows(avx512)) return avx512;
  if (has_avx2 && allows(avx2)) return avx2;
  return portable;
}

}  // namespace iecl_fast

#endif  // __x86_64__
