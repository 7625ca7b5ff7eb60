// The block that runs: what the two halves of the model, simt.cpp and memory.cpp, know of it together.
#pragma once

#include <setjmp.h>

#include <memory>
#include <string>
#include <vector>

#include "simt/simt.h"

namespace simt {

constexpr size_t kStackBytes = 64 << 10;
constexpr int kMostThreads = 1024;  // of a block

enum class Status { kReady, kAtBarrier, kAtExchange, kDone };

struct Thread {
  Status status;
  dim3 index;
  int number;  // in the block
  jmp_buf state;
  bool started;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  Site site;  // where it waits, and for what
  Barrier barrier;
  int predicate;
  const char* operation;
  uint32_t mask;
  uint64_t value;
};

struct Warp {
  uint64_t values[warpSize];
  uint32_t epoch;  // counts its __syncwarp
};

extern std::vector<Thread> threads;
extern Warp warps[kMostThreads / warpSize];
extern uint32_t epoch;   // counts the barriers of all blocks
extern Thread* current;  // the fibre that runs; nullptr outside kernels

// Ends the fibre that runs, and with it the launch.
[[noreturn]] void fail(const std::string& message);
std::string text(dim3 index);
std::string text(const char* file, unsigned line);

// ---- of memory.cpp ---------------------------------------------------------------------------------------------

// For a new block.
void poison_shared_memory(size_t dynamic_bytes);
// A launch's arguments lie above the frame of the function that runs it.
void arguments_lie_from(const void* frame);

}  // namespace simt
