#include "ring/census.h"

#include <algorithm>
#include <cstring>

namespace iecl_fast::ring {

std::vector<Limits> limits(const std::vector<Window>& windows) { return {windows.begin(), windows.end()}; }

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
  const size_t at = place(size, members.count);
  if (at / kPiece >= pieces.size()) pieces.emplace_back();
  // In steps of a fixed size: these are copied without a loop or a call.
  float* to_similarity = similarity(at);
  uint16_t* to_position = position(at);
  for (int begin = 0; begin < members.count; begin += kSlack) {
    std::memcpy(to_similarity + begin, members.value + begin, kSlack * sizeof(float));
    for (int i = begin; i < begin + kSlack; ++i) to_position[i] = static_cast<uint16_t>(members.position[i]);
  }
  size = at + members.count;
}

void Census::record(int64_t chunk, int64_t row, const RowTile& tile, int reached, int certain,
                    const Members& undecided) {
  Tally& tally = tallies_[chunk * block_.size() + row];
  tally.below += tile.count - reached;
  tally.certain += certain;
  const int64_t number = tile.first_key / chunks_.tile;
  if (row % group_size_ == 0) {
    begins_[number * block_.groups + row / group_size_] = static_cast<uint32_t>(logs_[chunk].size);
  }
  counts_[number * block_.size() + row] = static_cast<uint16_t>(undecided.count);
  if (undecided.count > 0) logs_[chunk].append(undecided);
}

void Census::take(const std::vector<Window>& windows, ParallelFor parallel) {
  const std::vector<Limits> row_limits = limits(windows);
  parallel(chunks_.count, [&](int64_t chunk) {
    MemberBuffer certain, undecided;
    walk(problem_, block_, chunks_, chunk, [&](KeyTile&, int64_t group, const RowTile* row_tiles, int count) {
      for (int i = 0; i < count; ++i) {
        const int64_t row = group * group_size_ + i;
        const int reached = tile_kernels().split(row_tiles[i], row_limits[row], certain, undecided);
        record(chunk, row, row_tiles[i], reached, certain.count, undecided);
      }
    });
  });
}

std::vector<int64_t> Census::resolve(const std::vector<Window>& windows, std::vector<Boundaries>& boundaries,
                                     ParallelFor parallel) const {
  std::vector<std::vector<int64_t>> missed(block_.groups);
  parallel(block_.groups, [&](int64_t group) { missed[group] = resolve_group(group, windows, boundaries); });
  std::vector<int64_t> all;
  for (const auto& some : missed) all.insert(all.end(), some.begin(), some.end());
  return all;
}

std::vector<int64_t> Census::resolve_group(int64_t group, const std::vector<Window>& windows,
                                           std::vector<Boundaries>& boundaries) const {
  const int64_t num_rows = block_.size(), first = group * group_size_;
  const int rows = static_cast<int>(std::min(group_size_, num_rows - first));

  // The order-preserving keys of the group's undecided, row by row, each in ascending index.
  int64_t counts[kMaxGroup] = {};
  for (int64_t tile = 0; tile < chunks_.tiles; ++tile) {
    for (int i = 0; i < rows; ++i) counts[i] += counts_[tile * num_rows + first + i];
  }
  std::unique_ptr<int32_t[]> keys[kMaxGroup];
  int32_t* next[kMaxGroup];
  for (int i = 0; i < rows; ++i) {
    keys[i].reset(new int32_t[counts[i] + kSlack]);
    next[i] = keys[i].get();
  }
  for (int64_t tile = 0; tile < chunks_.tiles; ++tile) {
    const Log& log = logs_[chunks_.chunk_of(tile)];
    size_t at = begin(tile, group);
    for (int i = 0; i < rows; ++i) {
      const int count = counts_[tile * num_rows + first + i];
      if (count == 0) continue;
      at = Log::place(at, count);
      tile_kernels().order_keys(log.similarity(at), count, next[i]);
      next[i] += count;
      at += count;
    }
  }

  std::vector<int64_t> missed;
  for (int i = 0; i < rows; ++i) {
    const int64_t row = first + i;
    const int64_t number = block_.rows[row];
    const RankRange range = problem_.range(number);
    const int64_t shift = problem_.excludes_one(number) ? 1 : 0;
    const Tally total = this->total(row);
    const auto place = [&](int64_t rank, const Place& from, const Place& to) {
      const int64_t position = tile_kernels().select(keys[i].get(), counts[i], rank, from.key, to.key);
      return Place{keys[i][position], index(group, i, position)};
    };

    // Undecided entries below the certain ones come first in rank, those above them last.
    bool hit = true;
    if (range.lower + shift == chunks_.keys) {  // an empty ring above all candidates
      boundaries[row].lower = kAboveAll;
    } else if (range.lower > 0) {
      const int64_t rank = range.lower + shift - total.below;
      hit = rank >= 0 && rank < counts[i];
      if (hit) boundaries[row].lower = place(rank, windows[row].lower, windows[row].inner_lower);
      hit = hit && (total.certain == 0 || boundaries[row].lower < windows[row].inner_lower);
    }
    if (hit && range.upper + shift < chunks_.keys) {
      const int64_t rank = range.upper + shift - total.below - total.certain;
      hit = rank >= 0 && rank < counts[i];
      if (hit) boundaries[row].upper = place(rank, windows[row].inner_upper, windows[row].upper);
      hit = hit && (total.certain == 0 || !(boundaries[row].upper < windows[row].inner_upper));
    }
    if (!hit) missed.push_back(number);
  }
  return missed;
}

Census::Tally Census::total(int64_t row) const {
  Tally total;
  for (int64_t chunk = 0; chunk < chunks_.count; ++chunk) {
    total.below += tallies_[chunk * block_.size() + row].below;
    total.certain += tallies_[chunk * block_.size() + row].certain;
  }
  return total;
}

// How long the log was before a group's entries of a tile.
size_t Census::begin(int64_t tile, int64_t group) const { return begins_[tile * block_.groups + group]; }

// Index of the key of a row's undecided entry, given its position among the row's.
uint32_t Census::index(int64_t group, int row_in_group, int64_t position) const {
  for (int64_t tile = 0;; ++tile) {
    const uint16_t* counts = counts_.data() + tile * block_.size() + group * group_size_;
    if (position >= counts[row_in_group]) {
      position -= counts[row_in_group];
      continue;
    }
    size_t at = begin(tile, group);
    for (int row = 0; row < row_in_group; ++row) {
      if (counts[row] > 0) at = Log::place(at, counts[row]) + counts[row];
    }
    const uint16_t* positions = logs_[chunks_.chunk_of(tile)].position(Log::place(at, counts[row_in_group]));
    return static_cast<uint32_t>(chunks_.first_key(tile)) + positions[position];
  }
}

void Census::count_members(int64_t chunk, const std::vector<Boundaries>& boundaries, int64_t* counts) const {
  for (int64_t row = 0; row < block_.size(); ++row) counts[row] = tallies_[chunk * block_.size() + row].certain;
  MemberBuffer buffer;
  for (int64_t tile = chunks_.first_tile(chunk); tile < chunks_.last_tile(chunk); ++tile) {
    visit_members(
        tile, boundaries, [&] { return Members(buffer); },
        [&](int64_t row, const Members& members) { counts[row] += members.count; });
  }
}

}  // namespace iecl_fast::ring
