// Definitions of TileKernels for one instruction set. Included after lanes.h, inside its namespace.

#if defined(IECL_LANES_AVX512)
constexpr int kGroup = 8, kPanelVectors = 3, kSumRows = 4, kSumVectors = 4;  // 32 registers
#elif defined(IECL_LANES_AVX2)
constexpr int kGroup = 6, kPanelVectors = 2, kSumRows = 6, kSumVectors = 2;  // 16 registers
#else
constexpr int kGroup = 4, kPanelVectors = 2, kSumRows = 4, kSumVectors = 2;
#endif
constexpr int kPanel = kPanelVectors * kLanes;  // keys that a group meets at a time
static_assert(kTile % kPanel == 0 && kTile % kLanes == 0 && kGroup <= kMaxGroup && kGroup % kSumRows == 0);
static_assert(kLanes <= kMaxLanes);

// ---- layout ----------------------------------------------------------------------------------------------------

typedef float Eight __attribute__((vector_size(32)));
#if defined(__clang__)
#define IECL_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t EightLanes __attribute__((vector_size(32)));
#define IECL_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, EightLanes{__VA_ARGS__})
#endif

inline void transpose_8x8(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  Eight row[8], pair[8], quad[8];
  for (int i = 0; i < 8; ++i) row[i] = load<Eight>(from + i * from_stride);
  for (int i = 0; i < 8; i += 2) {
    pair[i] = IECL_SHUFFLE(row[i], row[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pair[i + 1] = IECL_SHUFFLE(row[i], row[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      quad[i + 2 * j] = IECL_SHUFFLE(pair[i + j], pair[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      quad[i + 2 * j + 1] = IECL_SHUFFLE(pair[i + j], pair[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    store(to + i * to_stride, IECL_SHUFFLE(quad[i], quad[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
    store(to + (i + 4) * to_stride, IECL_SHUFFLE(quad[i], quad[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
  }
}

// to[j * to_stride + i] = from[i * from_stride + j]
void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to, int64_t to_stride) {
  const int64_t whole_rows = rows & ~int64_t{7}, whole_columns = columns & ~int64_t{7};
  for (int64_t i = 0; i < whole_rows; i += 8) {
    for (int64_t j = 0; j < whole_columns; j += 8) {
      transpose_8x8(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j) {
      to[j * to_stride + i] = from[i * from_stride + j];
    }
  }
}

#include "half.h"

// Compared as integers, magnitudes keep their order and NaN is the largest.
float largest_magnitude(const float* values, int64_t count) {
  Ints largest{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Ints magnitude = bits(load<Floats>(values + i)) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  int32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) result = largest[lane] > result ? largest[lane] : result;
  for (; i < count; ++i) {
    int32_t magnitude;
    __builtin_memcpy(&magnitude, values + i, sizeof magnitude);
    magnitude &= 0x7fffffff;
    result = magnitude > result ? magnitude : result;
  }
  float magnitude;
  __builtin_memcpy(&magnitude, &result, sizeof magnitude);
  return magnitude;
}

// Panels of kPanel keys, channel by channel: panel[(p * channels + c) * kPanel + k % kPanel], p = k / kPanel.
float pack_keys(const float* keys, int64_t key_stride, int64_t channel_stride, int count, int64_t channels,
                float* panel) {
  float largest = 0.0f;
  for (int begin = 0; begin < count; begin += kPanel) {
    const int here = std::min(count - begin, kPanel);
    float* to = panel + begin * channels;
    const float* from = keys + begin * key_stride;
    if (here < kPanel) std::fill_n(to, kPanel * channels, 0.0f);
    if (channel_stride == 1) {
      transpose(from, key_stride, here, channels, to, kPanel);
    } else {
      for (int64_t c = 0; c < channels; ++c) {
        for (int k = 0; k < here; ++k) to[c * kPanel + k] = from[k * key_stride + c * channel_stride];
      }
    }
    const float magnitude = largest_magnitude(to, kPanel * channels);
    largest = largest >= magnitude || largest != largest ? largest : magnitude;
  }
  return largest;
}

float pack_queries(const float* queries, int64_t stride, int count, int64_t channels, float* out) {
  std::fill_n(out, kGroup * channels, 0.0f);
  for (int g = 0; g < count; ++g) {
    for (int64_t c = 0; c < channels; ++c) out[c * kGroup + g] = queries[g * stride + c];
  }
  return largest_magnitude(out, kGroup * channels);
}

void copy_rows(const float* keys, int64_t key_stride, int64_t channel_stride, int count, int64_t channels,
               float* rows) {
  if (key_stride == 1) {
    transpose(keys, channel_stride, channels, count, rows, channels);
    return;
  }
  for (int k = 0; k < count; ++k) {
    for (int64_t c = 0; c < channels; ++c) rows[k * channels + c] = keys[k * key_stride + c * channel_stride];
  }
}

// ---- product ---------------------------------------------------------------------------------------------------

// Each sum runs over channels in ascending order, in blocks that are added up in ascending order: the bits of one
// similarity do not depend on where in a group or a tile its query and key stand.
constexpr int64_t kChannelBlock = 64;
constexpr int kAheadEvery = 8, kLine = 64;

// sum[g][v] += the products of one channel.
inline __attribute__((always_inline)) void add_channel(const float* queries, const float* panel,
                                                       Floats (&sum)[kGroup][kPanelVectors]) {
  Floats key[kPanelVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kPanelVectors; ++v) key[v] = load<Floats>(panel + v * kLanes);
#pragma GCC unroll 8
  for (int g = 0; g < kGroup; ++g) {
    const Floats query = floats(queries[g]);
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) sum[g][v] += query * key[v];
  }
}

// One group with one panel. Meanwhile asks for the bytes from `ahead` on, a cache line every few channels.
inline void panel_similarities(const float* queries, const float* panel, int64_t channels, float* similarity,
                               const char* ahead) {
  for (int64_t from = 0; from < channels || from == 0; from += kChannelBlock) {
    const int64_t to = std::min(from + kChannelBlock, channels);
    Floats sum[kGroup][kPanelVectors] = {};
    int64_t c = from;
    for (; c + kAheadEvery <= to; c += kAheadEvery) {
      __builtin_prefetch(ahead, 0, 2);
      ahead += kLine;
#pragma GCC unroll 8
      for (int i = 0; i < kAheadEvery; ++i) add_channel(queries + i * kGroup, panel + i * kPanel, sum);
      queries += kAheadEvery * kGroup;
      panel += kAheadEvery * kPanel;
    }
    for (; c < to; ++c, queries += kGroup, panel += kPanel) add_channel(queries, panel, sum);
#pragma GCC unroll 8
    for (int g = 0; g < kGroup; ++g) {
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) {
        float* out = similarity + g * kTile + v * kLanes;
        store(out, from == 0 ? sum[g][v] : load<Floats>(out) + sum[g][v]);
      }
    }
  }
}

// A panel stays in the first-level cache while it meets one group after the other.
void similarities(const float* queries, int groups, const float* panel, int count, int64_t channels, float* similarity,
                  const char* ahead, int64_t ahead_bytes) {
  const int64_t step = channels / kAheadEvery * kLine;
  int64_t asked = 0;
  for (int begin = 0; begin < count; begin += kPanel) {
    for (int group = 0; group < groups; ++group) {
      panel_similarities(queries + group * kGroup * channels, panel + begin * channels, channels,
                         similarity + group * kGroup * kTile + begin, ahead + std::min(asked, ahead_bytes));
      asked += step;
    }
  }
}

#include "ring/select_kernels.h"
#include "ring/weight_kernels.h"

constexpr TileKernels table(const char* name) {
  return {name,
          kGroup,
          from_float16,
          from_bfloat16,
          pack_keys,
          pack_queries,
          copy_rows,
          similarities,
          split,
          mask,
          filter,
          maximum,
          exponentials,
          weighted_sum,
          list_exponentials,
          list_weighted_sums,
          group_weighted_sum,
          scatter,
          order_keys,
          select,
          places_near};
}
