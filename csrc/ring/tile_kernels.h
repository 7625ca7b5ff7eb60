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

void from_float16(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    // Moved into place, the exponent is too small by 112, also for subnormals; that of infinity and NaN stays largest.
    const uint32_t magnitude = uint32_t(from[i] & 0x7fff) << 13;
    float value;
    __builtin_memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;
    uint32_t raw;
    __builtin_memcpy(&raw, &value, sizeof raw);
    raw |= uint32_t(from[i] & 0x8000) << 16 | (magnitude >= 0x0f800000 ? 0x7f800000 : 0);
    __builtin_memcpy(to + i, &raw, sizeof raw);
  }
}

void from_bfloat16(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t raw = uint32_t(from[i]) << 16;
    __builtin_memcpy(to + i, &raw, sizeof raw);
  }
}

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
  int begin = 0;
  for (; begin < count; begin += kPanel) {
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
  }
  return largest_magnitude(panel, begin * channels);
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
constexpr int64_t kChannelBlock = 256;
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

inline float horizontal_maximum(Floats values) {
  float result = values[0];
  for (int lane = 1; lane < kLanes; ++lane) {
    result = result >= values[lane] || result != result ? result : values[lane];
  }
  return result;
}

// ---- selection -------------------------------------------------------------------------------------------------

inline Ints order_key(Floats similarity) {
  const Ints raw = bits(similarity + 0.0f);  // -0 becomes +0
  const Ints key = raw ^ (raw >> 31 & 0x7fffffff);
  return similarity == similarity ? key : ints(kNanKey);
}

void order_keys(const float* similarity, int64_t count, int32_t* keys) {
  for (int64_t i = 0; i < count; i += kLanes) store(keys + i, order_key(load<Floats>(similarity + i)));
}

// Smallest and largest of the keys.
std::pair<int32_t, int32_t> key_range(const int32_t* keys, int64_t count) {
  Ints smallest = ints(kAboveAll.key), largest = ints(kBelowAll.key);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Ints key = load<Ints>(keys + i);
    smallest = key < smallest ? key : smallest;
    largest = key > largest ? key : largest;
  }
  int32_t low = smallest[0], high = largest[0];
  for (int lane = 1; lane < kLanes; ++lane) {
    low = std::min<int32_t>(low, smallest[lane]);
    high = std::max<int32_t>(high, largest[lane]);
  }
  for (; i < count; ++i) {
    low = std::min(low, keys[i]);
    high = std::max(high, keys[i]);
  }
  return {low, high};
}

int64_t count_below(const int32_t* keys, int64_t count, int32_t pivot) {
  int64_t reached[2] = {}, i = 0;  // two sums, for two additions at a time
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    reached[0] += __builtin_popcount(at_least(load<Ints>(keys + i), ints(pivot)));
    reached[1] += __builtin_popcount(at_least(load<Ints>(keys + i + kLanes), ints(pivot)));
  }
  for (; i < count; ++i) reached[0] += keys[i] >= pivot;
  return count - reached[0] - reached[1];
}

// The similarity with a key; a NaN for keys that no similarity has.
inline float float_of(int32_t key) { return from_bits(ints(key ^ (key >> 31 & 0x7fffffff)))[0]; }

// Keys from `low` to `high`, both inclusive, among them entries of the ranks below .. up_to - 1.
struct Interval {
  int64_t low, high;
  int64_t below, up_to;

  // Leaves one half, the one with the wanted rank: up to `middle` or above it.
  void cut(int64_t middle, const int32_t* keys, int64_t count, int64_t rank) {
    const int64_t up_to_middle = count_below(keys, count, int32_t(middle + 1));
    if (up_to_middle > rank) {
      high = middle;
      up_to = up_to_middle;
    } else {
      low = middle + 1;
      below = up_to_middle;
    }
  }
};

