#include "ring/select.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace iecl_fast::ring {
namespace {

constexpr int64_t kBlockBytes = int64_t{20} << 20;  // for what a block keeps of its queries
constexpr int64_t kUnsampled = 4096;  // so few keys are all recorded
constexpr int64_t kEntryBytes = sizeof(float) + sizeof(uint16_t);
// Half-widths of a bracket in standard deviations: both boundaries are inside for all but one in 10,000 queries.
constexpr double kDeviations = 4.0;
constexpr int64_t kTolerance = 8;  // ranks of the sample by which an end of a bracket may lie further out

// Balances the cost of sampling, which grows with m, against the undecided, whose share falls with 1 / sqrt(m).
int64_t sample_size(int64_t num_keys) {
  if (num_keys <= kUnsampled) return 0;
  const double balanced = 1.8 * std::cbrt(static_cast<double>(num_keys) * static_cast<double>(num_keys));
  return static_cast<int64_t>(balanced) / kSampleTile * kSampleTile;
}

SampleRanks sample_ranks(int64_t rank, int64_t num_keys, int64_t size) {
  const double share = static_cast<double>(rank) / static_cast<double>(num_keys);
  const double mean = share * static_cast<double>(size);
  const double margin = kDeviations * std::sqrt(mean * (1.0 - share)) + 1.0;
  return {std::max<int64_t>(-1, static_cast<int64_t>(std::floor(mean - margin))),
          std::min<int64_t>(size, static_cast<int64_t>(std::ceil(mean + margin)))};
}

// The ring of some query: without an excluded key if there is such a query, else with one; they differ by a rank.
RankRange some_range(const Problem& problem) {
  return problem.ranks.lower < problem.ranks.upper ? problem.ranks : problem.ranks_of_rest;
}

// How many entries of a query are expected to be recorded.
double expected_undecided(const Problem& problem) {
  const int64_t num_keys = problem.keys.rows, size = sample_size(num_keys);
  if (size == 0) return static_cast<double>(num_keys);
  double share = 0.0;
  const RankRange range = some_range(problem);
  for (const int64_t rank : {range.lower, range.upper}) {
    if (rank == 0 || rank == num_keys) continue;
    const SampleRanks ranks = sample_ranks(rank, num_keys, size);
    share += static_cast<double>(ranks.above - ranks.below + 1) / static_cast<double>(size);
  }
  return share * static_cast<double>(num_keys);
}

uint64_t mix(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

// Whether candidates lie below or above a query's ring.
bool below(const Problem& problem, int64_t row) { return problem.range(row).lower > 0; }
bool above(const Problem& problem, int64_t row) {
  return problem.range(row).upper + (problem.excludes_one(row) ? 1 : 0) < problem.keys.rows;
}

}  // namespace

bool all_are_members(const Problem& problem) {
  for (int64_t row = 0; row < problem.query.rows; ++row) {
    if (below(problem, row) || above(problem, row)) return false;
  }
  return true;
}

std::vector<int64_t> row_range(int64_t begin, int64_t end) {
  std::vector<int64_t> rows(end - begin);
  std::iota(rows.begin(), rows.end(), begin);
  return rows;
}

double census_bytes(const Problem& problem, bool members_too) {
  const auto num_keys = static_cast<double>(problem.keys.rows);
  const RankRange range = some_range(problem);
  const auto ring = static_cast<double>(range.upper - range.lower);
  const double entries = std::min(num_keys, expected_undecided(problem) * 1.2 + (members_too ? ring : 0.0));
  // The sample is gone when the recording begins.
  const double sample = static_cast<double>(sample_size(problem.keys.rows)) * sizeof(float);
  const double counts = num_keys / kTile * sizeof(uint16_t);
  return std::max(sample, entries * kEntryBytes + counts) + 1.0;
}

int64_t rows_within(double bytes_per_row) {
  return std::clamp(static_cast<int64_t>(static_cast<double>(kBlockBytes) / bytes_per_row), int64_t{1}, kLargestBlock);
}

void for_each_block(const Problem& problem, double bytes_per_row,
                    const std::function<std::vector<int64_t>(const std::vector<int64_t>&, bool)>& run) {
  const int64_t num_rows = problem.query.rows, group_size = tile_kernels().group;
  // As few blocks as memory allows, but all of a size: a short last one would read the keys for little.
  const int64_t most = rows_within(bytes_per_row), blocks = (num_rows + most - 1) / most;
  const int64_t groups = (num_rows + blocks * group_size - 1) / std::max<int64_t>(blocks * group_size, 1);
  const int64_t size = std::min(most, groups * group_size);
  std::vector<int64_t> missed;
  for (int64_t begin = 0; begin < num_rows; begin += size) {
    const std::vector<int64_t> some = run(row_range(begin, std::min(begin + size, num_rows)), true);
    missed.insert(missed.end(), some.begin(), some.end());
  }
  const int64_t unbracketed = rows_within(static_cast<double>(problem.keys.rows) * kEntryBytes);
  for (auto next = missed.cbegin(); next != missed.cend();) {
    const auto end = missed.cend() - next > unbracketed ? next + unbracketed : missed.cend();
    run({next, end}, false);
    next = end;
  }
}

// At a hashed place of each cell: neither sorted nor periodic queues can fool it.
std::vector<uint32_t> sample_keys(int64_t num_keys, int64_t size) {
  std::vector<uint32_t> sample(size);
  for (int64_t cell = 0; cell < size; ++cell) {
    const int64_t begin = cell * num_keys / size, end = (cell + 1) * num_keys / size;
    sample[cell] = static_cast<uint32_t>(begin + static_cast<int64_t>(mix(cell) % static_cast<uint64_t>(end - begin)));
  }
  return sample;
}

void visit_sample(const Matrix& keys, const std::vector<uint32_t>& indices, const QueryBlock& block,
                  ParallelFor parallel, const SampleVisit& visit) {
  const auto size = static_cast<int64_t>(indices.size());
  const int group_size = tile_kernels().group;
  parallel((size + kSampleTile - 1) / kSampleTile, [&](int64_t part) {
    const int64_t first = part * kSampleTile;
    const int count = static_cast<int>(std::min(kSampleTile, size - first));
    KeyTile tile(keys, kSampleTile);
    tile.gather(indices.data() + first, count);
    const AlignedFloats similarity(kBatch * kMaxGroup * kTile);
    for (int64_t group = 0; group < block.groups; group += kBatch) {
      const auto groups = static_cast<int>(std::min<int64_t>(kBatch, block.groups - group));
      tile.similarities(block, group, groups, similarity.get(), {});
      for (int64_t i = 0; i < groups * group_size; ++i) {
        visit(group * group_size + i, first, count, similarity.get() + i * kTile);
      }
    }
  });
}

std::vector<Window> windows_between(const Problem& problem, const QueryBlock& block, int64_t sample_size,
                                    const std::function<Brackets(int64_t row)>& brackets, ParallelFor parallel) {
  std::vector<Window> windows(block.size());
  bool any = false;
  for (int64_t row = 0; row < block.size(); ++row) {
    const Brackets wanted = brackets(row);
    if (!wanted.has_lower && !wanted.has_upper) continue;
    any = true;
    windows[row].inner_lower = wanted.has_lower || sample_size == 0 ? kAboveAll : kBelowAll;
    windows[row].inner_upper = kAboveAll;
  }
  if (!any || sample_size == 0) return windows;

  // The order-preserving keys of the sample, then each row by itself.
  const std::vector<uint32_t> indices = sample_keys(problem.keys.rows, sample_size);
  const int group_size = tile_kernels().group;
  const int64_t stride = (sample_size + kSampleTile - 1) / kSampleTile * kSampleTile;
  const AlignedArray<int32_t> keys(block.padded_size() * stride + kSlack);
  visit_sample(problem.keys, indices, block, parallel,
               [&](int64_t row, int64_t first, int count, const float* similarity) {
                 tile_kernels().order_keys(similarity, count, keys.get() + row * stride + first);
               });
  parallel(block.groups, [&](int64_t group) {
    const int64_t end = std::min<int64_t>((group + 1) * group_size, block.size());
    for (int64_t row = group * group_size; row < end; ++row) {
      int32_t* row_keys = keys.get() + row * stride;
      if (problem.excludes_one(block.rows[row])) {
        // No candidate, so below all of them: every rank of a candidate moves up by one.
        const auto excluded = static_cast<uint32_t>(problem.exclude[block.rows[row]]);
        const auto found = std::lower_bound(indices.begin(), indices.end(), excluded);
        if (found != indices.end() && *found == excluded) row_keys[found - indices.begin()] = kBelowAll.key;
      }
      const auto [has_lower, has_upper, lower, upper] = brackets(row);
      // Ascending, if not strictly; -1 and `sample_size` stand for no place and are left out.
      int64_t ranks[4] = {lower.below, lower.above, upper.below, upper.above};
      std::sort(ranks, ranks + 4);
      int64_t* first = std::upper_bound(ranks, ranks + 4, -1);
      int64_t* last = std::lower_bound(first, ranks + 4, sample_size);
      Place before[4], after[4];
      tile_kernels().places_near(row_keys, indices.data(), sample_size, first, last - first, kTolerance, before, after);
      const auto place = [&](int64_t rank, const Place* places) { return places[std::find(first, last, rank) - first]; };
      Window& window = windows[row];
      if (has_lower) {
        if (lower.below >= 0) window.lower = place(lower.below, before);
        window.inner_lower = lower.above < sample_size ? place(lower.above, after) : kAboveAll;
      }
      if (has_upper) {
        window.inner_upper = upper.below >= 0 ? place(upper.below, before) : kBelowAll;
        if (upper.above < sample_size) window.upper = place(upper.above, after);
      }
    }
  });
  return windows;
}

std::vector<Window> bracket(const Problem& problem, const QueryBlock& block, bool bracketed, ParallelFor parallel) {
  const int64_t num_keys = problem.keys.rows, size = bracketed ? sample_size(num_keys) : 0;
  const auto brackets = [&](int64_t row) {
    const int64_t number = block.rows[row], shift = problem.excludes_one(number) ? 1 : 0;
    const RankRange range = problem.range(number);
    return Brackets{below(problem, number), above(problem, number), sample_ranks(range.lower + shift, num_keys, size),
                    sample_ranks(range.upper + shift, num_keys, size)};
  };
  return windows_between(problem, block, size, brackets, parallel);
}

void keep_members(std::vector<Window>& windows) {
  for (Window& window : windows) window.inner_lower = window.inner_upper = kAboveAll;
}

Located locate(const Problem& problem, const Chunks& chunks, ParallelFor parallel) {
  const int64_t num_rows = problem.query.rows;
  Located located{std::vector<Boundaries>(num_rows), std::vector<int64_t>(chunks.count * num_rows)};
  if (all_are_members(problem)) {
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      const int64_t begin = chunks.first_key(chunks.first_tile(chunk));
      const int64_t end = std::min(chunks.keys, chunks.first_key(chunks.last_tile(chunk)));
      for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t excluded = problem.exclude ? problem.exclude[row] : -1;
        located.members[chunk * num_rows + row] = end - begin - (begin <= excluded && excluded < end ? 1 : 0);
      }
    }
    return located;
  }
  for_each_block(problem, census_bytes(problem, false), [&](const std::vector<int64_t>& rows, bool bracketed) {
    const QueryBlock block(problem.query, rows);
    const std::vector<Window> windows = bracket(problem, block, bracketed, parallel);
    Census census(problem, block, chunks);
    census.take(windows, parallel);
    std::vector<Boundaries> boundaries(block.size());
    const std::vector<int64_t> missed = census.resolve(windows, boundaries, parallel);
    parallel(chunks.count, [&](int64_t chunk) {
      std::vector<int64_t> counts(block.size());
      census.count_members(chunk, boundaries, counts.data());
      for (int64_t row = 0; row < block.size(); ++row) located.members[chunk * num_rows + rows[row]] = counts[row];
    });
    for (int64_t row = 0; row < block.size(); ++row) located.boundaries[rows[row]] = boundaries[row];
    return missed;
  });
  return located;
}

}  // namespace iecl_fast::ring
