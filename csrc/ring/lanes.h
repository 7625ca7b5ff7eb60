// One vector register of floats and of integers, and the few things compilers need intrinsics for.
//
// Included inside a namespace and under a target pragma, once for each instruction set; see tile_cpu_*.cpp.
// Everything else is written with the vector extensions of GCC and Clang.

#if defined(IECL_LANES_AVX512)
constexpr int kLanes = 16;
#elif defined(IECL_LANES_AVX2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UnsignedInts __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 2)));

template <class Vector, class Element>
inline Vector load(const Element* from) {
  Vector vector;
  __builtin_memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector, class Element>
inline void store(Element* to, Vector vector) {
  __builtin_memcpy(to, &vector, sizeof vector);
}

inline Floats floats(float value) { return value - Floats{}; }
inline Ints ints(int32_t value) { return value - Ints{}; }
inline Ints bits(Floats value) { return reinterpret_cast<Ints>(value); }
inline Floats from_bits(Ints value) { return reinterpret_cast<Floats>(value); }

inline Ints lane_numbers() {
  Ints numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

// One bit for each lane. compress() writes the chosen lanes side by side and may write a whole vector.
using Mask = uint32_t;
#if defined(IECL_LANES_AVX512)

inline Mask at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ); }
inline Mask at_least(Ints a, Ints b) { return _mm512_cmpge_epi32_mask((__m512i)a, (__m512i)b); }
inline void compress(float* to, Floats values, Mask mask) {
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(mask, (__m512)values));
}
inline void compress(int32_t* to, Ints values, Mask mask) {
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(mask, (__m512i)values));
}

#elif defined(IECL_LANES_AVX2)

inline Mask at_least(Floats a, Floats b) { return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GE_OQ)); }
inline Mask at_least(Ints a, Ints b) {
  return 0xffu & ~_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32((__m256i)b, (__m256i)a)));
}
// The lanes of a mask, one a byte: where compress takes each lane of its result from.
struct LaneTable {
  alignas(64) uint64_t lanes[256];
  constexpr LaneTable() : lanes{} {
    for (int mask = 0; mask < 256; ++mask) {
      int filled = 0;
      for (uint64_t lane = 0; lane < 8; ++lane) {
        if (mask >> lane & 1) lanes[mask] |= lane << (8 * filled++);
      }
    }
  }
};
constexpr LaneTable kLaneTable;
inline __m256i chosen_lanes(Mask mask) { return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(kLaneTable.lanes[mask])); }
inline void compress(float* to, Floats values, Mask mask) {
  _mm256_storeu_ps(to, _mm256_permutevar8x32_ps((__m256)values, chosen_lanes(mask)));
}
inline void compress(int32_t* to, Ints values, Mask mask) {
  _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32((__m256i)values, chosen_lanes(mask)));
}

#else

template <class Vector>
inline Mask at_least(Vector a, Vector b) {
  Mask mask = 0;
  for (int lane = 0; lane < kLanes; ++lane) mask |= Mask(a[lane] >= b[lane]) << lane;
  return mask;
}
template <class Vector, class Element>
inline void compress(Element* to, Vector values, Mask mask) {
  for (int lane = 0; lane < kLanes; ++lane) {
    *to = values[lane];
    to += mask >> lane & 1;
  }
}

#endif

inline Floats blend(Mask mask, Floats yes, Floats no) {
#if defined(IECL_LANES_AVX512)
  return (Floats)_mm512_mask_blend_ps(mask, (__m512)no, (__m512)yes);
#else
  return (ints(mask) >> lane_numbers() & 1) != 0 ? yes : no;
#endif
}

constexpr Mask kAllLanes = (1u << kLanes) - 1;
inline Mask first_lanes(int count) { return count >= kLanes ? kAllLanes : (1u << (count > 0 ? count : 0)) - 1; }
