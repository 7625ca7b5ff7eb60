// InfoNCE over a ring of negatives, forward and gradients, fused with the selection.
//
// Bytes: the keys once, 4 K C. Operations: 2 N K C for the similarities and, for the gradient, 2 N M C for the weighted
// sum of the M members. The similarities of a tile stay in the first-level cache; nothing of size N x K exists.
//
// One pass over the keys: members that the window makes certain go to the exponential and to the weighted sum at once,
// from the tile that is hot; the undecided few follow, tile by tile, once the boundaries are known.

#include <cmath>
#include <limits>
#include <numeric>

#include "ring/select.h"

namespace iecl_fast::ring {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Above this share of members a dense product, with zeros for the others, beats sums over lists of members.
constexpr double kDenseShare = 0.75;

// Keys that fit the first-level cache, in floats, and how many members among them make it worth to go step by step.
constexpr int64_t kFewKeysFloats = 8192;
constexpr double kMembersWorthAStep = 10.0;

// The sums over a part of one query's members, relative to exp(shift / T).
struct Partial {
  float shift = -kInfinity;
  bool fixed = false;  // no member can need another shift
  alignas(64) float lane_sums[kMaxLanes] = {};

  explicit Partial(const Window& window, double scale) {
    // All members lie between two known similarities. Where these are close, relative to the temperature, the upper one
    // serves as shift for all of them and their largest need not be known.
    const float lower = similarity_of(window.lower.key), upper = similarity_of(window.upper.key);
    fixed = (static_cast<double>(upper) - lower) * scale < kWidest;
    if (fixed) shift = upper;
  }

  // Takes the largest of some values into account before their exponentials are taken. The shift follows the largest
  // value so far, not at every step but before exp(kWidest) is passed: nothing overflows, and not all terms vanish,
  // whatever the temperature. NaN stays. `weighted` is the sum that goes with it, or nullptr.
  void cover(float value, double scale, float* weighted, int64_t channels) {
    if (shift != shift) return;
    if (!((value - shift) * scale > kWidest || value != value)) return;
    const auto factor = static_cast<float>(std::exp((static_cast<double>(shift) - value) * scale));
    if (shift != -kInfinity) {
      for (float& sum : lane_sums) sum *= factor;
      for (int64_t c = 0; weighted != nullptr && c < channels; ++c) weighted[c] *= factor;
    }
    shift = value;
  }

  void add(const float* sums) {
    for (int lane = 0; lane < kMaxLanes; ++lane) lane_sums[lane] += sums[lane];
  }

  double sum() const { return std::accumulate(lane_sums, lane_sums + kMaxLanes, 0.0); }

 private:
  static constexpr double kWidest = 40.0;
};

// Lists of members, gathered until there are enough for one round of exponentials and sums.
struct ListPool {
  MemberLists lists;
  int64_t row[kMaxLists];
  int count[kMaxLists];

  ListPool() : value_(kRoom), position_(new int32_t[kRoom]) {
    lists.value = value_.get();
    lists.position = position_.get();
  }

  // Where the next list's members go; then how many they are.
  Members next() const {
    const int begin = lists.begin[lists.count];
    return {0, lists.value + begin, lists.position + begin};
  }
  void append(int64_t for_row, int members) {
    if (members == 0) return;
    const int end = lists.begin[lists.count] + members;
    std::fill_n(lists.value + end, kMaxLanes, -kInfinity);
    lists.position[end] = kNoPosition;
    row[lists.count] = for_row;
    count[lists.count] = members;
    lists.begin[++lists.count] = (end / kMaxLanes + 1) * kMaxLanes;
  }

 private:
  static constexpr int64_t kRoom = kMaxLists * (kTile + kMaxLanes) + kSlack;
  AlignedFloats value_;
  std::unique_ptr<int32_t[]> position_;
};

// Asks for the first bytes of what lies ahead, and leaves the rest for the next time.
void prefetch(KeyTile::Ahead& ahead, int64_t bytes) {
  bytes = std::min(bytes, ahead.bytes);
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(ahead.begin + byte, 0, 2);
  ahead.begin += bytes;
  ahead.bytes -= bytes;
}

struct Loss {
  const Problem& problem;
  const Matrix* positive;  // nullptr: the sums over the ring alone are asked for, see ring_sums_cpu
  const double scale;      // 1 / temperature
  float* loss;
  double* log_denominator;
  float* query_gradient;  // or nullptr
  ParallelFor parallel;

  int64_t channels() const { return problem.keys.columns; }

