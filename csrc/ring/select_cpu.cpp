#include "ring/select.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace iecl_fast::ring {
namespace {

constexpr int64_t kBlockBytes = int64_t{16} << 20;  // for what a block keeps of its queries
constexpr int64_t kUnsampled = 4096;  // so few keys are all recorded
constexpr int64_t kEntryBytes = sizeof(float) + sizeof(uint8_t);
// Half-widths of a bracket in standard deviations: both boundaries are inside for all but one in 10,000 queries.
constexpr double kDeviations = 4.0;

// Balances the cost of sampling, which grows with m, against the undecided, whose share falls with 1 / sqrt(m).
int64_t sample_size(int64_t num_keys) {
  if (num_keys <= kUnsampled) return 0;
  const double balanced = 2.5 * std::cbrt(static_cast<double>(num_keys) * static_cast<double>(num_keys));
  return static_cast<int64_t>(balanced) / kTile * kTile;
}

// A rank in the sample below and one above the place of a rank among all keys; -1 and m where the sample ends.
struct SampleRanks {
  int64_t below, above;
};

SampleRanks sample_ranks(int64_t rank, int64_t num_keys, int64_t size) {
  const double share = static_cast<double>(rank) / static_cast<double>(num_keys);
  const double mean = share * static_cast<double>(size);
  const double margin = kDeviations * std::sqrt(mean * (1.0 - share)) + 1.0;
  return {std::max<int64_t>(-1, static_cast<int64_t>(std::floor(mean - margin))),
          std::min<int64_t>(size, static_cast<int64_t>(std::ceil(mean + margin)))};
}

// How many entries of a query are expected to be recorded.
double expected_undecided(const Problem& problem) {
  const int64_t num_keys = problem.keys.rows, size = sample_size(num_keys);
  if (size == 0) return static_cast<double>(num_keys);
  double share = 0.0;
  for (const int64_t rank : {problem.ranks.lower, problem.ranks.upper}) {
    if (rank == 0 || rank == num_keys) continue;
    const SampleRanks ranks = sample_ranks(rank, num_keys, size);
    share += static_cast<double>(ranks.above - ranks.below + 1) / static_cast<double>(size);
  }
  return share * static_cast<double>(num_keys);
}

int64_t rows_within(double bytes_per_row) {
  return std::clamp(static_cast<int64_t>(static_cast<double>(kBlockBytes) / bytes_per_row), int64_t{1}, kLargestBlock);
}

uint64_t mix(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

// One key from each of `size` equal cells, at a hashed place: neither sorted nor periodic queues can fool it.
std::vector<uint32_t> sample_keys(int64_t num_keys, int64_t size) {
  std::vector<uint32_t> sample(size);
  for (int64_t cell = 0; cell < size; ++cell) {
    const int64_t begin = cell * num_keys / size, end = (cell + 1) * num_keys / size;
    sample[cell] = static_cast<uint32_t>(begin + static_cast<int64_t>(mix(cell) % static_cast<uint64_t>(end - begin)));
  }
  return sample;
}

// Position of the entry with the given rank in the order of (key, position), by bisection of the keys between two bounds.
int64_t select(const int32_t* keys, int64_t count, int64_t rank, int32_t lowest, int32_t highest) {
  const auto count_below = tile_kernels().count_below;
  int64_t low = lowest, high = highest;
  int64_t below = 0;  // entries below `low`
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    const int64_t up_to_middle = count_below(keys, count, static_cast<int32_t>(middle + 1));
    if (up_to_middle > rank) {
      high = middle;
    } else {
      low = middle + 1;
      below = up_to_middle;
    }
  }
  int64_t remaining = rank - below;
  int64_t position = 0;
  while (keys[position] != low || remaining-- > 0) ++position;
  return position;
}

}  // namespace

std::vector<int64_t> row_range(int64_t begin, int64_t end) {
  std::vector<int64_t> rows(end - begin);
  std::iota(rows.begin(), rows.end(), begin);
  return rows;
}

void for_each_block(const Problem& problem,
                    const std::function<std::vector<int64_t>(const std::vector<int64_t>&, bool)>& run) {
  const int64_t num_keys = problem.keys.rows;
  // The sample is gone when the recording begins.
  const int64_t size = rows_within(std::max(static_cast<double>(sample_size(num_keys)) * sizeof(float),
                                            expected_undecided(problem) * 1.2 * kEntryBytes + 1.0));
  std::vector<int64_t> missed;
  for (int64_t begin = 0; begin < problem.query.rows; begin += size) {
    const std::vector<int64_t> some = run(row_range(begin, std::min(begin + size, problem.query.rows)), true);
    missed.insert(missed.end(), some.begin(), some.end());
  }
  const int64_t unbracketed = rows_within(static_cast<double>(num_keys) * kEntryBytes);
  for (auto next = missed.cbegin(); next != missed.cend();) {
    const auto end = missed.cend() - next > unbracketed ? next + unbracketed : missed.cend();
    run({next, end}, false);
    next = end;
  }
}

