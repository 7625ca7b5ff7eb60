// The CUDA execution model on the host, for tests: what device code sees. The rules of the game are in simt.cpp and
// memory.cpp, written for what the kernels here use: another intrinsic is a line more.
//
// A fibre for each CUDA thread, blocks one after another, threads resumed in a seeded shuffled order. Found and
// reported with block and thread: barriers that not all threads reach, warp intrinsics whose mask and lanes disagree,
// shared memory used by two threads without a barrier in between, accesses beyond every buffer. Shared memory is
// poisoned.
//
// Device code is compiled with -fsanitize=thread,bounds, whose calls memory.cpp answers itself: no sanitizer's library
// is linked. In its object file the sections .bss are renamed to simt_shared: shared variables, and nothing else, lie there.
//
// Not modelled: blocks at the same time, the memory model's reorderings, textures, clusters, tensor cores.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__ static
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static

#define SIMT_UNWATCHED __attribute__((no_sanitize("thread"), noinline))

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaStream_t = void*;

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace simt {

using Site = std::source_location;  // of a barrier or warp intrinsic in device code
#define SIMT_SITE simt::Site site = simt::Site::current()

struct Counters {
  uint64_t global_loads = 0, global_load_bytes = 0, global_stores = 0, global_store_bytes = 0;
  uint64_t shared_loads = 0, shared_stores = 0, atomics = 0, barriers = 0, launches = 0;
};
extern Counters counters;

// Seed of the order in which threads are resumed.
extern uint64_t seed;

// Memory that kernels may touch: [data, data + bytes), while this object lives. Everything else on the heap is a fault.
class Global {
 public:
  Global(const void* data, size_t bytes);
  ~Global();
  Global(const Global&) = delete;

 private:
  uintptr_t begin_;
};

// Runs `thread` once for every thread of the grid. Throws std::runtime_error at the first fault.
void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread);

template <class... Parameters, class... Arguments>
void launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t, void (*kernel)(Parameters...),
            Arguments&&... arguments) {
  const std::tuple<std::decay_t<Parameters>...> copies(std::forward<Arguments>(arguments)...);
  run(grid, block, shared_bytes, [&] { std::apply(kernel, copies); });
}

void* dynamic_shared();

enum class Barrier { kSync, kCount, kAnd, kOr };
int block_barrier(Barrier kind, int predicate, Site site);

// Gives `value` to the lanes of `mask` and waits until all of them have given theirs. Returns their values by lane.
const uint64_t* exchange(const char* operation, uint32_t mask, uint64_t value, Site site);
unsigned lane();
[[noreturn]] void fail_lane(const char* operation, int lane, Site site);
void watch_atomic(const void* address, size_t bytes);

template <class T>
uint64_t pack(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "warp intrinsics take up to 8 bytes");
  uint64_t packed = 0;
  std::memcpy(&packed, &value, sizeof value);
  return packed;
}
template <class T>
T unpack(uint64_t packed) {
  T value;
  std::memcpy(&value, &packed, sizeof value);
  return value;
}

template <class T>
T shuffle(const char* operation, uint32_t mask, T value, int source, Site site) {
  const uint64_t* values = exchange(operation, mask, pack(value), site);
  if (!(mask >> source & 1)) fail_lane(operation, source, site);
  return unpack<T>(values[source]);
}

template <class T, class Combine>
T reduce(const char* operation, uint32_t mask, T value, Combine combine, Site site) {
  const uint64_t* values = exchange(operation, mask, pack(value), site);
  bool first = true;
  T result{};
  for (int lane = 0; lane < warpSize; ++lane) {
    if (!(mask >> lane & 1)) continue;
    result = first ? unpack<T>(values[lane]) : combine(result, unpack<T>(values[lane]));
    first = false;
  }
  return result;
}

template <class T, class Change>
SIMT_UNWATCHED T atomic(T* address, Change change) {
  watch_atomic(address, sizeof(T));
  const T old = *address;
  *address = change(old);
  return old;
}

}  // namespace simt

// ---- synchronisation -------------------------------------------------------------------------------------------

inline void __syncthreads(SIMT_SITE) { simt::block_barrier(simt::Barrier::kSync, 0, site); }
inline int __syncthreads_count(int predicate, SIMT_SITE) {
  return simt::block_barrier(simt::Barrier::kCount, predicate, site);
}
inline int __syncthreads_and(int predicate, SIMT_SITE) {
  return simt::block_barrier(simt::Barrier::kAnd, predicate, site);
}
inline int __syncthreads_or(int predicate, SIMT_SITE) {
  return simt::block_barrier(simt::Barrier::kOr, predicate, site);
}
inline void __syncwarp(uint32_t mask = 0xffffffffu, SIMT_SITE) {
  simt::exchange("__syncwarp", mask, 0, site);
}

// ---- warps -----------------------------------------------------------------------------------------------------