// Shrinks the interval around the wanted rank until at most `few` entries are left, or all that are left are equal.
// In turn: where the wanted one would be if similarities were spread evenly, half-way between them, and half-way between
// the keys, which halves what is left whatever the data.
void narrow(Interval& interval, const int32_t* keys, int64_t count, int64_t rank, int64_t few) {
  for (int step = 0; interval.low < interval.high && interval.up_to - interval.below > few; ++step) {
    const float least = float_of(int32_t(interval.low)), most = float_of(int32_t(interval.high));
    int64_t middle = interval.low + (interval.high - interval.low) / 2;
    if (step % 3 < 2 && most - least < std::numeric_limits<float>::infinity()) {
      const float share =
          step % 3 == 0 ? (float(rank - interval.below) + 0.5f) / float(interval.up_to - interval.below) : 0.5f;
      middle = order_key(floats(least + (most - least) * share))[0];
    }
    interval.cut(std::clamp(middle, interval.low, interval.high - 1), keys, count, rank);
  }
}

int64_t select(const int32_t* keys, int64_t count, int64_t rank, int32_t low_hint, int32_t high_hint) {
  constexpr int64_t kFew = 32;
  const auto [lowest, highest] = key_range(keys, count);
  Interval interval{lowest, highest, 0, count};
  for (const int64_t hint : {int64_t{low_hint} - 1, int64_t{high_hint}}) {
    if (hint >= interval.low && hint < interval.high) interval.cut(hint, keys, count, rank);
  }
  narrow(interval, keys, count, rank, kFew);

  const Ints low = ints(int32_t(interval.low)), high = ints(int32_t(interval.high));
  std::pair<int32_t, int64_t> few[kFew];
  int64_t found = 0, remaining = rank - interval.below;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Ints key = load<Ints>(keys + i);
    Mask inside = at_least(key, low) & at_least(high, key) & first_lanes(int(std::min<int64_t>(count - i, kLanes)));
    if (interval.low == interval.high) {  // all equal: the wanted one is the remaining-th in order
      const int here = __builtin_popcount(inside);
      if (remaining >= here) {
        remaining -= here;
        continue;
      }
      for (; remaining > 0; --remaining) inside &= inside - 1;
      return i + __builtin_ctz(inside);
    }
    for (; inside != 0; inside &= inside - 1) {
      const int64_t position = i + __builtin_ctz(inside);
      few[found++] = {keys[position], position};
    }
  }
  std::nth_element(few, few + remaining, few + found);
  return few[remaining].second;
}

void places_near(const int32_t* keys, const uint32_t* indices, int64_t count, const int64_t* ranks, int64_t num_ranks,
                 int64_t tolerance, Place* before, Place* after) {
  const auto [lowest, highest] = key_range(keys, count);
  Interval interval{lowest, highest, 0, count};
  for (int64_t i = 0; i < num_ranks; ++i) {
    interval = {interval.low, highest, interval.below, count};  // ranks ascend
    narrow(interval, keys, count, ranks[i], tolerance);
    before[i] = {int32_t(interval.low), 0};
    after[i] = {int32_t(interval.high + 1), 0};
    if (interval.low < interval.high) continue;
    const int64_t position = select(keys, count, ranks[i], int32_t(interval.low), int32_t(interval.high));
    before[i] = {keys[position], indices[position]};
    after[i] = before[i].next();
  }
}

// "At or above a place" for the entries of one tile: compare with `key` from `position` on, with `key + 1` before it.
struct TileLimit {
  int32_t key;
  int position;

  TileLimit(Place place, uint32_t first_key, int count)
      : key(place.key),
        position(place.index <= first_key ? 0
                 : place.index - first_key >= uint32_t(count) ? kTile : int(place.index - first_key)) {}

  bool uniform() const { return position == 0 || position == kTile; }