std::vector<Window> bracket(const Problem& problem, const QueryBlock& block, bool bracketed, ParallelFor parallel) {
  const int64_t num_keys = problem.keys.rows, size = bracketed ? sample_size(num_keys) : 0;
  const auto needs_lower = [&](int64_t row) { return problem.range(block.rows[row]).lower > 0; };
  const auto excludes = [&](int64_t row) { return problem.exclude && problem.exclude[block.rows[row]] >= 0; };
  const auto needs_upper = [&](int64_t row) {
    return problem.range(block.rows[row]).upper + (excludes(row) ? 1 : 0) < num_keys;
  };

  std::vector<Window> windows(block.size());
  bool any = false;
  for (int64_t row = 0; row < block.size(); ++row) {
    if (!needs_lower(row) && !needs_upper(row)) continue;
    any = true;
    windows[row].inner_lower = needs_lower(row) || size == 0 ? kAboveAll : kBelowAll;
    windows[row].inner_upper = kAboveAll;
  }
  if (!any || size == 0) return windows;

  const int group_size = tile_kernels().group;
  const std::vector<uint32_t> sample = sample_keys(num_keys, size);
  std::unique_ptr<int32_t[]> keys(new int32_t[block.size() * size]);
  parallel(size / kTile, [&](int64_t part) {
    KeyTile tile(problem.keys);
    tile.gather(sample.data() + part * kTile, kTile);
    alignas(64) float similarity[kMaxGroup * kTile];
    for (int64_t group = 0; group < block.groups; ++group) {
      tile.similarities(block, group, similarity);
      const int64_t end = std::min<int64_t>((group + 1) * group_size, block.size());
      for (int64_t row = group * group_size; row < end; ++row) {
        tile_kernels().order_keys(similarity + row % group_size * kTile, kTile, keys.get() + row * size + part * kTile);
      }
    }
  });

  parallel(block.size(), [&](int64_t row) {
    int32_t* row_keys = keys.get() + row * size;
    if (excludes(row)) {  // no candidate, so below all of them: every rank of a candidate moves up by one
      const auto excluded = static_cast<uint32_t>(problem.exclude[block.rows[row]]);
      const auto found = std::lower_bound(sample.begin(), sample.end(), excluded);
      if (found != sample.end() && *found == excluded) row_keys[found - sample.begin()] = kBelowAll.key;
    }
    const auto place = [&](int64_t rank) {
      const int64_t position = select(row_keys, size, rank, kBelowAll.key, kNanKey);
      return Place{row_keys[position], sample[position]};
    };
    const RankRange range = problem.range(block.rows[row]);
    const int64_t shift = excludes(row) ? 1 : 0;
    Window& window = windows[row];
    if (needs_lower(row)) {
      const SampleRanks ranks = sample_ranks(range.lower + shift, num_keys, size);
      if (ranks.below >= 0) window.lower = place(ranks.below);
      window.inner_lower = ranks.above < size ? place(ranks.above).next() : kAboveAll;
    }
    if (needs_upper(row)) {
      const SampleRanks ranks = sample_ranks(range.upper + shift, num_keys, size);
      window.inner_upper = ranks.below >= 0 ? place(ranks.below) : kBelowAll;
      if (ranks.above < size) window.upper = place(ranks.above).next();
    }
  });
  return windows;
}

