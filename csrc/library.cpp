// Operator schemas and CPU implementations: tensors in, plain pointers on to the kernels. With library_cuda.cu the only
// file that sees torch, and only its stable ABI.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <numeric>
#include <optional>
#include <tuple>

#include "library_saib.h"
#include "library_spectral.h"
#include "ring/ring.h"

namespace {

using iecl_fast::data;
using iecl_fast::make;
using iecl_fast::Matrix;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Tasks are handed out one by one, so that a thread which is slowed down does not hold up the others.
void parallel_for(int64_t count, const std::function<void(int64_t)>& run) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(count, torch::stable::get_num_threads());
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) {
      for (int64_t task; (task = next.fetch_add(1)) < count;) run(task);
    }
  });
}

Matrix matrix(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.dim() == 2, name, " has to be a matrix on the CPU");
  return iecl_fast::matrix_of(tensor, name);
}

template <class Element>
const Element* array(const Tensor& tensor, ScalarType dtype, int64_t count, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == dtype && tensor.is_contiguous() && tensor.numel() == count,
                  name, " has the wrong device, dtype, layout or size");
  return static_cast<const Element*>(tensor.const_data_ptr());
}

// ---- ring ------------------------------------------------------------------------------------------------------

// ranks: lower and upper of all keys, then of all but the excluded one.
iecl_fast::ring::Problem ring_problem(const Tensor& query, const Tensor& keys, const std::vector<int64_t>& ranks,
                                      const std::optional<Tensor>& exclude) {
  const Matrix queries = matrix(query, "query"), all_keys = matrix(keys, "keys");
  STD_TORCH_CHECK(queries.columns == all_keys.columns, "query and keys have different numbers of channels");
  STD_TORCH_CHECK(all_keys.rows < (int64_t{1} << 32) - 1, "more than 2^32 - 2 keys");
  STD_TORCH_CHECK(ranks.size() == 4 && 0 <= ranks[0] && ranks[0] <= ranks[1] && ranks[1] <= all_keys.rows &&
                      0 <= ranks[2] && ranks[2] <= ranks[3] && ranks[3] < std::max<int64_t>(all_keys.rows, 1),
                  "ranks have to be two ascending pairs within the number of keys");
  const int64_t* excluded = nullptr;
  if (exclude.has_value()) {
    excluded = array<int64_t>(*exclude, ScalarType::Long, queries.rows, "exclude");
    for (int64_t row = 0; row < queries.rows; ++row) {
      STD_TORCH_CHECK(excluded[row] >= -1 && excluded[row] < all_keys.rows, "exclude[", row, "] = ", excluded[row],
                      " is not allowed: -1 for none, or 0 .. ", all_keys.rows - 1);
    }
  }
  return {queries, all_keys, {ranks[0], ranks[1]}, {ranks[2], ranks[3]}, excluded};
}

std::tuple<Tensor, Tensor> ring_sample(const Tensor& query, const Tensor& keys, std::vector<int64_t> ranks,
                                       const std::optional<Tensor>& exclude, const std::optional<Tensor>& uniform,
                                       bool with_indices) {
  const auto problem = ring_problem(query, keys, ranks, exclude);
  const int64_t rows = problem.query.rows;
  const auto size = [&](int64_t row) { return problem.range(row).upper - problem.range(row).lower; };
  // Without queries the result has the width that it would have with some.
  const auto common = rows > 0 ? problem.range(0) : exclude.has_value() ? problem.ranks_of_rest : problem.ranks;
  const int64_t count = uniform.has_value() ? uniform->size(1) : common.upper - common.lower;
  Tensor similarities = make(query, {rows, count}, ScalarType::Float);
  Tensor indices = make(query, {with_indices ? rows : 0, count}, ScalarType::Long);
  int64_t* to_indices = with_indices ? data<int64_t>(indices) : nullptr;
  if (uniform.has_value()) {
    const double* numbers = array<double>(*uniform, ScalarType::Double, rows * count, "uniform");
    iecl_fast::ring::draw_cpu(problem, numbers, count, data<float>(similarities), to_indices, parallel_for);
  } else {
    for (int64_t row = 0; row < rows; ++row) STD_TORCH_CHECK(size(row) == count, "rings of different sizes");
    iecl_fast::ring::sample_cpu(problem, count, data<float>(similarities), to_indices, parallel_for);
  }
  return {similarities, indices};
}

