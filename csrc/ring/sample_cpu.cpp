// The members of a ring, all or some of them, and the gradients of their similarities.
//
// Two passes over the keys: the first finds the boundaries and how many members each chunk holds, so that the second
// knows where to write them. Bytes: 8 K C and the results. Operations: 4 N K C.

#include <algorithm>
#include <cmath>

#include "ring/select.h"

namespace iecl_fast::ring {
namespace {

// Which position each draw of a row asks for, in ascending order.
struct Draw {
  int64_t position;
  int64_t slot;
};

std::vector<Draw> sorted_draws(const int64_t* positions, int64_t count) {
  std::vector<Draw> draws(count);
  for (int64_t slot = 0; slot < count; ++slot) draws[slot] = {positions[slot], slot};
  std::sort(draws.begin(), draws.end(), [](const Draw& a, const Draw& b) { return a.position < b.position; });
  return draws;
}

// Calls visit(number, first, tile, members) for each query and each tile with members of its ring: `number` the query's
// row, `first` how many members come before these. For one query and chunk the calls come in order.
template <class Visit>
void for_each_members(const Problem& problem, ParallelFor parallel, const Visit& visit) {
  const int64_t num_rows = problem.query.rows;
  const Chunks chunks(problem.keys.rows, problem.keys.columns);
  const Located located = locate(problem, chunks, parallel);
  for (int64_t begin = 0; begin < num_rows; begin += kLargestBlock) {
    const QueryBlock block(problem.query, row_range(begin, std::min(begin + kLargestBlock, num_rows)));
    parallel(chunks.count, [&](int64_t chunk) {
      std::vector<int64_t> before(block.size());
      for (int64_t earlier = 0; earlier < chunk; ++earlier) {
        for (int64_t row = 0; row < block.size(); ++row) before[row] += located.members[earlier * num_rows + begin + row];
      }
      Members members, none;
      walk(problem, block, chunks, chunk, [&](KeyTile&, int64_t group, const RowTile* row_tiles, int count) {
        for (int i = 0; i < count; ++i) {
          const int64_t row = group * tile_kernels().group + i;
          tile_kernels().split(row_tiles[i], located.boundaries[begin + row].window(), members, none);
          if (members.count == 0) continue;
          visit(begin + row, before[row], row_tiles[i], members);
          before[row] += members.count;
        }
      });
    });
  }
}

}  // namespace

void sample_cpu(const Problem& problem, int64_t size, float* similarities, int64_t* indices, ParallelFor parallel) {
  for_each_members(problem, parallel, [&](int64_t row, int64_t first, const RowTile& tile, const Members& members) {
    const int64_t begin = row * size + first;
    std::copy_n(members.value, members.count, similarities + begin);
    for (int i = 0; indices != nullptr && i < members.count; ++i) {
      indices[begin + i] = static_cast<int64_t>(tile.first_key) + members.position[i];
    }
  });
}

void draw_cpu(const Problem& problem, const int64_t* positions, int64_t num_samples, float* similarities,
              int64_t* indices, ParallelFor parallel) {
  std::vector<std::vector<Draw>> draws(problem.query.rows);
  parallel(problem.query.rows,
           [&](int64_t row) { draws[row] = sorted_draws(positions + row * num_samples, num_samples); });
  for_each_members(problem, parallel, [&](int64_t row, int64_t first, const RowTile& tile, const Members& members) {
    const auto& wanted = draws[row];
    auto draw = std::lower_bound(wanted.begin(), wanted.end(), first,
                                 [](const Draw& a, int64_t position) { return a.position < position; });
    for (; draw != wanted.end() && draw->position < first + members.count; ++draw) {
      const int64_t member = draw->position - first, to = row * num_samples + draw->slot;
      similarities[to] = members.value[member];
      if (indices != nullptr) indices[to] = static_cast<int64_t>(tile.first_key) + members.position[member];
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
