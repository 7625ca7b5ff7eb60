// Exact ring boundaries for a block of queries in one pass over the keys, without storing the similarities.
//
// 1. bracket(): a jittered sample of the keys gives, for each query, a window: two brackets that almost surely hold the
//    two boundaries. Brackets are places in the order of (similarity, index), so however many similarities are equal,
//    about the same small share of the keys falls into them.
// 2. One pass over all keys counts what lies below the window and records what lies inside a bracket (the undecided);
//    whoever makes the pass may use the certain members at once.
// 3. resolve() finds the exact boundaries among the undecided. A boundary outside its bracket (about one query in ten
//    thousand) is noticed by the counts; such a query is done again with a window that leaves everything undecided.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ring/walk.h"

namespace iecl_fast::ring {

// Members are the entries in [lower, upper).
struct Boundaries {
  Place lower = kBelowAll;
  Place upper = kAboveAll;

  Window window() const { return {lower, lower, upper, upper}; }
};

constexpr int64_t kLargestBlock = 256;  // queries done together at most

std::vector<Limits> limits(const std::vector<Window>& windows);

std::vector<int64_t> row_range(int64_t begin, int64_t end);

// Memory that a census takes for each query: of its undecided alone, or of all members too (see keep_members).
double census_bytes(const Problem& problem, bool members_too);
// How many queries to do together so that what is kept for them stays within about 20 MiB.
int64_t rows_within(double bytes_per_row);

// Calls run(rows, bracketed) until all queries are done, as many at a time as their memory allows. run() returns the rows
// whose bracket missed; they come again with bracketed = false.
void for_each_block(const Problem& problem, double bytes_per_row,
                    const std::function<std::vector<int64_t>(const std::vector<int64_t>&, bool)>& run);

// Whether the ring of every query holds all its candidates, so that there is nothing to find.
bool all_are_members(const Problem& problem);

// Where in a sample of m keys, sorted, a boundary is looked for: from a rank below it to one above; -1 and m where the
// sample ends.
struct SampleRanks {
  int64_t below, above;
};

// The boundaries of a query that have to be found.
struct Brackets {
  bool has_lower, has_upper;
  SampleRanks lower, upper;
};

constexpr int64_t kSampleTile = 192;

// One key from each of `size` equal cells, ascending.
std::vector<uint32_t> sample_keys(int64_t num_keys, int64_t size);

// visit(row, first, count, similarity): similarity[k] of the block's row, which may be one of its padding, with the
// sampled key first + k. From several threads, for different keys; tile by tile, so that no packed sample is held.
using SampleVisit = std::function<void(int64_t row, int64_t first, int count, const float* similarity)>;
void visit_sample(const Matrix& keys, const std::vector<uint32_t>& indices, const QueryBlock& block,
                  ParallelFor parallel, const SampleVisit& visit);

// A window for each query of the block, by the order of the sample. A sample of no keys leaves everything undecided.
std::vector<Window> windows_between(const Problem& problem, const QueryBlock& block, int64_t sample_size,
                                    const std::function<Brackets(int64_t row)>& brackets, ParallelFor parallel);

// The same for the ranks of the problem, with a sample of its own. `bracketed` false leaves everything undecided.
std::vector<Window> bracket(const Problem& problem, const QueryBlock& block, bool bracketed, ParallelFor parallel);

// Leaves members undecided too, so that a census records all of them.
void keep_members(std::vector<Window>& windows);

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

// The ring of every query, for operators that need it before they look at members.
struct Located {
  std::vector<Boundaries> boundaries;  // [N]
  std::vector<int64_t> members;        // [chunks, N]
};

Located locate(const Problem& problem, const Chunks& chunks, ParallelFor parallel);

}  // namespace iecl_fast::ring