  // Returns the rows whose window missed.
  std::vector<int64_t> run(const std::vector<int64_t>& rows, bool bracketed) const;
  void finish(int64_t row, const std::vector<std::vector<Partial>>& partials, int64_t row_in_block,
              const float* weighted, int64_t padded_rows) const;
};

std::vector<int64_t> Loss::run(const std::vector<int64_t>& rows, bool bracketed) const {
  const TileKernels& kernels = tile_kernels();
  const QueryBlock block(problem.query, rows);
  const Chunks chunks(problem.keys.rows, channels());
  const std::vector<Window> windows = bracket(problem, block, bracketed, parallel);
  const double share =
      static_cast<double>(problem.ranks.upper - problem.ranks.lower) / static_cast<double>(chunks.keys);
  const bool dense = share > kDenseShare;

  Census census(problem, block, chunks);
  std::vector<std::vector<Partial>> partials(chunks.count);
  const bool gradient = query_gradient != nullptr;
  const AlignedFloats weighted(gradient ? chunks.count * block.padded_size() * channels() : 0);
  const auto weighted_sum = [&](int64_t chunk, int64_t row) {
    return gradient ? weighted.get() + (chunk * block.padded_size() + row) * channels() : nullptr;
  };
  const auto float_scale = static_cast<float>(scale);

  const std::vector<Limits> row_limits = limits(windows);
  // Gives lists of members their weights and adds these up.
  const auto flush = [&](int64_t chunk, ListPool& pool, KeyTile& tile, int key_step) {
    MemberLists& lists = pool.lists;
    if (lists.count == 0) return;
    for (int list = 0; list < lists.count; ++list) {
      Partial& partial = partials[chunk][pool.row[list]];
      lists.weighted[list] = weighted_sum(chunk, pool.row[list]);
      if (!partial.fixed) {
        float* values = lists.value + lists.begin[list];
        partial.cover(kernels.maximum(values, pool.count[list]), scale, lists.weighted[list], channels());
      }
      lists.shift[list] = partial.shift;
      if (partial.shift == -kInfinity) {  // all of them -inf, of no weight
        lists.shift[list] = 0.0f;
        lists.position[lists.begin[list]] = kNoPosition;
      }
    }
    alignas(64) float lane_sums[kMaxLists * kMaxLanes];
    kernels.list_exponentials(lists, float_scale, lane_sums);
    for (int list = 0; list < lists.count; ++list) partials[chunk][pool.row[list]].add(lane_sums + list * kMaxLanes);
    if (gradient) {
      const auto [rows, stride] = tile.rows();
      kernels.list_weighted_sums(lists, rows, stride, channels(), tile.count(), key_step);
    }
    lists.count = 0;
  };
  // The same for a whole group at once, without lists.
  const auto sum_densely = [&](int64_t chunk, KeyTile& tile, int64_t first, const RowTile* row_tiles, int count,
                               float* weights, Members& undecided) {
    for (int i = 0; i < count; ++i) {
      float* row_weights = weights + i * kTile;
      int members;
      float largest;
      const int reached =
          kernels.mask(row_tiles[i], row_limits[first + i], row_weights, &members, &largest, undecided);
      census.record(chunk, first + i, row_tiles[i], reached, members, undecided);
      Partial& partial = partials[chunk][first + i];
      if (members > 0) {
        if (!partial.fixed) partial.cover(largest, scale, weighted_sum(chunk, first + i), channels());
        kernels.exponentials(row_weights, tile.count(), partial.shift, float_scale, partial.lane_sums);
      } else {
        std::fill_n(row_weights, kTile, 0.0f);
      }
    }
    if (gradient) {
      std::fill(weights + count * kTile, weights + kernels.group * kTile, 0.0f);
      const auto [rows, stride] = tile.rows();
      kernels.group_weighted_sum(weights, tile.count(), rows, stride, channels(), weighted_sum(chunk, first));
    }
  };
  // Too few members of a list among few keys, or too few keys, are not worth the start of a sum.
  const int64_t few_keys = kFewKeysFloats / std::max<int64_t>(channels(), 1);
  const int key_step = static_cast<int>(share * static_cast<double>(few_keys) > kMembersWorthAStep ? few_keys : kTile);

  parallel(chunks.count, [&](int64_t chunk) {
    partials[chunk].reserve(windows.size());
    for (const Window& window : windows) partials[chunk].emplace_back(window, scale);
    if (gradient) std::fill_n(weighted_sum(chunk, 0), block.padded_size() * channels(), 0.0f);
    MemberBuffer undecided;
    ListPool pool;
    const AlignedFloats weights(kMaxGroup * kTile + kSlack);
    walk(problem, block, chunks, chunk, [&](KeyTile& tile, int64_t group, const RowTile* row_tiles, int count) {
      const int64_t first = group * kernels.group;
      // A key that is not finite may have no weight, and zero times infinity is not zero: lists leave it out.
      if (!dense || !row_tiles[0].finite) {
        for (int i = 0; i < count; ++i) {
          Members certain = pool.next();
          const int reached = kernels.split(row_tiles[i], row_limits[first + i], certain, undecided);
          census.record(chunk, first + i, row_tiles[i], reached, certain.count, undecided);
          pool.append(first + i, certain.count);
        }
      } else {
        sum_densely(chunk, tile, first, row_tiles, count, weights.get(), undecided);
      }
      if (group % kBatch == kBatch - 1 || group == block.groups - 1) flush(chunk, pool, tile, key_step);
    });
  });

  std::vector<Boundaries> boundaries(block.size());
  const std::vector<int64_t> missed = census.resolve(windows, boundaries, parallel);

  parallel(chunks.count, [&](int64_t chunk) {
    KeyTile tile(problem.keys, chunks.tile);
    ListPool pool;
    for (int64_t number = chunks.first_tile(chunk); number < chunks.last_tile(chunk); ++number) {
      tile.view(chunks.first_key(number), chunks.tile_size(number));
      KeyTile::Ahead ahead;
      if (gradient && number + 1 < chunks.last_tile(chunk)) {
        ahead = tile.ahead(chunks.first_key(number + 1), chunks.tile_size(number + 1), 0, 1);
      }
      const int64_t ahead_of_row = (ahead.bytes / block.size() / 64 + 1) * 64;
      const auto room = [&] { return pool.next(); };
      census.visit_members(number, boundaries, room, [&](int64_t row, const Members& members) {
        prefetch(ahead, ahead_of_row);
        pool.append(row, members.count);
        // So few are left of each that one step takes all keys.
        if (pool.lists.count == kMaxLists) flush(chunk, pool, tile, kTile);
      });
      flush(chunk, pool, tile, kTile);
    }
  });

  parallel(block.size(), [&](int64_t row) {
    finish(block.rows[row], partials, row, weighted_sum(0, row), block.padded_size());
  });
  return missed;
}

// Adds up a query's parts, in the order of the chunks, and brings in its positive key.
void Loss::finish(int64_t row, const std::vector<std::vector<Partial>>& partials, int64_t row_in_block,
                  const float* weighted, int64_t padded_rows) const {
  const auto count = static_cast<int64_t>(partials.size());
  const int64_t channels = problem.keys.columns;
  for (int64_t chunk = 0; query_gradient != nullptr && chunk < count; ++chunk) {
    KeyTile::Ahead part{reinterpret_cast<const char*>(weighted + chunk * padded_rows * channels), channels * 4};
    prefetch(part, part.bytes);  // each lies somewhere else
  }
  float shift = -kInfinity;
  for (int64_t chunk = 0; chunk < count; ++chunk) {
    const float other = partials[chunk][row_in_block].shift;
    if (other > shift || other != other) shift = other;
    if (shift != shift) break;
  }
  double sum = 0.0;  // of exp((similarity - shift) / T) over the ring
  for (int64_t chunk = 0; chunk < count; ++chunk) {
    const Partial& partial = partials[chunk][row_in_block];
    const double part = partial.sum();
    if (part > 0.0) sum += part * std::exp((static_cast<double>(partial.shift) - shift) * scale);
  }
  // The keys' weighted sum, relative to exp(reference / T).
  const auto weighted_keys = [&](double reference) {
    std::vector<double> total(channels);
    for (int64_t chunk = 0; chunk < count; ++chunk) {
      const Partial& partial = partials[chunk][row_in_block];
      if (partial.sum() == 0.0) continue;  // no member here; NaN is a sum like others
      const double factor = std::exp((static_cast<double>(partial.shift) - reference) * scale);
      const float* part = weighted + chunk * padded_rows * channels;
      for (int64_t c = 0; c < channels; ++c) total[c] += factor * part[c];
    }
    return total;
  };
  if (positive == nullptr) {
    log_denominator[row] = shift != shift || std::isinf(shift) ? shift : shift * scale + std::log(sum);
    for (int64_t c = 0; query_gradient != nullptr && c < channels; ++c) query_gradient[row * channels + c] = 0.0f;
    if (query_gradient == nullptr || sum == 0.0) return;
    const std::vector<double> total = weighted_keys(shift);
    for (int64_t c = 0; c < channels; ++c) query_gradient[row * channels + c] = static_cast<float>(total[c] / sum);
    return;
  }

  RowReader query(problem.query, 1), key(*positive, 1);
  query.gather(&row, 1);
  key.gather(&row, 1);
  double positive_similarity = 0.0;
  for (int64_t c = 0; c < channels; ++c) positive_similarity += static_cast<double>(query.data()[c]) * key.data()[c];

  // With a the larger of shift and the positive's similarity: all = exp((s - a) / T), summed over ring and positive.
  const double reference = std::max(static_cast<double>(shift), positive_similarity);
  const double ring = sum > 0.0 ? sum * std::exp((shift - reference) * scale) : 0.0;
  const double own = std::exp((positive_similarity - reference) * scale);
  const double log_all = positive_similarity >= shift ? std::log1p(ring) : std::log(ring + own);
  double value = (reference - positive_similarity) * scale + log_all;
  if (shift == kInfinity && positive_similarity < kInfinity) value = kInfinity;
  if (shift != shift) value = shift;
  loss[row] = static_cast<float>(value);
  log_denominator[row] = value + positive_similarity * scale;
  if (query_gradient == nullptr) return;

  float* gradient = query_gradient + row * channels;
  const std::vector<double> total = weighted_keys(reference);
  for (int64_t c = 0; c < channels; ++c) {
    // (own - all) = -ring, exactly, where own / all - 1 would cancel.
    gradient[c] = static_cast<float>((total[c] - ring * key.data()[c]) / (ring + own) * scale);
  }
}

}  // namespace

