// Walks over all similarities of a block of queries, tile by tile, without ever holding more than one tile of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "ring/ring.h"
#include "ring/tile.h"

namespace iecl_fast::ring {

void* allocate_aligned(int64_t bytes);

// Uninitialised, aligned to a cache line.
template <class Element>
class AlignedArray {
 public:
  explicit AlignedArray(int64_t count = 0)
      : data_(static_cast<Element*>(allocate_aligned(count * static_cast<int64_t>(sizeof(Element))))) {}
  Element* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(Element* data) const { std::free(data); }
  };
  std::unique_ptr<Element[], Free> data_;
};
using AlignedFloats = AlignedArray<float>;

// The keys in tiles, and the tiles in chunks: a chunk is one task. They depend on the shape alone, never on the number of
// threads or on which queries are done together, and with them the order of every sum.
struct Chunks {
  // Long tiles make long lists of members; a tile, packed and not, and the next one, have to fit the second-level cache.
  static constexpr int64_t kTileFloats = kTile * 128;

  int64_t keys;
  int tile;  // keys per tile
  int64_t tiles;
  int64_t tiles_per_chunk;
  int64_t count;

  Chunks(int64_t num_keys, int64_t channels)
      : keys(num_keys),
        tile(static_cast<int>(
                 std::clamp<int64_t>(kTileFloats / std::max<int64_t>(channels, 1) / 48, 1, kTile / 48)) * 48) {
    tiles = (keys + tile - 1) / tile;
    // Each chunk keeps a partial sum of `channels` floats for each query of a block.
    const int64_t most = std::clamp<int64_t>(5120 / std::max<int64_t>(channels, 1), 2, 40);
    tiles_per_chunk = std::max<int64_t>(1, (tiles + most - 1) / most);
    count = (tiles + tiles_per_chunk - 1) / tiles_per_chunk;
  }
  int64_t chunk_of(int64_t number) const { return number / tiles_per_chunk; }
  int64_t first_tile(int64_t chunk) const { return chunk * tiles_per_chunk; }
  int64_t last_tile(int64_t chunk) const { return std::min(tiles, (chunk + 1) * tiles_per_chunk); }
  int64_t first_key(int64_t number) const { return number * tile; }
  int tile_size(int64_t number) const { return static_cast<int>(std::min<int64_t>(tile, keys - number * tile)); }
};

// Rows of a matrix as float32, whatever their type and strides.
class RowReader {
 public:
  explicit RowReader(const Matrix& matrix, int max_rows);

  // Rows first .. first + count - 1: as they lie where possible, else converted.
  void view(int64_t first, int count);
  // The given rows, copied side by side.
  void gather(const uint32_t* rows, int count);
  void gather(const int64_t* rows, int count);

  // The bytes of rows first .. first + count - 1 if they lie in one piece, else none.
  std::pair<const char*, int64_t> bytes(int64_t first, int64_t count) const;

  const float* data() const { return data_; }
  int64_t row_stride() const { return row_stride_; }
  int64_t column_stride() const { return column_stride_; }

 private:
  template <class Index>
  void gather_rows(const Index* rows, int count);
  void convert(int64_t offset, int64_t stride, int64_t count, float* to) const;

  const Matrix& matrix_;
  AlignedFloats converted_;
  const float* data_ = nullptr;
  int64_t row_stride_ = 0, column_stride_ = 0;
};

// Some of the queries, packed in groups for the product.
struct QueryBlock {
  std::vector<int64_t> rows;  // row numbers in the problem
  int64_t groups;
  int64_t channels;
  AlignedFloats packed;               // groups x channels x group
  std::vector<float> magnitude;  // largest of each group, NaN if any is NaN

  QueryBlock(const Matrix& query, std::vector<int64_t> row_numbers);
  int64_t size() const { return static_cast<int64_t>(rows.size()); }
  int64_t padded_size() const { return groups * tile_kernels().group; }
};

// One tile of keys, ready for the product and for weighted sums.
class KeyTile {
 public:
  KeyTile(const Matrix& keys, int size);

  // Both the keys for the product and rows(); view() prepares rows() alone.
  void load(int64_t first_key, int count);
  void gather(const uint32_t* keys, int count);
  void view(int64_t first_key, int count);

  // Memory to be brought near while the kernels work on something else.
  struct Ahead {
    const char* begin = nullptr;
    int64_t bytes = 0;
  };
  // similarity[g * kTile + k] for the queries of some consecutive groups.
  void similarities(const QueryBlock& block, int64_t group, int groups, float* similarity, Ahead ahead) const;
  // Whether the similarities of a group are known to be finite.
  bool finite(const QueryBlock& block, int64_t group) const;

  // The memory of other keys; a share of it.
  Ahead ahead(int64_t first_key, int count, int64_t share, int64_t shares) const;

  // The keys, channels side by side: key k begins at data + k * stride.
  struct Rows {
    const float* data;
    int64_t stride;
  };
  Rows rows();
  int count() const { return count_; }

 private:
  void pack();

  int64_t channels_;
  RowReader reader_;
  AlignedFloats panel_;
  AlignedFloats copied_;
  Rows rows_{};
  int count_ = 0;
  float magnitude_ = 0;
};

// Calls visit(tile, group, row_tiles, count) for each tile of a chunk and each group of the block, with one RowTile for
// each of the group's `count` queries.
template <class Visit>
void walk(const Problem& problem, const QueryBlock& block, const Chunks& chunks, int64_t chunk, const Visit& visit) {
  const int group_size = tile_kernels().group;
  KeyTile tile(problem.keys, chunks.tile);
  const AlignedFloats similarity(kBatch * kMaxGroup * kTile);
  RowTile row_tiles[kMaxGroup];
  for (int64_t number = chunks.first_tile(chunk); number < chunks.last_tile(chunk); ++number) {
    const int64_t first_key = chunks.first_key(number);
    tile.load(first_key, chunks.tile_size(number));
    for (int64_t group = 0; group < block.groups; ++group) {
      if (group % kBatch == 0) {
        const auto groups = static_cast<int>(std::min<int64_t>(kBatch, block.groups - group));
        KeyTile::Ahead ahead;
        if (number + 1 < chunks.last_tile(chunk)) {
          ahead = tile.ahead(chunks.first_key(number + 1), chunks.tile_size(number + 1), group / kBatch,
                             (block.groups + kBatch - 1) / kBatch);
        }
        tile.similarities(block, group, groups, similarity.get(), ahead);
      }
      const float* group_similarity = similarity.get() + group % kBatch * group_size * kTile;
      const bool finite = tile.finite(block, group);
      const auto rows = static_cast<int>(std::min<int64_t>(group_size, block.size() - group * group_size));
      for (int i = 0; i < rows; ++i) {
        const int64_t excluded = problem.exclude ? problem.exclude[block.rows[group * group_size + i]] - first_key : -1;
        row_tiles[i] = {group_similarity + i * kTile, static_cast<uint32_t>(first_key), tile.count(),
                        excluded >= 0 && excluded < tile.count() ? static_cast<int>(excluded) : -1, finite};
      }
      visit(tile, group, row_tiles, rows);
    }
  }
}

}  // namespace iecl_fast::ring