Tensor ring_sample_query_gradient(const Tensor& gradient, const Tensor& indices, const Tensor& keys) {
  const int64_t rows = indices.size(0), count = indices.size(1);
  const Matrix all_keys = matrix(keys, "keys");
  Tensor result = make(keys, {rows, all_keys.columns}, ScalarType::Float);
  iecl_fast::ring::sample_query_gradient_cpu(array<float>(gradient, ScalarType::Float, rows * count, "gradient"),
                                             array<int64_t>(indices, ScalarType::Long, rows * count, "indices"), count,
                                             all_keys, rows, data<float>(result), parallel_for);
  return result;
}

Tensor ring_sample_keys_gradient(const Tensor& gradient, const Tensor& indices, const Tensor& query, int64_t num_keys) {
  const Matrix queries = matrix(query, "query");
  const int64_t rows = queries.rows, count = indices.size(1);
  Tensor result = make(query, {num_keys, queries.columns}, ScalarType::Float);
  iecl_fast::ring::sample_keys_gradient_cpu(array<float>(gradient, ScalarType::Float, rows * count, "gradient"),
                                            array<int64_t>(indices, ScalarType::Long, rows * count, "indices"), count,
                                            queries, num_keys, data<float>(result), parallel_for);
  return result;
}

std::tuple<Tensor, Tensor, Tensor> ring_info_nce(const Tensor& query, const Tensor& positive_key, const Tensor& keys,
                                                 std::vector<int64_t> ranks, double temperature,
                                                 const std::optional<Tensor>& exclude, bool with_gradient) {
  const auto problem = ring_problem(query, keys, ranks, exclude);
  const Matrix positive = matrix(positive_key, "positive_key");
  const int64_t rows = problem.query.rows, channels = problem.query.columns;
  STD_TORCH_CHECK(positive.rows == rows && positive.columns == channels, "positive_key has another shape than query");
  Tensor loss = make(query, {rows}, ScalarType::Float);
  Tensor log_denominator = make(query, {rows}, ScalarType::Double);
  Tensor query_gradient = make(query, {with_gradient ? rows : 0, channels}, ScalarType::Float);
  iecl_fast::ring::info_nce_cpu(problem, positive, temperature, data<float>(loss), data<double>(log_denominator),
                                with_gradient ? data<float>(query_gradient) : nullptr, parallel_for);
  return {loss, log_denominator, query_gradient};
}

Tensor ring_info_nce_keys_gradient(const Tensor& query, const Tensor& keys, std::vector<int64_t> ranks,
                                   double temperature, const std::optional<Tensor>& exclude,
                                   const Tensor& log_denominator, const Tensor& loss_gradient) {
  const auto problem = ring_problem(query, keys, ranks, exclude);
  const int64_t rows = problem.query.rows;
  Tensor result = make(keys, {problem.keys.rows, problem.keys.columns}, ScalarType::Float);
  iecl_fast::ring::info_nce_keys_gradient_cpu(
      problem, temperature, array<double>(log_denominator, ScalarType::Double, rows, "log_denominator"),
      array<float>(loss_gradient, ScalarType::Float, rows, "loss_gradient"), data<float>(result), parallel_for);
  return result;
}

// ---- ring, one shard of the keys -------------------------------------------------------------------------------

// The same with ranks (N, 2), lower and upper for each query. An empty ring is allowed.
iecl_fast::ring::Problem shard_problem(const Tensor& query, const Tensor& keys, const Tensor& ranks,
                                       const std::optional<Tensor>& exclude) {
  auto problem = ring_problem(query, keys, {0, 0, 0, 0}, exclude);
  const int64_t rows = problem.query.rows;
  problem.row_ranks =
      reinterpret_cast<const iecl_fast::ring::RankRange*>(array<int64_t>(ranks, ScalarType::Long, 2 * rows, "ranks"));
  for (int64_t row = 0; row < rows; ++row) {
    const auto [lower, upper] = problem.row_ranks[row];
    const int64_t candidates = problem.keys.rows - (problem.excludes_one(row) ? 1 : 0);
    STD_TORCH_CHECK(0 <= lower && lower <= upper && upper <= candidates, "ranks[", row, "] = ", lower, ", ", upper,
                    " do not ascend within 0 .. ", candidates);
    problem.ranks.lower += lower;
    problem.ranks.upper += upper;
  }
  problem.ranks.lower /= std::max<int64_t>(rows, 1);
  problem.ranks.upper /= std::max<int64_t>(rows, 1);
  return problem;
}