void info_nce_cpu(const Problem& problem, const Matrix& positive, double temperature, float* loss,
                  double* log_denominator, float* query_gradient, ParallelFor parallel) {
  const Loss task{problem, &positive, 1.0 / temperature, loss, log_denominator, query_gradient, parallel};
  for_each_block(problem, census_bytes(problem, false),
                 [&](const std::vector<int64_t>& rows, bool bracketed) { return task.run(rows, bracketed); });
}

void ring_sums_cpu(const Problem& problem, double temperature, double* log_sum, float* mean_key, ParallelFor parallel) {
  const Loss task{problem, nullptr, 1.0 / temperature, nullptr, log_sum, mean_key, parallel};
  for_each_block(problem, census_bytes(problem, false),
                 [&](const std::vector<int64_t>& rows, bool bracketed) { return task.run(rows, bracketed); });
}

void info_nce_keys_gradient_cpu(const Problem& problem, double temperature, const double* log_denominator,
                                const float* loss_gradient, float* keys_gradient, ParallelFor parallel) {
  const TileKernels& kernels = tile_kernels();
  const int64_t channels = problem.keys.columns;
  const double scale = 1.0 / temperature;
  const Chunks chunks(problem.keys.rows, channels);
  const Located located = locate(problem, chunks, parallel);
  std::fill_n(keys_gradient, chunks.keys * channels, 0.0f);

  for (int64_t begin = 0; begin < problem.query.rows; begin += kLargestBlock) {
    const QueryBlock block(problem.query, row_range(begin, std::min(begin + kLargestBlock, problem.query.rows)));
    RowReader queries(problem.query, kLargestBlock);
    queries.gather(block.rows.data(), static_cast<int>(block.size()));
    std::vector<Limits> limits;
    for (const int64_t number : block.rows) limits.emplace_back(located.boundaries[number].window());
    // A tile's rows of the gradient belong to one task, which adds the queries in ascending order.
    parallel(chunks.count, [&](int64_t chunk) {
      MemberBuffer members, none;
      float unused[kMaxLanes] = {};
      walk(problem, block, chunks, chunk, [&](KeyTile&, int64_t group, const RowTile* row_tiles, int count) {
        for (int i = 0; i < count; ++i) {
          const int64_t row = group * kernels.group + i, number = block.rows[row];
          kernels.split(row_tiles[i], limits[row], members, none);
          if (members.count == 0) continue;
          const auto shift = static_cast<float>(log_denominator[number] * temperature);
          kernels.exponentials(members.value, members.count, shift, static_cast<float>(scale), unused);
          const auto weight = static_cast<float>(loss_gradient[number] * scale);
          for (int j = 0; j < members.count; ++j) members.value[j] *= weight;
          kernels.scatter(members.value, members.position, members.count, queries.data() + row * channels, channels,
                          keys_gradient + row_tiles[i].first_key * channels);
        }
      });
    });
  }
}

}  // namespace iecl_fast::ring
