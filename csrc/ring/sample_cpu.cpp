// The members of a ring, all or some of them, and the gradients of their similarities.
//
// A narrow ring is recorded in the pass that finds its boundaries: 2 N K C operations, 4 K C bytes and the results. A wide
// one would not fit: a second pass, which knows the boundaries and where to write, makes it 4 N K C and 8 K C.

#include <algorithm>
#include <cmath>

#include "ring/select.h"

namespace iecl_fast::ring {
namespace {

// Which member a draw asks for, and where in the result it goes.
struct Draw {
  uint32_t member;
  uint32_t slot;
};

std::vector<Draw> sorted_draws(const double* uniform, int64_t count, RankRange range) {
  const int64_t size = range.upper - range.lower;
  std::vector<Draw> draws(count);
  for (int64_t slot = 0; slot < count; ++slot) {
    const auto member = static_cast<int64_t>(uniform[slot] * static_cast<double>(size));
    const int64_t last = std::max<int64_t>(size - 1, 0);
    draws[slot] = {static_cast<uint32_t>(std::clamp<int64_t>(member, 0, last)), static_cast<uint32_t>(slot)};
  }
  std::sort(draws.begin(), draws.end(), [](const Draw& a, const Draw& b) { return a.member < b.member; });
  return draws;
}

// Called for each query and each tile with members of its ring: `number` the query's row, `before` how many members have
// lower indices, `first_key` what the members' positions count from. Calls for different chunks may come at once.
using Visit = std::function<void(int64_t number, int64_t before, int64_t first_key, const Members& members)>;

// counts: [chunks, rows]. The number of members of each row before a chunk.
std::vector<int64_t> members_before(int64_t chunk, const std::vector<int64_t>& counts, int64_t rows) {
  std::vector<int64_t> before(rows);
  for (int64_t i = 0; i < chunk * rows; ++i) before[i % rows] += counts[i];
  return before;
}

void visit_recorded(const Problem& problem, const Chunks& chunks, double bytes_per_row, ParallelFor parallel,
                    const Visit& visit) {
  for_each_block(problem, bytes_per_row, [&](const std::vector<int64_t>& rows, bool bracketed) {
    const QueryBlock block(problem.query, rows);
    std::vector<Window> windows = bracket(problem, block, bracketed, parallel);
    keep_members(windows);
    Census census(problem, block, chunks);
    census.take(windows, parallel);
    std::vector<Boundaries> boundaries(block.size());
    std::vector<int64_t> missed = census.resolve(windows, boundaries, parallel);
    std::vector<int64_t> counts(chunks.count * block.size());
    parallel(chunks.count, [&](int64_t chunk) {
      census.count_members(chunk, boundaries, counts.data() + chunk * block.size());
    });
    for (const int64_t number : missed) {  // nothing to be visited of these
      boundaries[number - rows.front()] = {kAboveAll, kAboveAll};
    }
    parallel(chunks.count, [&](int64_t chunk) {
      std::vector<int64_t> before = members_before(chunk, counts, block.size());
      MemberBuffer buffer;
      const auto room = [&] { return Members(buffer); };
      for (int64_t tile = chunks.first_tile(chunk); tile < chunks.last_tile(chunk); ++tile) {
        census.visit_members(tile, boundaries, room, [&](int64_t row, const Members& members) {
          visit(rows[row], before[row], chunks.first_key(tile), members);
          before[row] += members.count;
        });
      }
    });
    return missed;
  });
}

void visit_walking(const Problem& problem, const Chunks& chunks, ParallelFor parallel, const Visit& visit) {
  const int64_t num_rows = problem.query.rows;
  const Located located = locate(problem, chunks, parallel);
  for (int64_t begin = 0; begin < num_rows; begin += kLargestBlock) {
    const QueryBlock block(problem.query, row_range(begin, std::min(begin + kLargestBlock, num_rows)));
    std::vector<Limits> limits;
    for (const int64_t number : block.rows) limits.emplace_back(located.boundaries[number].window());
    parallel(chunks.count, [&](int64_t chunk) {
      std::vector<int64_t> before = members_before(chunk, located.members, num_rows);
      MemberBuffer members, none;
      walk(problem, block, chunks, chunk, [&](KeyTile&, int64_t group, const RowTile* row_tiles, int count) {
        for (int i = 0; i < count; ++i) {
          const int64_t row = group * tile_kernels().group + i, number = begin + row;
          tile_kernels().split(row_tiles[i], limits[row], members, none);
          if (members.count == 0) continue;
          visit(number, before[number], row_tiles[i].first_key, members);
          before[number] += members.count;
        }
      });
    });
  }
}

void visit_members(const Problem& problem, ParallelFor parallel, const Visit& visit) {
  const Chunks chunks(problem.keys.rows, problem.keys.columns);
  const double bytes_per_row = census_bytes(problem, true);
  // Few queries at a time mean many readings of the keys.
  if (!all_are_members(problem) && rows_within(bytes_per_row) >= std::min<int64_t>(problem.query.rows, 32)) {
    visit_recorded(problem, chunks, bytes_per_row, parallel, visit);
  } else {
    visit_walking(problem, chunks, parallel, visit);
  }
}

}  // namespace

void sample_cpu(const Problem& problem, int64_t size, float* similarities, int64_t* indices, ParallelFor parallel) {
  visit_members(problem, parallel, [&](int64_t row, int64_t before, int64_t first_key, const Members& members) {
    const int64_t begin = row * size + before;
    std::copy_n(members.value, members.count, similarities + begin);
    for (int i = 0; indices != nullptr && i < members.count; ++i) {
      indices[begin + i] = first_key + members.position[i];
    }
  });
}

void draw_cpu(const Problem& problem, const double* uniform, int64_t num_samples, float* similarities,
              int64_t* indices, ParallelFor parallel) {
  std::vector<std::vector<Draw>> draws(problem.query.rows);
  parallel(problem.query.rows, [&](int64_t row) {
    draws[row] = sorted_draws(uniform + row * num_samples, num_samples, problem.range(row));
  });
  visit_members(problem, parallel, [&](int64_t row, int64_t before, int64_t first_key, const Members& members) {
    const auto& wanted = draws[row];
    auto draw = std::lower_bound(wanted.begin(), wanted.end(), before,
                                 [](const Draw& a, int64_t member) { return a.member < member; });
    for (; draw != wanted.end() && draw->member < before + members.count; ++draw) {
      const int64_t member = draw->member - before, to = row * num_samples + draw->slot;
      similarities[to] = members.value[member];
      if (indices != nullptr) indices[to] = first_key + members.position[member];
    }
  });
}

void sample_query_gradient_cpu(const float* gradient, const int64_t* indices, int64_t num_samples, const Matrix& keys,
                               int64_t num_queries, float* query_gradient, ParallelFor parallel) {
  const int64_t channels = keys.columns;
  int32_t order[kTile];
  for (int i = 0; i < kTile; ++i) order[i] = i;
  parallel(num_queries, [&](int64_t row) {
    RowReader reader(keys, kTile);
    AlignedFloats part(channels);
    std::vector<double> total(channels);
    for (int64_t begin = 0; begin < num_samples; begin += kTile) {
      const int count = static_cast<int>(std::min<int64_t>(kTile, num_samples - begin));
      const int64_t at = row * num_samples + begin;
      reader.gather(indices + at, count);
      std::fill_n(part.get(), channels, 0.0f);
      tile_kernels().weighted_sum(gradient + at, order, count, reader.data(), reader.row_stride(), channels,
                                  part.get());
      for (int64_t c = 0; c < channels; ++c) total[c] += part.get()[c];
    }
    for (int64_t c = 0; c < channels; ++c) query_gradient[row * channels + c] = static_cast<float>(total[c]);
  });
}

void sample_keys_gradient_cpu(const float* gradient, const int64_t* indices, int64_t num_samples, const Matrix& query,
                              int64_t num_keys, float* keys_gradient, ParallelFor parallel) {
  const int64_t channels = query.columns;
  std::fill_n(keys_gradient, num_keys * channels, 0.0f);
  RowReader queries(query, static_cast<int>(query.rows));
  queries.gather(row_range(0, query.rows).data(), static_cast<int>(query.rows));
  // A task owns some channels of all keys, so it adds in the order of the draws whatever the number of threads.
  constexpr int64_t kSlice = 16;
  parallel((channels + kSlice - 1) / kSlice, [&](int64_t slice) {
    const int64_t begin = slice * kSlice, end = std::min(begin + kSlice, channels);
    for (int64_t row = 0; row < query.rows; ++row) {
      const float* query_row = queries.data() + row * channels;
      for (int64_t i = row * num_samples; i < (row + 1) * num_samples; ++i) {
        float* key = keys_gradient + indices[i] * channels;
        for (int64_t c = begin; c < end; ++c) key[c] += gradient[i] * query_row[c];
      }
    }
  });
}

}  // namespace iecl_fast::ring