Tensor ring_shard_sample(const Tensor& query, const Tensor& keys, int64_t size) {
  const auto problem = ring_problem(query, keys, {0, 0, 0, 0}, std::nullopt);
  STD_TORCH_CHECK(0 <= size && size <= problem.keys.rows, "a sample of ", size, " of ", problem.keys.rows, " keys");
  Tensor similarities = make(query, {problem.query.rows, size}, ScalarType::Float);
  iecl_fast::ring::shard_sample_cpu(problem.query, problem.keys, size, data<float>(similarities), parallel_for);
  return similarities;
}

std::tuple<Tensor, Tensor, Tensor> ring_shard_windows(const Tensor& query, const Tensor& keys,
                                                      const std::optional<Tensor>& exclude, const Tensor& centers,
                                                      int64_t size, double deviations) {
  const auto problem = ring_problem(query, keys, {0, 0, 0, 0}, exclude);
  const int64_t rows = problem.query.rows;
  STD_TORCH_CHECK(0 <= size && size <= problem.keys.rows, "a sample of ", size, " of ", problem.keys.rows, " keys");
  const int64_t* places = array<int64_t>(centers, ScalarType::Long, 2 * rows, "centers");
  for (int64_t i = 0; i < 2 * rows; ++i) {
    STD_TORCH_CHECK(places[i] >= -1 && places[i] <= size, "centers contain ", places[i], ": -1 .. ", size, " is allowed");
  }
  const auto windows = iecl_fast::ring::shard_windows_cpu(problem, places, size, deviations, parallel_for);
  Tensor below = make(query, {rows, 2}, ScalarType::Long), counts = make(query, {rows, 2}, ScalarType::Long);
  Tensor order_keys = make(query, {static_cast<int64_t>(windows.order_keys.size())}, ScalarType::Int);
  std::copy(windows.below.begin(), windows.below.end(), data<int64_t>(below));
  std::copy(windows.counts.begin(), windows.counts.end(), data<int64_t>(counts));
  std::copy(windows.order_keys.begin(), windows.order_keys.end(), data<int32_t>(order_keys));
  return {below, counts, order_keys};
}

Tensor ring_order_histogram(const Tensor& order_keys, const Tensor& counts, const Tensor& low, int64_t shift) {
  const int64_t lists = low.size(0), ranges = low.size(1);
  const int64_t* sizes = array<int64_t>(counts, ScalarType::Long, lists, "counts");
  const int64_t total = std::accumulate(sizes, sizes + lists, int64_t{0});
  STD_TORCH_CHECK(0 <= shift && shift < 32, "shift = ", shift, " is not allowed: 0 .. 31");
  Tensor histogram = make(low, {lists, ranges, iecl_fast::ring::kBins}, ScalarType::Int);
  iecl_fast::ring::order_histogram_cpu(array<int32_t>(order_keys, ScalarType::Int, total, "order_keys"), sizes, lists,
                                       array<int64_t>(low, ScalarType::Long, lists * ranges, "low"), ranges,
                                       static_cast<int>(shift), data<int32_t>(histogram), parallel_for);
  return histogram;
}

std::tuple<Tensor, Tensor> ring_shard_sums(const Tensor& query, const Tensor& keys, const Tensor& ranks,
                                           const std::optional<Tensor>& exclude, double temperature, bool with_keys) {
  const auto problem = shard_problem(query, keys, ranks, exclude);
  const int64_t rows = problem.query.rows;
  Tensor log_sum = make(query, {rows}, ScalarType::Double);
  Tensor mean_key = make(query, {with_keys ? rows : 0, problem.query.columns}, ScalarType::Float);
  iecl_fast::ring::ring_sums_cpu(problem, temperature, data<double>(log_sum),
                                 with_keys ? data<float>(mean_key) : nullptr, parallel_for);
  return {log_sum, mean_key};
}

