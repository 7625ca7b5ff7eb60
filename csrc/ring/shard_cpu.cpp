// A shard's part in finding the boundaries of a ring of all shards' keys; see ring.h.
//
// One pass over the keys, 4 K C bytes and 2 N K C operations, counts what lies below the windows and records what lies
// in them, some per cent of the keys: the same census that finds boundaries among the keys of one process.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ring/select.h"

namespace iecl_fast::ring {
namespace {

// A count of 0 says little about a share: what may be missed is added to the deviations.
constexpr double kLeastMargin = 8.0;

SampleRanks around(int64_t center, int64_t size, double deviations) {
  const double share = static_cast<double>(center) / static_cast<double>(std::max<int64_t>(size, 1));
  const double deviation = std::sqrt(static_cast<double>(center) * (1.0 - share));
  const auto margin = static_cast<int64_t>(std::ceil(deviations * deviation + kLeastMargin));
  return {std::max<int64_t>(-1, center - 1 - margin), std::min(size, center + margin)};
}

// The order keys of the two windows of some queries.
struct Lists {
  std::vector<int32_t> of[kMaxGroup][2];
};

}  // namespace

void shard_sample_cpu(const Matrix& query, const Matrix& keys, int64_t size, float* similarities,
                      ParallelFor parallel) {
  const QueryBlock block(query, row_range(0, query.rows));
  visit_sample(keys, sample_keys(keys.rows, size), block, parallel,
               [&](int64_t row, int64_t first, int count, const float* part) {
                 if (row < block.size()) std::copy_n(part, count, similarities + row * size + first);
               });
}

ShardWindows shard_windows_cpu(const Problem& problem, const int64_t* centers, int64_t size, double deviations,
                               ParallelFor parallel) {
  const int64_t num_rows = problem.query.rows, group_size = tile_kernels().group;
  const QueryBlock block(problem.query, row_range(0, num_rows));
  const Chunks chunks(problem.keys.rows, problem.keys.columns);
  const auto brackets = [&](int64_t row) {
    const auto ranks = [&](int64_t center) {
      return center < 0 ? SampleRanks{-1, size} : around(center, size, deviations);
    };
    const int64_t lower = centers[2 * row], upper = centers[2 * row + 1];
    return Brackets{lower >= 0, upper >= 0, ranks(lower), ranks(upper)};
  };
  const std::vector<Window> windows = windows_between(problem, block, size, brackets, parallel);
  Census census(problem, block, chunks);
  census.take(windows, parallel);

  ShardWindows result{std::vector<int64_t>(2 * num_rows), std::vector<int64_t>(2 * num_rows), {}};
  std::vector<Lists> lists(block.groups);
  parallel(block.groups, [&](int64_t group) {
    int64_t below_upper[kMaxGroup] = {};
    const std::unique_ptr<int32_t[]> keys(new int32_t[kTile + kSlack]);
    census.visit_undecided(group, [&](int i, int64_t first_key, int count, const float* similarity,
                                      const uint16_t* position) {
      const int64_t row = group * group_size + i;
      const Place inner_lower = windows[row].inner_lower, inner_upper = size == 0 ? kBelowAll : windows[row].inner_upper;
      const bool has_lower = centers[2 * row] >= 0, has_upper = centers[2 * row + 1] >= 0;
      tile_kernels().order_keys(similarity, count, keys.get());
      for (int entry = 0; entry < count; ++entry) {
        const Place place{keys[entry], static_cast<uint32_t>(first_key + position[entry])};
        if (has_lower && place < inner_lower) lists[group].of[i][0].push_back(place.key);
        if (place < inner_upper) {
          ++below_upper[i];
        } else if (has_upper) {
          lists[group].of[i][1].push_back(place.key);
        }
      }
    });
    for (int64_t row = group * group_size; row < std::min((group + 1) * group_size, num_rows); ++row) {
      const int64_t i = row - group * group_size;
      const Census::Tally tally = census.total(row);
      const int64_t below = tally.below - (problem.excludes_one(row) ? 1 : 0);
      result.below[2 * row] = below;
      result.below[2 * row + 1] = below + tally.certain + below_upper[i];
      for (int which = 0; which < 2; ++which) {
        result.counts[2 * row + which] = static_cast<int64_t>(lists[group].of[i][which].size());
      }
    }
  });
  for (int64_t row = 0; row < num_rows; ++row) {
    for (const std::vector<int32_t>& list : lists[row / group_size].of[row % group_size]) {
      result.order_keys.insert(result.order_keys.end(), list.begin(), list.end());
    }
  }
  return result;
}

void order_histogram_cpu(const int32_t* order_keys, const int64_t* counts, int64_t lists, const int64_t* low,
                         int64_t ranges, int shift, int32_t* histogram, ParallelFor parallel) {
  std::vector<int64_t> begin(lists + 1);
  std::partial_sum(counts, counts + lists, begin.begin() + 1);
  parallel(lists, [&](int64_t list) {
    for (int64_t range = list * ranges; range < (list + 1) * ranges; ++range) {
      int32_t* bins = histogram + range * kBins;
      std::fill_n(bins, kBins, 0);
      const auto first = static_cast<uint32_t>(low[range]);
      for (int64_t i = begin[list]; i < begin[list + 1]; ++i) {
        const uint32_t bin = (static_cast<uint32_t>(order_keys[i]) - first) >> shift;
        if (bin < kBins) ++bins[bin];
      }
    }
  });
}

}  // namespace iecl_fast::ring
