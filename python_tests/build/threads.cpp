// Every kernel of the CPU on one thread and on four, for ThreadSanitizer: the same bits, and no access unordered.
//
// The kernels ask a ParallelFor for threads; here it starts std::threads, which the sanitizer sees in full. Those of
// OpenMP, which PyTorch uses, it does not: their barriers are no calls that it knows, and all would be called a race.
// With the argument "race" two threads count in one variable, which the sanitizer has to notice.

#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ring/ring.h"
#include "saib/saib.h"
#include "spectral/spectral.h"

namespace {

using iecl_fast::Dtype;
using iecl_fast::Matrix;
using Run = std::function<void(int64_t)>;

// Each thread has its tasks from the start: taking them from a common counter would put them in an order.
void on_threads(int64_t threads, int64_t count, const Run& run) {
  std::vector<std::thread> workers;
  for (int64_t i = 0; i < threads; ++i) {
    workers.emplace_back([&run, i, threads, count] {
      for (int64_t task = i; task < count; task += threads) run(task);
    });
  }
  for (std::thread& worker : workers) worker.join();
}
void alone(int64_t count, const Run& run) { on_threads(1, count, run); }
void together(int64_t count, const Run& run) { on_threads(4, count, run); }

std::vector<float> normal(int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> draw;
  std::vector<float> values(count);
  for (float& value : values) value = draw(generator);
  return values;
}

// All results of a kernel, one after the other.
using Results = std::vector<float>;

void add(Results& all, const std::vector<float>& some) { all.insert(all.end(), some.begin(), some.end()); }

Results ring(iecl_fast::ParallelFor parallel, int64_t k, bool narrow) {
  constexpr int64_t n = 21, c = 12;
  const std::vector<float> query = normal(n * c, 1), keys = normal(k * c, 2), positive = normal(n * c, 3);
  std::vector<int64_t> exclude(n);
  for (int64_t row = 0; row < n; ++row) exclude[row] = row % 3 == 0 ? -1 : row * 7 % k;
  const int64_t lower = narrow ? k * 9 / 10 : k / 10, upper = narrow ? k * 99 / 100 : k * 8 / 10;
  const auto matrix = [](const std::vector<float>& values, int64_t rows) {
    return Matrix{values.data(), Dtype::kFloat32, rows, c, c, 1};
  };
  const iecl_fast::ring::Problem problem{
      matrix(query, n), matrix(keys, k), {lower, upper}, {lower, upper}, exclude.data()};
  const int64_t m = upper - lower, draws = 50;
  std::vector<int64_t> indices(n * m);
  Results all(n * m);
  iecl_fast::ring::sample_cpu(problem, m, all.data(), indices.data(), parallel);
  for (const int64_t index : indices) all.push_back(static_cast<float>(index));

  std::vector<double> uniform(n * draws);
  for (int64_t i = 0; i < n * draws; ++i) uniform[i] = double(i * 37 % 1000) / 1000.0;
  std::vector<float> drawn(n * draws);
  std::vector<int64_t> places(n * draws);
  iecl_fast::ring::draw_cpu(problem, uniform.data(), draws, drawn.data(), places.data(), parallel);
  add(all, drawn);

  std::vector<float> loss(n), query_gradient(n * c), keys_gradient(k * c);
  std::vector<double> log_denominator(n);
  iecl_fast::ring::info_nce_cpu(problem, matrix(positive, n), 0.5, loss.data(), log_denominator.data(),
                                query_gradient.data(), parallel);
  iecl_fast::ring::info_nce_keys_gradient_cpu(problem, 0.5, log_denominator.data(), loss.data(), keys_gradient.data(),
                                              parallel);
  for (const auto* some : {&loss, &query_gradient, &keys_gradient}) add(all, *some);

  iecl_fast::ring::sample_query_gradient_cpu(drawn.data(), places.data(), draws, matrix(keys, k), n,
                                             query_gradient.data(), parallel);
  iecl_fast::ring::sample_keys_gradient_cpu(drawn.data(), places.data(), draws, matrix(query, n), k,
                                            keys_gradient.data(), parallel);
  add(all, query_gradient);
  add(all, keys_gradient);
  return all;
}

Results spectral(iecl_fast::ParallelFor parallel) {
  const std::vector<std::pair<int64_t, int64_t>> shapes{{5, 40}, {600, 700}, {1, 1}, {64, 27}, {300, 1000}};
  std::vector<std::vector<float>> weights, outputs, gradients;
  std::vector<iecl_fast::spectral::Layer> layers;
  Results vectors;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto [rows, columns] = shapes[i];
    weights.push_back(normal(rows * columns, 10 + unsigned(i)));
    outputs.emplace_back(rows * columns);
    gradients.emplace_back(rows * columns);
    add(vectors, normal(rows + columns, 20 + unsigned(i)));
  }
  std::vector<void*> to, to_gradients;
  std::vector<const void*> slopes;
  for (size_t i = 0; i < shapes.size(); ++i) {
    layers.push_back({weights[i].data(), Dtype::kFloat32, shapes[i].first, shapes[i].second, shapes[i].second});
    to.push_back(outputs[i].data());
    slopes.push_back(weights[i].data());
    to_gradients.push_back(gradients[i].data());
  }
  std::vector<float> sigma(shapes.size());
  iecl_fast::spectral::norm_cpu(layers, 3, 1e-12, vectors.data(), sigma.data(), to.data(), parallel);
  iecl_fast::spectral::norm_gradient_cpu(layers, slopes.data(), vectors.data(), sigma.data(), to_gradients.data(),
                                         parallel);
  Results all = vectors;
  add(all, sigma);
  for (size_t i = 0; i < shapes.size(); ++i) {
    add(all, outputs[i]);
    add(all, gradients[i]);
  }
  return all;
}