std::tuple<Tensor, Tensor> ring_shard_draw(const Tensor& query, const Tensor& keys, const Tensor& ranks,
                                           const std::optional<Tensor>& exclude, const Tensor& uniform) {
  const auto problem = shard_problem(query, keys, ranks, exclude);
  const int64_t rows = problem.query.rows, count = uniform.size(1);
  const double* numbers = array<double>(uniform, ScalarType::Double, rows * count, "uniform");
  Tensor similarities = make(query, {rows, count}, ScalarType::Float);
  Tensor indices = make(query, {rows, count}, ScalarType::Long);
  iecl_fast::ring::draw_cpu(problem, numbers, count, data<float>(similarities), data<int64_t>(indices), parallel_for);
  return {similarities, indices};
}

// ---- spectral --------------------------------------------------------------------------------------------------

std::tuple<std::vector<Tensor>, Tensor, Tensor> spectral_norm(std::vector<Tensor> weights, const Tensor& vectors,
                                                              int64_t iterations, double eps, bool divide) {
  const auto run = [&](const auto& layers, float* new_vectors, float* sigma, void* const* normalised) {
    iecl_fast::spectral::norm_cpu(layers, iterations, eps, new_vectors, sigma, normalised, parallel_for);
  };
  return iecl_fast::spectral::norm(weights, vectors, divide, run);
}

std::vector<Tensor> spectral_norm_gradient(std::vector<Tensor> gradients, std::vector<Tensor> weights,
                                           const Tensor& vectors, const Tensor& sigma) {
  const auto run = [](const auto&... arguments) {
    iecl_fast::spectral::norm_gradient_cpu(arguments..., parallel_for);
  };
  return iecl_fast::spectral::norm_gradient(gradients, weights, vectors, sigma, run);
}

// ---- saib ------------------------------------------------------------------------------------------------------

Tensor saib_gather(const Tensor& image, const std::optional<Tensor>& position, int64_t size, bool channels_are_batch,
                   int64_t begin, int64_t end) {
  return iecl_fast::saib::gather(image, position, size, channels_are_batch, begin, end, parallel_for);
}

void saib_scatter(const Tensor& image, const std::optional<Tensor>& position, const Tensor& features, int64_t size,
                  bool channels_are_batch, int64_t begin, int64_t end, Tensor result) {
  iecl_fast::saib::scatter(image, position, features, size, channels_are_batch, begin, end, result, parallel_for);
}

void saib_tiles_of_features(const Tensor& features, int64_t frequency, int64_t begin, int64_t end, Tensor tiles) {
  iecl_fast::saib::tiles_of(features, frequency, begin, end, tiles, [](const auto&... arguments) {
    iecl_fast::saib::tiles_of_features_cpu(arguments..., parallel_for);
  });
}

void saib_tiles_of_gradients(const Tensor& gradients, int64_t frequency, int64_t begin, int64_t end, Tensor tiles) {
  iecl_fast::saib::tiles_of(gradients, frequency, begin, end, tiles, [](const auto&... arguments) {
    iecl_fast::saib::tiles_of_gradients_cpu(arguments..., parallel_for);
  });
}

void saib_add_to_results(const Tensor& tiles, int64_t frequency, int64_t begin, int64_t end, bool relu,
                         Tensor results) {
  iecl_fast::saib::add_tiles(tiles, frequency, begin, end, relu, results, parallel_for);
}

std::string instruction_set() { return iecl_fast::ring::instruction_set(); }

}  // namespace