// Lanes outside the segment of `width` lanes, or beyond its end, give the lane's own value, as in CUDA.
template <class T>
T __shfl_sync(uint32_t mask, T value, int source, int width = warpSize, SIMT_SITE) {
  const int lane = simt::lane();
  return simt::shuffle("__shfl_sync", mask, value, (lane & ~(width - 1)) + (source & (width - 1)), site);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = warpSize, SIMT_SITE) {
  const int lane = simt::lane(), source = lane - int(delta);
  return simt::shuffle("__shfl_up_sync", mask, value, source < (lane & ~(width - 1)) ? lane : source, site);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = warpSize, SIMT_SITE) {
  const int lane = simt::lane(), source = lane + int(delta);
  return simt::shuffle("__shfl_down_sync", mask, value, source > (lane | (width - 1)) ? lane : source, site);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, int width = warpSize, SIMT_SITE) {
  const int lane = simt::lane(), source = lane ^ lane_mask;
  return simt::shuffle("__shfl_xor_sync", mask, value, source > (lane | (width - 1)) ? lane : source, site);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate, SIMT_SITE) {
  const uint32_t bit = predicate != 0 ? 1u << simt::lane() : 0u;
  return simt::reduce("__ballot_sync", mask, bit, [](uint32_t a, uint32_t b) { return a | b; }, site);
}
inline int __any_sync(uint32_t mask, int predicate, SIMT_SITE) {
  return simt::reduce("__any_sync", mask, predicate != 0, [](bool a, bool b) { return a || b; }, site);
}
inline int __all_sync(uint32_t mask, int predicate, SIMT_SITE) {
  return simt::reduce("__all_sync", mask, predicate != 0, [](bool a, bool b) { return a && b; }, site);
}
template <class T>
uint32_t __match_any_sync(uint32_t mask, T value, SIMT_SITE) {
  const uint64_t* values = simt::exchange("__match_any_sync", mask, simt::pack(value), site);
  uint32_t equal = 0;
  for (int lane = 0; lane < warpSize; ++lane) {
    if (mask >> lane & 1 && values[lane] == simt::pack(value)) equal |= 1u << lane;
  }
  return equal;
}

#define SIMT_REDUCE(name, Limit, expression)                                               \
  template <class T>                                                                       \
  T name(uint32_t mask, T value, SIMT_SITE) {                                              \
    static_assert(sizeof(T) == 4 && std::Limit<T>, #name " takes 32-bit integers");        \
    return simt::reduce(#name, mask, value, [](T a, T b) { return T(expression); }, site); \
  }
SIMT_REDUCE(__reduce_add_sync, is_integral_v, a + b)
SIMT_REDUCE(__reduce_min_sync, is_integral_v, std::min(a, b))
SIMT_REDUCE(__reduce_max_sync, is_integral_v, std::max(a, b))
SIMT_REDUCE(__reduce_and_sync, is_unsigned_v, a & b)
SIMT_REDUCE(__reduce_or_sync, is_unsigned_v, a | b)
SIMT_REDUCE(__reduce_xor_sync, is_unsigned_v, a ^ b)

// ---- atomics ---------------------------------------------------------------------------------------------------

#define SIMT_ATOMIC(name, expression)                                   \
  template <class T>                                                    \
  T name(T* address, std::type_identity_t<T> value) {                   \
    return simt::atomic(address, [=](T old) { return T(expression); });  \
  }
SIMT_ATOMIC(atomicAdd, old + value)
SIMT_ATOMIC(atomicSub, old - value)
SIMT_ATOMIC(atomicMin, std::min(old, value))
SIMT_ATOMIC(atomicMax, std::max(old, value))

// ---- types and arithmetic --------------------------------------------------------------------------------------

using __half = torch::headeronly::Half;
using __nv_bfloat16 = torch::headeronly::BFloat16;
inline float __half2float(__half value) { return value; }
inline __half __float2half_rn(float value) { return value; }
inline float __bfloat162float(__nv_bfloat16 value) { return value; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return value; }

#define SIMT_VECTORS(Element, name)                                                                              \
  struct alignas(2 * sizeof(Element)) name##2 { Element x, y; };                                                 \
  struct alignas(16) name##4 { Element x, y, z, w; };                                                            \
  inline name##2 make_##name##2(Element x, Element y) { return {x, y}; }                                         \
  inline name##4 make_##name##4(Element x, Element y, Element z, Element w) { return {x, y, z, w}; }
SIMT_VECTORS(float, float)
SIMT_VECTORS(int, int)
SIMT_VECTORS(unsigned, uint)

using std::max;
using std::min;

inline int __float_as_int(float value) { return simt::unpack<int>(simt::pack(value)); }
inline unsigned __float_as_uint(float value) { return simt::unpack<unsigned>(simt::pack(value)); }
inline float __int_as_float(int value) { return simt::unpack<float>(simt::pack(value)); }
inline float __uint_as_float(unsigned value) { return simt::unpack<float>(simt::pack(value)); }

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(unsigned(value)); }

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