  // For finite similarities; clamped, since beyond the finite keys there are only NaN patterns.
  float as_float() const {
    constexpr int32_t kLowestFinite = -0x7f800000, kInfinity = 0x7f800000;
    int32_t value = position == 0 ? key : key + 1;
    value = value < kLowestFinite ? kLowestFinite : value > kInfinity ? kInfinity : value;
    return float_of(value);
  }

  Mask reached(Ints keys, Ints positions) const {
    return at_least(keys, positions >= position ? ints(key) : ints(key + (position > 0)));
  }
};

struct TileWindow {
  TileLimit lower, inner_lower, inner_upper, upper;
  bool plain;  // float comparisons decide

  TileWindow(const RowTile& row, const Window& window)
      : lower(window.lower, row.first_key, row.count),
        inner_lower(window.inner_lower, row.first_key, row.count),
        inner_upper(window.inner_upper, row.first_key, row.count),
        upper(window.upper, row.first_key, row.count),
        plain(row.finite && row.count % kLanes == 0 && row.excluded < 0 && lower.uniform() && inner_lower.uniform() &&
              inner_upper.uniform() && upper.uniform()) {}
};

// Appends the chosen lanes behind the first `count` members; returns the new count, which the caller keeps in a register.
inline int append(Members& members, int count, Floats similarity, Ints position, Mask mask) {
  compress(members.value + count, similarity, mask);
  compress(members.position + count, position, mask);
  return count + __builtin_popcount(mask);
}

struct Verdict {
  Mask reached, certain, undecided;
};

// Any data, any tile: integer keys, ties by position, absent and excluded keys left out.
inline Verdict judge(const RowTile& row, const TileWindow& window, Floats similarity, Ints position, int begin) {
  const Ints key = order_key(similarity);
  Mask present = first_lanes(row.count - begin);
  if (row.excluded >= begin && row.excluded < begin + kLanes) present &= ~(1u << (row.excluded - begin));
  const Mask reached = window.lower.reached(key, position) & present;
  const Mask certain =
      reached & window.inner_lower.reached(key, position) & ~window.inner_upper.reached(key, position);
  return {reached, certain, reached & ~certain & ~window.upper.reached(key, position)};
}

int split(const RowTile& row, const Window& places, Members& certain, Members& undecided) {
  const TileWindow window(row, places);
  const Ints lanes = lane_numbers();
  int reached = 0, sure = 0, open = 0;
  if (!window.plain) {
    for (int begin = 0; begin < row.count; begin += kLanes) {
      const Floats similarity = load<Floats>(row.similarity + begin);
      const Verdict verdict = judge(row, window, similarity, lanes + begin, begin);
      reached += __builtin_popcount(verdict.reached);
      sure = append(certain, sure, similarity, lanes + begin, verdict.certain);
      open = append(undecided, open, similarity, lanes + begin, verdict.undecided);
    }
    certain.count = sure;
    undecided.count = open;
    return reached;
  }

  // Few entries lie in the window: first squeeze the others out, then sort what is left.
  const float inner_lower = window.inner_lower.as_float(), inner_upper = window.inner_upper.as_float();
  const float lower = window.lower.as_float(), upper = window.upper.as_float();
  const bool all_certain = lower == inner_lower && inner_upper == upper, none_certain = inner_lower >= inner_upper;
  Members squeezed;
  Members& inside = all_certain ? certain : none_certain ? undecided : squeezed;
  int count = 0;
  for (int begin = 0; begin < row.count; begin += kLanes) {
    const Floats similarity = load<Floats>(row.similarity + begin);
    const Mask above = at_least(similarity, floats(lower));
    reached += __builtin_popcount(above);
    count = append(inside, count, similarity, lanes + begin, above & ~at_least(similarity, floats(upper)));
  }
  certain.count = undecided.count = 0;
  inside.count = count;
  if (all_certain || none_certain) return reached;
  for (int begin = 0; begin < count; begin += kLanes) {
    const Floats similarity = load<Floats>(squeezed.value + begin);
    const Ints position = load<Ints>(squeezed.position + begin);
    const Mask present = first_lanes(count - begin);
    const Mask inner = at_least(similarity, floats(inner_lower)) & ~at_least(similarity, floats(inner_upper));
    sure = append(certain, sure, similarity, position, inner & present);
    open = append(undecided, open, similarity, position, ~inner & present);
  }
  certain.count = sure;
  undecided.count = open;
  return reached;
}