// Operators with a leading underscore are the CPU's share; iecl_fast/ring/ops.py puts them behind the public ones.
STABLE_TORCH_LIBRARY(iecl_fast, m) {
  m.def("_ring_sample_cpu(Tensor query, Tensor keys, int[] ranks, Tensor? exclude, Tensor? uniform, "
        "bool with_indices) -> (Tensor, Tensor)");
  m.def("_ring_sample_query_gradient_cpu(Tensor gradient, Tensor indices, Tensor keys) -> Tensor");
  m.def("_ring_sample_keys_gradient_cpu(Tensor gradient, Tensor indices, Tensor query, int num_keys) -> Tensor");
  m.def("_ring_info_nce_cpu(Tensor query, Tensor positive_key, Tensor keys, int[] ranks, float temperature, "
        "Tensor? exclude, bool with_gradient) -> (Tensor, Tensor, Tensor)");
  m.def("_ring_info_nce_keys_gradient_cpu(Tensor query, Tensor keys, int[] ranks, float temperature, Tensor? exclude, "
        "Tensor log_denominator, Tensor loss_gradient) -> Tensor");
  m.def("_ring_shard_sample_cpu(Tensor query, Tensor keys, int size) -> Tensor");
  m.def("_ring_shard_windows_cpu(Tensor query, Tensor keys, Tensor? exclude, Tensor centers, int size, "
        "float deviations) -> (Tensor, Tensor, Tensor)");
  m.def("_ring_order_histogram_cpu(Tensor order_keys, Tensor counts, Tensor low, int shift) -> Tensor");
  m.def("_ring_shard_sums_cpu(Tensor query, Tensor keys, Tensor ranks, Tensor? exclude, float temperature, "
        "bool with_keys) -> (Tensor, Tensor)");
  m.def("_ring_shard_draw_cpu(Tensor query, Tensor keys, Tensor ranks, Tensor? exclude, Tensor uniform) "
        "-> (Tensor, Tensor)");
  m.def("_spectral_norm_cpu(Tensor[] weights, Tensor vectors, int iterations, float eps, bool divide) "
        "-> (Tensor[], Tensor, Tensor)");
  m.def("_spectral_norm_gradient_cpu(Tensor[] gradients, Tensor[] weights, Tensor vectors, Tensor sigma) -> Tensor[]");
  m.def("_saib_gather(Tensor image, Tensor? position, int size, bool channels_are_batch, int begin, int end) -> Tensor");
  m.def("_saib_scatter(Tensor image, Tensor? position, Tensor features, int size, bool channels_are_batch, int begin, "
        "int end, Tensor(a!) result) -> ()");
  m.def("_saib_tiles_of_features(Tensor features, int frequency, int begin, int end, Tensor(a!) tiles) -> ()");
  m.def("_saib_tiles_of_gradients(Tensor gradients, int frequency, int begin, int end, Tensor(a!) tiles) -> ()");
  m.def("_saib_add_to_results(Tensor tiles, int frequency, int begin, int end, bool relu, Tensor(a!) results) -> ()");
  m.def("_instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(iecl_fast, CPU, m) {
  m.impl("_ring_sample_cpu", TORCH_BOX(&ring_sample));
  m.impl("_ring_sample_query_gradient_cpu", TORCH_BOX(&ring_sample_query_gradient));
  m.impl("_ring_sample_keys_gradient_cpu", TORCH_BOX(&ring_sample_keys_gradient));
  m.impl("_ring_info_nce_cpu", TORCH_BOX(&ring_info_nce));
  m.impl("_ring_info_nce_keys_gradient_cpu", TORCH_BOX(&ring_info_nce_keys_gradient));
  m.impl("_ring_shard_sample_cpu", TORCH_BOX(&ring_shard_sample));
  m.impl("_ring_shard_windows_cpu", TORCH_BOX(&ring_shard_windows));
  m.impl("_ring_order_histogram_cpu", TORCH_BOX(&ring_order_histogram));
  m.impl("_ring_shard_sums_cpu", TORCH_BOX(&ring_shard_sums));
  m.impl("_ring_shard_draw_cpu", TORCH_BOX(&ring_shard_draw));
  m.impl("_spectral_norm_cpu", TORCH_BOX(&spectral_norm));
  m.impl("_spectral_norm_gradient_cpu", TORCH_BOX(&spectral_norm_gradient));
  m.impl("_saib_gather", TORCH_BOX(&saib_gather));
  m.impl("_saib_scatter", TORCH_BOX(&saib_scatter));
  m.impl("_saib_tiles_of_features", TORCH_BOX(&saib_tiles_of_features));
  m.impl("_saib_tiles_of_gradients", TORCH_BOX(&saib_tiles_of_gradients));
  m.impl("_saib_add_to_results", TORCH_BOX(&saib_add_to_results));
}

STABLE_TORCH_LIBRARY_IMPL(iecl_fast, CompositeImplicitAutograd, m) { m.impl("_instruction_set", TORCH_BOX(&instruction_set)); }