std::vector<int64_t> concatenate(const std::vector<std::vector<int64_t>>& parts) {
  std::vector<int64_t> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Census::Census(const Problem& problem, const QueryBlock& block, const Chunks& chunks)
    : problem_(problem),
      block_(block),
      chunks_(chunks),
      group_size_(tile_kernels().group),
      logs_(chunks.count),
      tallies_(chunks.count * block.size()),
      counts_(chunks.tiles * block.size()),
      begins_(chunks.tiles * block.groups) {}

void Census::Log::append(const Members& members) {
  if (size + members.count + kSlack > capacity) {
    const size_t larger = std::max<size_t>(2 * capacity, 16 * kTile);
    AlignedFloats similarities(larger);
    std::unique_ptr<uint8_t[]> positions(new uint8_t[larger]);
    if (size > 0) {
      std::memcpy(similarities.get(), similarity.get(), size * sizeof(float));
      std::memcpy(positions.get(), position.get(), size);
    }
    similarity = std::move(similarities);
    position = std::move(positions);
    capacity = larger;
  }
  std::memcpy(similarity.get() + size, members.value, members.count * sizeof(float));
  for (int i = 0; i < members.count; ++i) position[size + i] = static_cast<uint8_t>(members.position[i]);
  size += members.count;
}

void Census::record(int64_t chunk, int64_t row, const RowTile& tile, int reached, int certain,
                    const Members& undecided) {
  Tally& tally = tallies_[chunk * block_.size() + row];
  tally.below += tile.count - reached;
  tally.members += certain;
  const int64_t number = tile.first_key / kTile;
  if (row % group_size_ == 0) {
    begins_[number * block_.groups + row / group_size_] = static_cast<uint32_t>(logs_[chunk].size);
  }
  counts_[number * block_.size() + row] = static_cast<uint8_t>(undecided.count);
  if (undecided.count > 0) logs_[chunk].append(undecided);
}

std::vector<int64_t> Census::resolve(int64_t group, const std::vector<Window>& windows,
                                     std::vector<Boundaries>& boundaries) {
  const int64_t num_rows = block_.size(), first = group * group_size_;
  const int rows = static_cast<int>(std::min(group_size_, num_rows - first));

  // The group's undecided, row by row: order-preserving keys and places.
  std::vector<int32_t> keys[kMaxGroup];
  std::vector<uint32_t> indices[kMaxGroup];
  int64_t filled[kMaxGroup] = {};
  for (int i = 0; i < rows; ++i) {
    int64_t total = 0;
    for (int64_t tile = 0; tile < chunks_.tiles; ++tile) total += counts_[tile * num_rows + first + i];
    keys[i].resize(total);
    indices[i].resize(total);
  }
  for (int64_t tile = 0; tile < chunks_.tiles; ++tile) {
    const Log& log = logs_[tile / chunks_.tiles_per_chunk];
    size_t at = begins_[tile * block_.groups + group];
    for (int i = 0; i < rows; ++i) {
      const int count = counts_[tile * num_rows + first + i];
      if (count == 0) continue;
      tile_kernels().order_keys(log.similarity.get() + at, count, keys[i].data() + filled[i]);
      for (int j = 0; j < count; ++j) {
        indices[i][filled[i] + j] = static_cast<uint32_t>(tile * kTile) + log.position[at + j];
      }
      filled[i] += count;
      at += count;
    }
  }

  std::vector<int64_t> missed;
  for (int i = 0; i < rows; ++i) {
    const int64_t row = first + i;
    const int64_t number = block_.rows[row];
    const RankRange range = problem_.range(number);
    const int64_t shift = problem_.exclude && problem_.exclude[number] >= 0 ? 1 : 0;
    int64_t below = 0, certain = 0;
    for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
      below += tallies_[chunk * num_rows + row].below;
      certain += tallies_[chunk * num_rows + row].members;
    }
    const auto count = static_cast<int64_t>(keys[i].size());
    const Window& window = windows[row];
    const auto place = [&](int64_t rank) {
      const int32_t lowest = std::max(window.lower.key, kBelowAll.key), highest = std::min(window.upper.key, kNanKey);
      const int64_t position = select(keys[i].data(), count, rank, lowest, highest);
      return Place{keys[i][position], indices[i][position]};
    };

    // Undecided entries below the certain ones come first in rank, those above them last.
    bool hit = true;
    Boundaries exact;
    if (range.lower > 0) {
      const int64_t rank = range.lower + shift - below;
      hit = rank >= 0 && rank < count;
      if (hit) exact.lower = place(rank);
      hit = hit && (certain == 0 || exact.lower < window.inner_lower);
    }
    if (hit && range.upper + shift < chunks_.keys) {
      const int64_t rank = range.upper + shift - below - certain;
      hit = rank >= 0 && rank < count;
      if (hit) exact.upper = place(rank);
      hit = hit && (certain == 0 || !(exact.upper < window.inner_upper));
    }
    if (!hit) {
      missed.push_back(number);
      continue;
    }
    boundaries[row] = exact;
    for (int64_t chunk = 0, at = 0; chunk < chunks_.count; ++chunk) {
      int64_t members = 0;
      for (; at < count && indices[i][at] < chunks_.last_key(chunk); ++at) {
        const Place entry{keys[i][at], indices[i][at]};
        members += !(entry < exact.lower) && entry < exact.upper;
      }
      tallies_[chunk * num_rows + row].members += members;
    }
  }
  return missed;
}

Located locate(const Problem& problem, const Chunks& chunks, ParallelFor parallel) {
  const int64_t num_rows = problem.query.rows;
  Located located{std::vector<Boundaries>(num_rows), std::vector<int64_t>(chunks.count * num_rows)};

  for_each_block(problem, [&](const std::vector<int64_t>& rows, bool bracketed) {
    const QueryBlock block(problem.query, rows);
    const std::vector<Window> windows = bracket(problem, block, bracketed, parallel);
    Census census(problem, block, chunks);
    parallel(chunks.count, [&](int64_t chunk) {
      Members certain, undecided;
      walk(problem, block, chunks, chunk, [&](KeyTile&, int64_t group, const RowTile* row_tiles, int count) {
        for (int i = 0; i < count; ++i) {
          const int64_t row = group * tile_kernels().group + i;
          const int reached = tile_kernels().split(row_tiles[i], windows[row], certain, undecided);
          census.record(chunk, row, row_tiles[i], reached, certain.count, undecided);
        }
      });
    });
    std::vector<Boundaries> boundaries(block.size());
    std::vector<std::vector<int64_t>> missed(block.groups);
    parallel(block.groups, [&](int64_t group) { missed[group] = census.resolve(group, windows, boundaries); });
    for (int64_t row = 0; row < block.size(); ++row) {
      located.boundaries[rows[row]] = boundaries[row];
      for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
        located.members[chunk * num_rows + rows[row]] = census.members(chunk, row);
      }
    }
    return concatenate(missed);
  });
  return located;
}

}  // namespace iecl_fast::ring
