// The middle and the end of the selection (see select.h): what a pass over the keys notes, and how the exact boundaries
// are found in it.
#pragma once

#include <cstdint>
#include <vector>

#include "ring/walk.h"

namespace iecl_fast::ring {

// Members are the entries in [lower, upper).
struct Boundaries {
  Place lower = kBelowAll;
  Place upper = kAboveAll;

  Window window() const { return {lower, lower, upper, upper}; }
};

std::vector<Limits> limits(const std::vector<Window>& windows);

// What one pass over the keys learned about a block of queries.
class Census {
 public:
  Census(const Problem& problem, const QueryBlock& block, const Chunks& chunks);

  // Notes the outcome of TileKernels::split or mask for one row of a tile, in the order of walk(). The chunks may be
  // recorded by different threads.
  void record(int64_t chunk, int64_t row, const RowTile& tile, int reached, int certain, const Members& undecided);

  // Makes the pass for those who have no other use for it.
  void take(const std::vector<Window>& windows, ParallelFor parallel);

  // The exact boundaries of one group's rows. Returns those for which a boundary lies outside its bracket. Groups may be
  // resolved by different threads.
  std::vector<int64_t> resolve_group(int64_t group, const std::vector<Window>& windows,
                                     std::vector<Boundaries>& boundaries) const;
  // All groups.
  std::vector<int64_t> resolve(const std::vector<Window>& windows, std::vector<Boundaries>& boundaries,
                               ParallelFor parallel) const;

  // Entries of a row below its window, its excluded key among them, and certain members.
  struct Tally {
    int64_t below = 0;
    int64_t certain = 0;
  };
  Tally total(int64_t row) const;

  // visit(row_in_group, first_key, count, similarity, position) for the undecided of a group, those of a row and a tile
  // together, in each row by ascending index. There may be up to kSlack floats of no meaning behind them.
  template <class Visit>
  void visit_undecided(int64_t group, const Visit& visit) const {
    const int rows = static_cast<int>(std::min(group_size_, block_.size() - group * group_size_));
    for (int64_t tile = 0; tile < chunks_.tiles; ++tile) {
      const Log& log = logs_[chunks_.chunk_of(tile)];
      size_t at = begin(tile, group);
      for (int i = 0; i < rows; ++i) {
        const int count = counts_[tile * block_.size() + group * group_size_ + i];
        if (count == 0) continue;
        at = Log::place(at, count);
        visit(i, chunks_.first_key(tile), count, log.similarity(at), log.position(at));
        at += count;
      }
    }
  }

  // How many members each row has in a chunk: counts[row].
  void count_members(int64_t chunk, const std::vector<Boundaries>& boundaries, int64_t* counts) const;

  // Calls visit(row, members) with the undecided of one tile that proved to be members, for each row that has any.
  // They are put where room() says.
  template <class Room, class Visit>
  void visit_members(int64_t tile, const std::vector<Boundaries>& boundaries, const Room& room,
                     const Visit& visit) const {
    const Log& log = logs_[chunks_.chunk_of(tile)];
    for (int64_t group = 0; group < block_.groups; ++group) {
      size_t at = begin(tile, group);
      const int64_t end = std::min((group + 1) * group_size_, block_.size());
      for (int64_t row = group * group_size_; row < end; ++row) {
        const int count = counts_[tile * block_.size() + row];
        if (count == 0) continue;
        at = Log::place(at, count);
        Members members = room();
        tile_kernels().filter(log.similarity(at), log.position(at), count, static_cast<uint32_t>(chunks_.first_key(tile)),
                              boundaries[row].lower, boundaries[row].upper, members);
        if (members.count > 0) visit(row, members);
        at += count;
      }
    }
  }

 private:
  // The undecided of a chunk: tile by tile, in each row by row, in each by ascending position. In pieces, so that a chunk
  // which holds far more than others, as with many equal keys, never has to be copied to grow. No row's entries of a
  // tile are divided: place() tells where they begin, for those that write and those that read.
  struct Log {
    static constexpr size_t kPiece = 16384;  // entries
    struct Piece {
      AlignedArray<float> similarity{kPiece};
      AlignedArray<uint16_t> position{kPiece};  // in the tile
    };
    std::vector<Piece> pieces;
    size_t size = 0;

    // Where `count` entries go that follow the first `at`: readers and writers go up to kSlack past the end.
    static size_t place(size_t at, int count) {
      return at % kPiece + count + 2 * kSlack > kPiece ? (at / kPiece + 1) * kPiece : at;
    }
    float* similarity(size_t at) const { return pieces[at / kPiece].similarity.get() + at % kPiece; }
    uint16_t* position(size_t at) const { return pieces[at / kPiece].position.get() + at % kPiece; }
    void append(const Members& members);
  };

  size_t begin(int64_t tile, int64_t group) const;
  uint32_t index(int64_t group, int row_in_group, int64_t position) const;

  const Problem& problem_;
  const QueryBlock& block_;
  const Chunks& chunks_;
  const int64_t group_size_;
  std::vector<Log> logs_;           // [chunks]
  std::vector<Tally> tallies_;      // [chunks, rows]
  std::vector<uint16_t> counts_;     // [tiles, rows] how many of a row's entries are in the log,
  std::vector<uint32_t> begins_;    // [tiles, groups] and where in it those of a group begin
};

}  // namespace iecl_fast::ring
