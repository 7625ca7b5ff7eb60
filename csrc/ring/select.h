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
#include <vector>

#include "ring/census.h"

namespace iecl_fast::ring {

constexpr int64_t kLargestBlock = 256;  // queries done together at most

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

// The ring of every query, for operators that need it before they look at members.
struct Located {
  std::vector<Boundaries> boundaries;  // [N]
  std::vector<int64_t> members;        // [chunks, N]
};

Located locate(const Problem& problem, const Chunks& chunks, ParallelFor parallel);

}  // namespace iecl_fast::ring
