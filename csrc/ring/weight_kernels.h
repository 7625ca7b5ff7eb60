// TileKernels: exponentials and weighted sums. Included at the end of tile_kernels.h.

float maximum(const float* values, int count) {
  const Floats lowest = floats(-std::numeric_limits<float>::infinity());
  Floats largest = lowest;
  for (int begin = 0; begin < count; begin += kLanes) {
    const Floats value = blend(first_lanes(count - begin), load<Floats>(values + begin), lowest);
    largest = largest >= value || largest != largest ? largest : value;
  }
  return horizontal_maximum(largest);
}

// 2^x on [-1/2, 1/2] within 2e-9: the polynomial with the least largest relative error.
constexpr float kExp2[] = {1.0f,           0.693147182f,   0.240226462f,   0.0555032864f,
                           0.00961848907f, 0.00133999309f, 0.000153458124f};
constexpr float kLog2e = 1.44269504089f;

// exp((value - shift) * scale), where that is at most 88, within 2 ulp of the exponential of the rounded argument;
// 0 below about -87, where the result would be subnormal. `scale2` is scale * log2(e).
inline Floats exponential(Floats value, Floats shift, Floats scale2) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Floats x = (value - shift) * scale2;
  const Floats shifted = x + kRound;
  const Floats rest = x - (shifted - kRound);
  Floats series = rest * kExp2[6] + kExp2[5];
  for (int i = 4; i >= 0; --i) series = series * rest + kExp2[i];
  const Ints scaled = (Ints)((UnsignedInts)bits(series) + ((UnsignedInts)bits(shifted) << 23));
  // The sum would make a number of a NaN. Far below the range the series has no meaning.
  return x < -126.0f ? Floats{} : series != series ? series : from_bits(scaled);
}

void exponentials(float* values, int count, float shift, float scale, float* lane_sums) {
  Floats sum = load<Floats>(lane_sums);
  for (int begin = 0; begin < count; begin += kLanes) {
    const Floats value = exponential(load<Floats>(values + begin), floats(shift), floats(scale * kLog2e));
    store(values + begin, value);
    sum += blend(first_lanes(count - begin), value, Floats{});
  }
  store(lane_sums, sum);
}

// One loop over all lists: they are short, and every end of a loop is mispredicted.
void list_exponentials(const MemberLists& lists, float scale, float* lane_sums) {
  for (int i = 0; i < lists.count * kMaxLanes; i += kLanes) store(lane_sums + i, Floats{});
  const Floats scale2 = floats(scale * kLog2e);
  float* values = lists.value;
  const int end = lists.begin[lists.count];
  int list = 0;
  for (int begin = 0; begin < end; begin += kLanes) {
    list += begin == lists.begin[list + 1];  // no list is empty
    const Floats value = exponential(load<Floats>(values + begin), floats(lists.shift[list]), scale2);
    store(values + begin, value);
    float* sum = lane_sums + list * kMaxLanes;
    store(sum, load<Floats>(sum) + value);
  }
}

// Adds the products with entries while more(i) holds for the i-th; returns how many those are.
template <int kVectors, class More>
inline int weighted_sum_block(const float* weights, const int32_t* positions, const float* rows, int64_t stride,
                              float* sum, const More& more) {
  Floats total[kVectors] = {};
  int i = 0;
  for (; more(i); ++i) {
    const Floats weight = floats(weights[i]);
    const float* row = rows + positions[i] * stride;
    for (int v = 0; v < kVectors; ++v) total[v] += weight * load<Floats>(row + v * kLanes);
  }
  for (int v = 0; v < kVectors; ++v) store(sum + v * kLanes, load<Floats>(sum + v * kLanes) + total[v]);
  return i;
}

// Calls vectors(c, kVectors) and scalar(c) so that they cover all channels.
template <class Vectors, class Single>
inline void for_channels(int64_t channels, const Vectors& vectors, const Single& single) {
  int64_t c = 0;
  for (; c + 8 * kLanes <= channels; c += 8 * kLanes) vectors(c, std::integral_constant<int, 8>());
  for (; c + kLanes <= channels; c += kLanes) vectors(c, std::integral_constant<int, 1>());
  for (; c < channels; ++c) single(c);
}

void weighted_sum(const float* weights, const int32_t* positions, int count, const float* rows, int64_t stride,
                  int64_t channels, float* sum) {
  const auto more = [count](int i) { return i < count; };
  for_channels(
      channels,
      [&](int64_t c, auto vectors) {
        weighted_sum_block<decltype(vectors)::value>(weights, positions, rows + c, stride, sum + c, more);
      },
      [&](int64_t c) {
        float total = 0.0f;
        for (int i = 0; i < count; ++i) total += weights[i] * rows[positions[i] * stride + c];
        sum[c] += total;
      });
}

// The second-level cache delivers a key's channels at half the speed at which they can be used, so some keys that fit
// the first level meet all lists before the next ones follow.
void list_weighted_sums(const MemberLists& lists, const float* rows, int64_t stride, int64_t channels, int count,
                        int key_step) {
  int next[kMaxLists];
  std::copy_n(lists.begin, lists.count, next);
  for (int end = key_step; end - key_step < count; end += key_step) {
    int done[kMaxLists] = {};
    const auto for_lists = [&](const auto& use) {
      for (int list = 0; list < lists.count; ++list) {
        const float* weights = lists.value + next[list];
        const int32_t* positions = lists.position + next[list];
        if (positions[0] < end) done[list] = use(list, weights, positions);
      }
    };
    for_channels(
        channels,
        [&](int64_t c, auto vectors) {
          for_lists([&](int list, const float* weights, const int32_t* positions) {
            return weighted_sum_block<decltype(vectors)::value>(weights, positions, rows + c, stride,
                                                                lists.weighted[list] + c,
                                                                [&](int i) { return positions[i] < end; });
          });
        },
        [&](int64_t c) {
          for_lists([&](int list, const float* weights, const int32_t* positions) {
            float total = 0.0f;
            int i = 0;
            for (; positions[i] < end; ++i) total += weights[i] * rows[positions[i] * stride + c];
            lists.weighted[list][c] += total;
            return i;
          });
        });
    for (int list = 0; list < lists.count; ++list) next[list] += done[list];
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