int mask(const RowTile& row, const Window& places, float* masked, int* certain, float* largest, Members& undecided) {
  const TileWindow window(row, places);
  const Ints lanes = lane_numbers();
  const Floats outside = floats(-std::numeric_limits<float>::infinity());
  const float inner_lower = window.inner_lower.as_float(), inner_upper = window.inner_upper.as_float();
  const float lower = window.lower.as_float(), upper = window.upper.as_float();
  Floats most = outside;
  int reached = 0, sure = 0, open = 0;
  for (int begin = 0; begin < row.count; begin += kLanes) {
    const Floats similarity = load<Floats>(row.similarity + begin);
    Verdict verdict;
    if (window.plain) {
      verdict.reached = at_least(similarity, floats(lower));
      verdict.certain = at_least(similarity, floats(inner_lower)) & ~at_least(similarity, floats(inner_upper));
      verdict.undecided = verdict.reached & ~verdict.certain & ~at_least(similarity, floats(upper));
    } else {
      verdict = judge(row, window, similarity, lanes + begin, begin);
    }
    const Floats value = blend(verdict.certain, similarity, outside);
    most = value > most ? value : most;
    store(masked + begin, value);
    reached += __builtin_popcount(verdict.reached);
    sure += __builtin_popcount(verdict.certain);
    if (verdict.undecided) open = append(undecided, open, similarity, lanes + begin, verdict.undecided);
  }
  *certain = sure;
  *largest = horizontal_maximum(most);
  undecided.count = open;
  return reached;
}

void filter(const float* similarity, const uint16_t* position, int count, uint32_t first_key, Place lower, Place upper,
            Members& members) {
  const TileLimit from(lower, first_key, kTile), to(upper, first_key, kTile);
  int found = 0;
  for (int begin = 0; begin < count; begin += kLanes) {
    const Floats value = load<Floats>(similarity + begin);
    Ints place;
    for (int lane = 0; lane < kLanes; ++lane) place[lane] = position[begin + lane];
    const Ints key = order_key(value);
    const Mask inside = from.reached(key, place) & ~to.reached(key, place) & first_lanes(count - begin);
    found = append(members, found, value, place, inside);
  }
  members.count = found;
}

// ---- weights ---------------------------------------------------------------------------------------------------

float maximum(const float* values, int count) {
  const Floats lowest = floats(-std::numeric_limits<float>::infinity());
  Floats largest = lowest;
  for (int begin = 0; begin < count; begin += kLanes) {
    const Floats value = blend(first_lanes(count - begin), load<Floats>(values + begin), lowest);
    largest = largest >= value || largest != largest ? largest : value;
  }
  return horizontal_maximum(largest);
}

// exp(x) for x <= 88 within 2 ulp, 0 below -87 where the result would be subnormal.
inline Floats exponential(Floats x) {
  constexpr float kLog2e = 1.44269504089f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Floats shifted = x * kLog2e + kRound;
  const Floats whole = shifted - kRound;
  const Floats rest = x - whole * kLn2High - whole * kLn2Low;
  Floats series = rest * (1.0f / 5040) + (1.0f / 720);
  series = series * rest + (1.0f / 120);
  series = series * rest + (1.0f / 24);
  series = series * rest + (1.0f / 6);
  series = series * rest + 0.5f;
  series = series * rest * rest + rest + 1.0f;
  const Ints exponent = (bits(shifted) - bits(floats(kRound)) + 127) << 23;
  return x < -87.0f ? Floats{} : series * from_bits(exponent);
}

