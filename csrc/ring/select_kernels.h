// TileKernels: order, selection and the sorting of entries by windows. Included at the end of tile_kernels.h.

inline float horizontal_maximum(Floats values) {
  float result = values[0];
  for (int lane = 1; lane < kLanes; ++lane) {
    result = result >= values[lane] || result != result ? result : values[lane];
  }
  return result;
}

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

  // Leaves one half, the one with the wanted rank: up to `middle` or above it. `omitted` keys below `low` are not listed.
  void cut(int64_t middle, const int32_t* keys, int64_t count, int64_t rank, int64_t omitted) {
    const int64_t up_to_middle = omitted + count_below(keys, count, int32_t(middle + 1));
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
void narrow(Interval& interval, const int32_t* keys, int64_t count, int64_t rank, int64_t few, int64_t omitted = 0) {
  for (int step = 0; interval.low < interval.high && interval.up_to - interval.below > few; ++step) {
    const float least = float_of(int32_t(interval.low)), most = float_of(int32_t(interval.high));
    int64_t middle = interval.low + (interval.high - interval.low) / 2;
    if (step % 3 < 2 && most - least < std::numeric_limits<float>::infinity()) {
      const float share =
          step % 3 == 0 ? (float(rank - interval.below) + 0.5f) / float(interval.up_to - interval.below) : 0.5f;
      middle = order_key(floats(least + (most - least) * share))[0];
    }
    interval.cut(std::clamp(middle, interval.low, interval.high - 1), keys, count, rank, omitted);
  }
}

int64_t select(const int32_t* keys, int64_t count, int64_t rank, int32_t low_hint, int32_t high_hint) {
  constexpr int64_t kFew = 32;
  const auto [lowest, highest] = key_range(keys, count);
  Interval interval{lowest, highest, 0, count};
  for (const int64_t hint : {int64_t{low_hint} - 1, int64_t{high_hint}}) {
    if (hint >= interval.low && hint < interval.high) interval.cut(hint, keys, count, rank, 0);
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

// Copies the keys from `low` on, possibly to where they are, and returns the copies.
const int32_t* keys_from(int32_t low, const int32_t* keys, int64_t count, int32_t* copies) {
  int64_t copied = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Ints key = load<Ints>(keys + i);
    const Mask inside = at_least(key, ints(low)) & first_lanes(int(std::min<int64_t>(count - i, kLanes)));
    compress(copies + copied, key, inside);
    copied += __builtin_popcount(inside);
  }
  return copies;
}

void places_near(const int32_t* keys, const uint32_t* indices, int64_t count, const int64_t* ranks, int64_t num_ranks,
                 int64_t tolerance, Place* before, Place* after) {
  const auto [lowest, highest] = key_range(keys, count);
  Interval interval{lowest, highest, 0, count};
  constexpr int64_t kRoom = 4096;
  alignas(64) int32_t upper_keys[kRoom + kSlack];
  const int32_t* left = keys;  // those that may still matter
  int64_t omitted = 0;
  for (int64_t i = 0; i < num_ranks; ++i) {
    if (i > 0 && count - interval.below <= kRoom) {
      left = keys_from(int32_t(interval.low), left, count - omitted, upper_keys);
      omitted = interval.below;
    }
    interval = {interval.low, highest, interval.below, count};  // ranks ascend
    narrow(interval, left, count - omitted, ranks[i], tolerance, omitted);
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

  Mask reached(Ints keys, Ints positions) const {
    return at_least(keys, positions >= position ? ints(key) : ints(key + (position > 0)));
  }
};

// For tiles where float comparisons decide.
struct PlainWindow {
  float lower, inner_lower, inner_upper, upper;
  bool applies;

  PlainWindow(const RowTile& row, const Limits& limits) {
    typedef float Four __attribute__((vector_size(16)));
    typedef uint32_t FourIndices __attribute__((vector_size(16)));
    typedef int64_t Two __attribute__((vector_size(16)));
    const FourIndices index = load<FourIndices>(limits.index);
    const auto later = index > row.first_key;
    const auto within = later & (index - row.first_key < uint32_t(row.count));
    const Four limit = later ? load<Four>(limits.before) : load<Four>(limits.from);
    const Two any = reinterpret_cast<Two>(within);
    applies = row.finite && row.count % kLanes == 0 && row.excluded < 0 && (any[0] | any[1]) == 0;
    lower = limit[0];
    inner_lower = limit[1];
    inner_upper = limit[2];
    upper = limit[3];
  }

  bool all_certain() const { return lower == inner_lower && inner_upper == upper; }
  bool none_certain() const { return inner_lower >= inner_upper; }
  // Every finite similarity is a certain member.
  bool everything() const {
    return all_certain() && lower == -std::numeric_limits<float>::max() &&
           upper == std::numeric_limits<float>::infinity();
  }
};

// For any data and any tile: integer keys, ties by position, absent and excluded keys left out.
struct AnyWindow {
  TileLimit lower, inner_lower, inner_upper, upper;

  AnyWindow(const RowTile& row, const Limits& limits)
      : lower(limit(row, limits, 0)),
        inner_lower(limit(row, limits, 1)),
        inner_upper(limit(row, limits, 2)),
        upper(limit(row, limits, 3)) {}

  static TileLimit limit(const RowTile& row, const Limits& limits, int i) {
    return TileLimit({limits.key[i], limits.index[i]}, row.first_key, row.count);
  }
};

// Appends the chosen lanes behind the first `count` members; returns the new count, which the caller keeps in a register.
inline int append(const Members& members, int count, Floats similarity, Ints position, Mask mask) {
  compress(members.value + count, similarity, mask);
  compress(members.position + count, position, mask);
  return count + __builtin_popcount(mask);
}

struct Verdict {
  Mask reached, certain, undecided;
};

inline Verdict judge(const RowTile& row, const AnyWindow& window, Floats similarity, Ints position, int begin) {
  const Ints key = order_key(similarity);
  Mask present = first_lanes(row.count - begin);
  if (row.excluded >= begin && row.excluded < begin + kLanes) present &= ~(1u << (row.excluded - begin));
  const Mask reached = window.lower.reached(key, position) & present;
  const Mask certain =
      reached & window.inner_lower.reached(key, position) & ~window.inner_upper.reached(key, position);
  return {reached, certain, reached & ~certain & ~window.upper.reached(key, position)};
}

int split_any(const RowTile& row, const Limits& limits, Members& certain, Members& undecided) {
  const AnyWindow window(row, limits);
  const Ints lanes = lane_numbers();
  int reached = 0, sure = 0, open = 0;
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

int split(const RowTile& row, const Limits& limits, Members& certain, Members& undecided) {
  const PlainWindow window(row, limits);
  if (!window.applies) return split_any(row, limits, certain, undecided);
  const Ints lanes = lane_numbers();
  certain.count = undecided.count = 0;
  if (window.everything()) {
    for (int begin = 0; begin < row.count; begin += kLanes) {
      store(certain.value + begin, load<Floats>(row.similarity + begin));
      store(certain.position + begin, lanes + begin);
    }
    return certain.count = row.count;
  }

  // Few entries lie in the window: first squeeze the others out, then sort what is left.
  alignas(64) float squeezed_value[kTile + kSlack];
  alignas(64) int32_t squeezed_position[kTile + kSlack];
  Members squeezed{0, squeezed_value, squeezed_position};
  const bool all_certain = window.all_certain(), none_certain = window.none_certain();
  Members& inside = all_certain ? certain : none_certain ? undecided : squeezed;
  const Floats lower = floats(window.lower), upper = floats(window.upper);
  const Members to = inside;
  int reached = 0, count = 0;
  for (int begin = 0; begin < row.count; begin += kLanes) {
    const Floats similarity = load<Floats>(row.similarity + begin);
    const Mask above = at_least(similarity, lower);
    reached += __builtin_popcount(above);
    count = append(to, count, similarity, lanes + begin, above & ~at_least(similarity, upper));
  }
  inside.count = count;
  if (all_certain || none_certain) return reached;

  const Floats inner_lower = floats(window.inner_lower), inner_upper = floats(window.inner_upper);
  const Members yes = certain, maybe = undecided;
  int sure = 0, open = 0;
  for (int begin = 0; begin < count; begin += kLanes) {
    const Floats similarity = load<Floats>(squeezed_value + begin);
    const Ints position = load<Ints>(squeezed_position + begin);
    const Mask present = first_lanes(count - begin);
    const Mask inner = at_least(similarity, inner_lower) & ~at_least(similarity, inner_upper);
    sure = append(yes, sure, similarity, position, inner & present);
    open = append(maybe, open, similarity, position, ~inner & present);
  }
  certain.count = sure;
  undecided.count = open;
  return reached;
}

int mask(const RowTile& row, const Limits& limits, float* masked, int* certain, float* largest, Members& undecided) {
  const PlainWindow window(row, limits);
  const AnyWindow any(row, limits);
  const Ints lanes = lane_numbers();
  const Floats outside = floats(-std::numeric_limits<float>::infinity());
  Floats most = outside;
  int reached = 0, sure = 0, open = 0;
  if (window.applies && window.everything()) {
    for (int begin = 0; begin < row.count; begin += kLanes) {
      const Floats similarity = load<Floats>(row.similarity + begin);
      most = similarity > most ? similarity : most;
      store(masked + begin, similarity);
    }
    reached = sure = row.count;
  } else {
    for (int begin = 0; begin < row.count; begin += kLanes) {
      const Floats similarity = load<Floats>(row.similarity + begin);
      Verdict verdict;
      if (window.applies) {
        verdict.reached = at_least(similarity, floats(window.lower));
        verdict.certain =
            at_least(similarity, floats(window.inner_lower)) & ~at_least(similarity, floats(window.inner_upper));
        verdict.undecided = verdict.reached & ~verdict.certain & ~at_least(similarity, floats(window.upper));
      } else {
        verdict = judge(row, any, similarity, lanes + begin, begin);
      }
      const Floats value = blend(verdict.certain, similarity, outside);
      most = value > most ? value : most;
      store(masked + begin, value);
      reached += __builtin_popcount(verdict.reached);
      sure += __builtin_popcount(verdict.certain);
      if (verdict.undecided) open = append(undecided, open, similarity, lanes + begin, verdict.undecided);
    }
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
    const Ints place = __builtin_convertvector(load<Shorts>(position + begin), Ints);
    const Ints key = order_key(value);
    const Mask inside = from.reached(key, place) & ~to.reached(key, place) & first_lanes(count - begin);
    found = append(members, found, value, place, inside);
  }
  members.count = found;
}