Results saib(iecl_fast::ParallelFor parallel, bool channels_are_batch) {
  constexpr int64_t n = 6, channels = 3, side = 12, size = 4;
  const std::vector<float> image = normal(n * channels * side * side, 30);
  const std::vector<float> position = normal(channels * side * side, 31);
  const iecl_fast::saib::Patches patches{n,    channels, side, side, channels * side * side, side * side, side,
                                         1,    size,     channels_are_batch};
  std::vector<float> features(image.size()), result(image.size());
  iecl_fast::saib::gather_cpu(patches, image.data(), position.data(), 0, patches.bands(), features.data(), parallel);
  iecl_fast::saib::scatter_cpu(patches, image.data(), position.data(), features.data(), 0, patches.bands(), patches,
                               result.data(), parallel);
  Results all = features;
  add(all, result);

  const iecl_fast::saib::Grid grid{2, 7, 9, 20};
  const std::vector<float> pixels = normal(2 * 7 * 9 * 20, 32);
  const int64_t rows = grid.images * grid.tile_rows();
  std::vector<float> tiles(4 * rows * grid.tile_columns() * grid.channels), results(pixels.size());
  for (int frequency = 0; frequency < 4; ++frequency) {
    iecl_fast::saib::tiles_of_gradients_cpu(grid, pixels.data(), frequency, 0, rows, tiles.data(), parallel);
    add(all, tiles);
    iecl_fast::saib::tiles_of_features_cpu(grid, pixels.data(), frequency, 0, rows, tiles.data(), parallel);
    iecl_fast::saib::add_to_results_cpu(grid, tiles.data(), frequency, 0, rows, true, results.data(), parallel);
  }
  add(all, results);
  return all;
}

bool same(const char* name, const Results& one, const Results& other) {
  const bool equal = one.size() == other.size() && std::memcmp(one.data(), other.data(), one.size() * 4) == 0;
  std::printf("%s: %zu numbers %s\n", name, one.size(), equal ? "equal" : "DIFFER");
  return equal;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && std::string(arguments[1]) == "race") {
    int64_t sum = 0;
    together(8, [&](int64_t task) { sum += task; });
    std::printf("%lld\n", static_cast<long long>(sum));
    return 0;
  }
  bool equal = true;
  for (const int64_t k : {700, 9000}) {
    for (const bool narrow : {true, false}) equal &= same("ring", ring(alone, k, narrow), ring(together, k, narrow));
  }
  equal &= same("spectral", spectral(alone), spectral(together));
  for (const bool batch : {true, false}) equal &= same("saib", saib(alone, batch), saib(together, batch));
  return equal ? 0 : 1;
}
