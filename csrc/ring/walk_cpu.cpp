#include "ring/walk.h"

#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace iecl_fast::ring {

void* allocate_aligned(int64_t wanted) {
  constexpr size_t kLine = 64, kHugePage = size_t{1} << 21;
  const size_t bytes = std::max<size_t>(wanted, 1);
  const size_t alignment = bytes < kHugePage ? kLine : kHugePage;
  void* data = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (data == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  // Fresh memory costs a page fault every 4 KiB otherwise. A wish: it may fail.
  if (alignment == kHugePage) madvise(data, bytes, MADV_HUGEPAGE);
#endif
  return data;
}

RowReader::RowReader(const Matrix& matrix, int max_rows) : matrix_(matrix), converted_(max_rows * matrix.columns) {}

// count elements from `offset` on, `stride` apart, to consecutive floats.
void RowReader::convert(int64_t offset, int64_t stride, int64_t count, float* to) const {
  if (matrix_.dtype == Dtype::kFloat32) {
    const float* from = static_cast<const float*>(matrix_.data) + offset;
    for (int64_t i = 0; i < count; ++i) to[i] = from[i * stride];
    return;
  }
  const auto expand = matrix_.dtype == Dtype::kFloat16 ? tile_kernels().from_float16 : tile_kernels().from_bfloat16;
  const uint16_t* from = static_cast<const uint16_t*>(matrix_.data) + offset;
  if (stride == 1) {
    expand(from, count, to);
    return;
  }
  constexpr int64_t kBatch = 256;
  uint16_t batch[kBatch];
  for (int64_t begin = 0; begin < count; begin += kBatch) {
    const int64_t here = std::min(kBatch, count - begin);
    for (int64_t i = 0; i < here; ++i) batch[i] = from[(begin + i) * stride];
    expand(batch, here, to + begin);
  }
}

void RowReader::view(int64_t first, int count) {
  const int64_t columns = matrix_.columns;
  const int64_t offset = first * matrix_.row_stride;
  if (matrix_.dtype == Dtype::kFloat32) {
    data_ = static_cast<const float*>(matrix_.data) + offset;
    row_stride_ = matrix_.row_stride;
    column_stride_ = matrix_.column_stride;
    return;
  }
  data_ = converted_.get();
  if (matrix_.row_stride == 1 && matrix_.column_stride != 1) {  // keep the layout: it is read fastest along keys
    row_stride_ = 1;
    column_stride_ = count;
    for (int64_t c = 0; c < columns; ++c) {
      convert(offset + c * matrix_.column_stride, 1, count, converted_.get() + c * count);
    }
  } else {
    row_stride_ = columns;
    column_stride_ = 1;
    for (int64_t row = 0; row < count; ++row) {
      convert(offset + row * matrix_.row_stride, matrix_.column_stride, columns, converted_.get() + row * columns);
    }
  }
}

template <class Index>
void RowReader::gather_rows(const Index* rows, int count) {
  data_ = converted_.get();
  row_stride_ = matrix_.columns;
  column_stride_ = 1;
  for (int i = 0; i < count; ++i) {
    convert(static_cast<int64_t>(rows[i]) * matrix_.row_stride, matrix_.column_stride, matrix_.columns,
            converted_.get() + i * matrix_.columns);
  }
}

void RowReader::gather(const uint32_t* rows, int count) { gather_rows(rows, count); }
void RowReader::gather(const int64_t* rows, int count) { gather_rows(rows, count); }

std::pair<const char*, int64_t> RowReader::bytes(int64_t first, int64_t count) const {
  if (matrix_.column_stride != 1 || matrix_.row_stride != matrix_.columns) return {nullptr, 0};
  const int64_t row = matrix_.columns * (matrix_.dtype == Dtype::kFloat32 ? 4 : 2);
  return {static_cast<const char*>(matrix_.data) + first * row, count * row};
}

QueryBlock::QueryBlock(const Matrix& query, std::vector<int64_t> row_numbers)
    : rows(std::move(row_numbers)), channels(query.columns) {
  const TileKernels& kernels = tile_kernels();
  groups = (size() + kernels.group - 1) / kernels.group;
  packed = AlignedFloats(groups * kernels.group * channels);
  magnitude.resize(groups);
  RowReader reader(query, kernels.group);
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = group * kernels.group;
    const int here = static_cast<int>(std::min<int64_t>(kernels.group, size() - first));
    reader.gather(rows.data() + first, here);
    magnitude[group] = kernels.pack_queries(reader.data(), reader.row_stride(), here, channels,
                                            packed.get() + first * channels);
  }
}

KeyTile::KeyTile(const Matrix& keys, int size)
    : channels_(keys.columns),
      reader_(keys, size),
      panel_(kTile * keys.columns),
      copied_(size * keys.columns) {}

void KeyTile::view(int64_t first_key, int count) {
  reader_.view(first_key, count);
  count_ = count;
  rows_ = {};
}

void KeyTile::load(int64_t first_key, int count) {
  view(first_key, count);
  pack();
}

void KeyTile::gather(const uint32_t* keys, int count) {
  reader_.gather(keys, count);
  count_ = count;
  rows_ = {};
  pack();
}

void KeyTile::pack() {
  magnitude_ = tile_kernels().pack_keys(reader_.data(), reader_.row_stride(), reader_.column_stride(), count_, channels_,
                                        panel_.get());
}

void KeyTile::similarities(const QueryBlock& block, int64_t group, int groups, float* similarity,
                           Ahead ahead) const {
  const TileKernels& kernels = tile_kernels();
  kernels.similarities(block.packed.get() + group * kernels.group * channels_, groups, panel_.get(), count_, channels_,
                       similarity, ahead.begin, ahead.bytes);
}

bool KeyTile::finite(const QueryBlock& block, int64_t group) const {
  // False for NaN. No partial sum can leave the range of float32 when this holds.
  return static_cast<double>(block.magnitude[group]) * magnitude_ * static_cast<double>(channels_) < 1e38;
}

KeyTile::Ahead KeyTile::ahead(int64_t first_key, int count, int64_t share, int64_t shares) const {
  const int64_t begin = count * share / shares, end = count * (share + 1) / shares;
  const auto [memory, bytes] = reader_.bytes(first_key + begin, end - begin);
  return {memory, bytes};
}

KeyTile::Rows KeyTile::rows() {
  if (rows_.data == nullptr && reader_.column_stride() == 1) {
    rows_ = {reader_.data(), reader_.row_stride()};
  } else if (rows_.data == nullptr) {
    tile_kernels().copy_rows(reader_.data(), reader_.row_stride(), reader_.column_stride(), count_, channels_,
                             copied_.get());
    rows_ = {copied_.get(), channels_};
  }
  return rows_;
}

}  // namespace iecl_fast::ring
