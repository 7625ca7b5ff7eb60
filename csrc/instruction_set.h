// Which of the compiled kernels this machine runs.
//
// IECL_FAST_ISA = avx512, avx2 or portable asks for a lesser set than the machine has (for tests and comparisons).
#pragma once

#include <cstdlib>
#include <cstring>

namespace iecl_fast {

#if defined(__x86_64__)
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
#endif

}  // namespace iecl_fast
