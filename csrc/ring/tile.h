// The vectorised pieces of Ring on a CPU: what is done to one tile of keys for one group of queries.
//
// The same source (tile_kernels.h) is compiled once per instruction set; tile_kernels() picks one when first asked.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace iecl_fast::ring {

constexpr int kTile = 576;    // keys per tile, at most: a multiple of every panel width
constexpr int kMaxGroup = 8;  // queries per group, at most
constexpr int kBatch = 8;     // groups whose similarities with a tile are computed together
constexpr int kMaxLanes = 16; // floats in a vector register, at most
constexpr int kSlack = kMaxLanes;  // floats that a vector may read or write past the end of a list

// Order-preserving integer of a similarity: a < b exactly if key(a) < key(b); NaN above +inf, -0 equal to +0.
constexpr int32_t kNanKey = std::numeric_limits<int32_t>::max() - 1;

// The similarity with an order-preserving key; NaN for the keys of no similarity.
inline float similarity_of(int32_t key) {
  const int32_t raw = key ^ (key >> 31 & 0x7fffffff);
  float similarity;
  std::memcpy(&similarity, &raw, sizeof raw);
  return similarity;
}

// A place in the order of (similarity, key index). No two entries share one, so ties need no rule of their own.
struct Place {
  int32_t key;
  uint32_t index;

  bool operator<(const Place& other) const { return key != other.key ? key < other.key : index < other.index; }
  Place next() const { return {key, index + 1}; }
};
constexpr Place kBelowAll{std::numeric_limits<int32_t>::min(), 0};
constexpr Place kAboveAll{std::numeric_limits<int32_t>::max(), 0};

// Entries are certain members in [inner_lower, inner_upper), undecided in the rest of [lower, upper), else outside.
struct Window {
  Place lower = kBelowAll;
  Place inner_lower = kBelowAll;
  Place inner_upper = kAboveAll;
  Place upper = kAboveAll;
};

// The similarities of one query with the keys of one tile.
struct RowTile {
  const float* similarity;  // [count], and up to kSlack floats of no meaning
  uint32_t first_key;
  int count;
  int excluded;  // position in the tile of the key that is no candidate, -1 for none
  bool finite;   // known to hold neither NaN nor infinity
};

// A window as the kernels want it: lower, inner_lower, inner_upper, upper. Where a tile lies wholly on one side of a
// place's index, comparing a finite similarity with one number tells whether an entry is at or above the place.
struct Limits {
  alignas(16) float from[4];    // that number for keys from the place's index on
  alignas(16) float before[4];  // and for the keys before it
  alignas(16) uint32_t index[4];
  int32_t key[4];

  Limits() = default;
  explicit Limits(const Window& window);
};

// Entries of a tile, in ascending position. The memory is its owner's, with room for kTile + kSlack.
struct Members {
  int count = 0;
  float* value = nullptr;
  int32_t* position = nullptr;  // in the tile
};

struct MemberBuffer : Members {
  MemberBuffer() : Members{0, values, positions} {}
  MemberBuffer(const MemberBuffer&) = delete;

  alignas(64) float values[kTile + kSlack];
  alignas(64) int32_t positions[kTile + kSlack];
};

// Lists of members of several queries, in the same tile. Each begins at a multiple of kMaxLanes. Up to the next follow
// entries of similarity -inf, of which there is at least one, the first at the position kNoPosition.
constexpr int kMaxLists = kBatch * kMaxGroup;
constexpr int32_t kNoPosition = std::numeric_limits<int32_t>::max();
struct MemberLists {
  float* value = nullptr;
  int32_t* position = nullptr;
  int count = 0;                 // lists
  int begin[kMaxLists + 1] = {}; // and the end of the last
  float shift[kMaxLists];
  float* weighted[kMaxLists];    // where the weighted sum of a query goes
};

struct TileKernels {
  const char* name;
  int group;  // queries per group

  void (*from_float16)(const uint16_t* from, int64_t count, float* to);
  void (*from_bfloat16)(const uint16_t* from, int64_t count, float* to);