void exponentials(float* values, int count, float shift, float scale, float* lane_sums) {
  Floats sum = load<Floats>(lane_sums);
  for (int begin = 0; begin < count; begin += kLanes) {
    const Floats value = exponential((load<Floats>(values + begin) - shift) * scale);
    store(values + begin, value);
    sum += blend(first_lanes(count - begin), value, Floats{});
  }
  store(lane_sums, sum);
}

template <int kVectors>
inline void weighted_sum_block(const float* weights, const int32_t* positions, int count, const float* rows,
                               int64_t stride, float* sum) {
  Floats total[kVectors] = {};
  for (int i = 0; i < count; ++i) {
    const Floats weight = floats(weights[i]);
    const float* row = rows + positions[i] * stride;
    for (int v = 0; v < kVectors; ++v) total[v] += weight * load<Floats>(row + v * kLanes);
  }
  for (int v = 0; v < kVectors; ++v) store(sum + v * kLanes, load<Floats>(sum + v * kLanes) + total[v]);
}

void weighted_sum(const float* weights, const int32_t* positions, int count, const float* rows, int64_t stride,
                  int64_t channels, float* sum) {
  int64_t c = 0;
  for (; c + 8 * kLanes <= channels; c += 8 * kLanes) {
    weighted_sum_block<8>(weights, positions, count, rows + c, stride, sum + c);
  }
  for (; c + kLanes <= channels; c += kLanes) {
    weighted_sum_block<1>(weights, positions, count, rows + c, stride, sum + c);
  }
  for (; c < channels; ++c) {
    float total = 0.0f;
    for (int i = 0; i < count; ++i) total += weights[i] * rows[positions[i] * stride + c];
    sum[c] += total;
  }
}

template <int kVectors>
inline void group_sum_block(const float* weights, int count, const float* rows, int64_t stride, int64_t channels,
                            float* sum) {
  Floats total[kSumRows][kVectors] = {};
  for (int k = 0; k < count; ++k) {
    Floats key[kVectors];
    for (int v = 0; v < kVectors; ++v) key[v] = load<Floats>(rows + k * stride + v * kLanes);
#pragma GCC unroll 8
    for (int g = 0; g < kSumRows; ++g) {
      const Floats weight = floats(weights[g * kTile + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) total[g][v] += weight * key[v];
    }
  }
  for (int g = 0; g < kSumRows; ++g) {
    for (int v = 0; v < kVectors; ++v) {
      float* to = sum + g * channels + v * kLanes;
      store(to, load<Floats>(to) + total[g][v]);
    }
  }
}

void group_weighted_sum(const float* weights, int count, const float* rows, int64_t stride, int64_t channels,
                        float* sum) {
  for (int begin = 0; begin < kGroup; begin += kSumRows, weights += kSumRows * kTile, sum += kSumRows * channels) {
    int64_t c = 0;
    for (; c + kSumVectors * kLanes <= channels; c += kSumVectors * kLanes) {
      group_sum_block<kSumVectors>(weights, count, rows + c, stride, channels, sum + c);
    }
    for (; c + kLanes <= channels; c += kLanes) {
      group_sum_block<1>(weights, count, rows + c, stride, channels, sum + c);
    }
    for (; c < channels; ++c) {
      for (int g = 0; g < kSumRows; ++g) {
        float total = 0.0f;
        for (int k = 0; k < count; ++k) total += weights[g * kTile + k] * rows[k * stride + c];
        sum[g * channels + c] += total;
      }
    }
  }
}

void scatter(const float* weights, const int32_t* positions, int count, const float* query, int64_t channels,
             float* rows) {
  for (int i = 0; i < count; ++i) {
    float* row = rows + positions[i] * channels;
    int64_t c = 0;
    for (; c + kLanes <= channels; c += kLanes) {
      store(row + c, load<Floats>(row + c) + weights[i] * load<Floats>(query + c));
    }
    for (; c < channels; ++c) row[c] += weights[i] * query[c];
  }
}
