// The order in which many layers of very different sizes are worked through by several threads.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <numeric>
#include <vector>

#include "spectral/spectral.h"

namespace iecl_fast::spectral {

constexpr int64_t kChunk = int64_t{1} << 17;  // elements of a task: a part of the second-level cache
constexpr int64_t kMaxChunkRows = 256;        // added up one after another, and then the chunks: shorter sums err less

// Rows [begin, end) of a layer. The partition depends on shapes alone, so that results do not depend on threads.
struct Chunk {
  int64_t layer;
  int64_t number;  // in the layer
  int64_t begin;
  int64_t end;
};

inline int64_t chunk_rows(const Layer& layer) {
  return std::clamp<int64_t>(kChunk / layer.columns, 1, kMaxChunkRows);
}
inline int64_t chunk_count(const Layer& layer) {
  return layer.size() == 0 ? 0 : (layer.rows + chunk_rows(layer) - 1) / chunk_rows(layer);
}

// For each layer: `rounds` times reduce(chunk) on all its chunks and then finish(layer), at last map(chunk) on all of
// them. One parallel call: whoever finishes a layer's reduction puts its next chunks in front of the other layers', so
// they are found in a cache, and nobody waits for a layer while there is another one.
template <class Reduce, class Finish, class Map>
void for_layers(const std::vector<Layer>& layers, int64_t rounds, const Reduce& reduce, const Finish& finish,
                const Map& map, ParallelFor parallel) {
  struct Task {
    Chunk chunk;
    int64_t round;
  };
  std::deque<Task> ready;
  std::vector<int64_t> unfinished(layers.size());  // chunks of the layer's round
  int64_t running = 0;
  std::mutex mutex;
  std::condition_variable changed;

  const auto put_in_front = [&](int64_t layer, int64_t round) {
    const int64_t rows = chunk_rows(layers[layer]);
    unfinished[layer] = chunk_count(layers[layer]);
    for (int64_t number = unfinished[layer] - 1; number >= 0; --number) {
      ready.push_front({{layer, number, number * rows, std::min((number + 1) * rows, layers[layer].rows)}, round});
    }
  };
  // Large layers go first: the small ones even out when the threads finish.
  std::vector<int64_t> order(layers.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return layers[a].size() < layers[b].size(); });
  for (int64_t layer : order) {
    if (layers[layer].size() > 0) put_in_front(layer, 0);
  }

  parallel(ready.size(), [&](int64_t) {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return !ready.empty() || running == 0; });
      if (ready.empty()) return;
      const Task task = ready.front();
      ready.pop_front();
      ++running;
      lock.unlock();
      const int64_t layer = task.chunk.layer;
      task.round < rounds ? reduce(task.chunk) : map(task.chunk);
      lock.lock();
      if (--unfinished[layer] == 0 && task.round < rounds) {
        lock.unlock();
        finish(layer);
        lock.lock();
        put_in_front(layer, task.round + 1);
        changed.notify_all();
      }
      if (--running == 0) changed.notify_all();
    }
  });
}

}  // namespace iecl_fast::spectral