  // panel: the keys as the product wants them, zeros from `count` to a whole panel.
  // keys[i * key_stride + c * channel_stride]. Returns the largest magnitude, NaN if any is NaN.
  float (*pack_keys)(const float* keys, int64_t key_stride, int64_t channel_stride, int count, int64_t channels,
                     float* panel);
  // out[c * group + g] = queries[g][c], zeros for absent queries.
  float (*pack_queries)(const float* queries, int64_t stride, int count, int64_t channels, float* out);
  // rows[k * channels + c] = keys[k * key_stride + c * channel_stride]
  void (*copy_rows)(const float* keys, int64_t key_stride, int64_t channel_stride, int count, int64_t channels,
                    float* rows);
  // similarity[g * kTile + k] for the queries of some consecutive groups and the `count` keys of a panel.
  // Meanwhile brings the bytes from `ahead` on into the second-level cache.
  void (*similarities)(const float* queries, int groups, const float* panel, int count, int64_t channels,
                       float* similarity, const char* ahead, int64_t ahead_bytes);

  // Sorts a row's entries by its window. Returns how many are at or above window.lower.
  int (*split)(const RowTile& row, const Limits& limits, Members& certain, Members& undecided);
  // As split for finite similarities, but leaves the certain members in place: masked[k] is their similarity, -inf for
  // all others. Also tells how many they are and the largest of them.
  int (*mask)(const RowTile& row, const Limits& limits, float* masked, int* certain, float* largest,
              Members& undecided);

  // Of entries set apart by split or mask, those in [lower, upper). Reads up to kSlack entries past the end.
  void (*filter)(const float* similarity, const uint16_t* position, int count, uint32_t first_key, Place lower,
                 Place upper, Members& members);

  // Largest value, NaN if any is NaN, -inf if none.
  float (*maximum)(const float* values, int count);
  // values = exp((values - shift) * scale), added to lane_sums[kMaxLanes], one sum for each vector lane.
  // May overwrite kSlack floats past the end.
  void (*exponentials)(float* values, int count, float shift, float scale, float* lane_sums);
  // sum[c] += sum over i of weights[i] * rows[positions[i] * stride + c]
  void (*weighted_sum)(const float* weights, const int32_t* positions, int count, const float* rows, int64_t stride,
                       int64_t channels, float* sum);
  // The same two for lists, by each list's shift: lane_sums[list * kMaxLanes + lane] are set, the weighted sums added to,
  // key_step keys at a time for all lists before the next keys follow.
  void (*list_exponentials)(const MemberLists& lists, float scale, float* lane_sums);
  void (*list_weighted_sums)(const MemberLists& lists, const float* rows, int64_t stride, int64_t channels, int count,
                             int key_step);
  // weighted_sum for a whole group, with all of `count` keys: sum[g * channels + c] over weights[g * kTile + k]
  void (*group_weighted_sum)(const float* weights, int count, const float* rows, int64_t stride, int64_t channels,
                             float* sum);
  // rows[positions[i] * channels + c] += weights[i] * query[c]
  void (*scatter)(const float* weights, const int32_t* positions, int count, const float* query, int64_t channels,
                  float* rows);

  // Reads and writes up to kSlack elements past the end.
  void (*order_keys)(const float* similarity, int64_t count, int32_t* keys);
  // Position of the entry with the given rank in the order of (key, position), which is likely to have a key between the
  // hints. Reads up to kSlack keys past the end.
  int64_t (*select)(const int32_t* keys, int64_t count, int64_t rank, int32_t low_hint, int32_t high_hint);
  // For each of some ascending ranks a place at or before the entry with that rank and one behind it, with less than
  // `tolerance` other entries between; none between where many keys are equal. indices ascend.
  void (*places_near)(const int32_t* keys, const uint32_t* indices, int64_t count, const int64_t* ranks,
                      int64_t num_ranks, int64_t tolerance, Place* before, Place* after);
};

const TileKernels& tile_kernels();

}  // namespace iecl_fast::ring
