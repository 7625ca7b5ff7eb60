// A workspace's layout, written once for its size and its use.
#pragma once

#include <cstdint>

namespace iecl_fast::ring::gpu {

// Hands out pieces of a workspace, or adds up their sizes if there is none yet.
class Pieces {
 public:
  explicit Pieces(void* workspace) : begin_(static_cast<char*>(workspace)) {}

  template <class T>
  T* take(int64_t count) {
    char* piece = begin_ == nullptr ? nullptr : begin_ + bytes_;
    bytes_ += (count * int64_t(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(piece);
  }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kAlignment = 256;
  char* begin_;
  int64_t bytes_ = 0;
};

}  // namespace iecl_fast::ring::gpu
