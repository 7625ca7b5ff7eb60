// Runs the threads of a grid as fibres, from barrier to barrier. See simt.h; memory.cpp watches what they read and write.
//
// Compiled without sanitizers, linked with device code that is compiled with them. A fault is noted and control leaves
// the fibre for good: nothing is thrown on a fibre's stack.

#undef _FORTIFY_SOURCE  // it forbids longjmp between stacks

#include "simt/block.h"

#include <ucontext.h>

#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

Counters counters;
uint64_t seed = 0;

std::vector<Thread> threads;
Warp warps[kMostThreads / warpSize];  // in the module, where device code may read the values
uint32_t epoch;
Thread* current;

std::string text(dim3 index) {
  return "(" + std::to_string(index.x) + "," + std::to_string(index.y) + "," + std::to_string(index.z) + ")";
}
std::string text(const char* file, unsigned line) { return std::string(file) + ":" + std::to_string(line); }
static std::string text(const Site& site) { return text(site.file_name(), site.line()); }
static std::string text(const Thread& thread) { return "block " + text(blockIdx) + ", thread " + text(thread.index); }

namespace {

constexpr size_t kMaxDynamicShared = 227 << 10;

int barrier_result;
int alive;  // threads of the block

jmp_buf scheduler;
const std::function<void()>* body;
std::string fault;

[[noreturn]] void leave() {
  current = nullptr;
  _longjmp(scheduler, 1);
}

}  // namespace

void fail(const std::string& message) {
  fault = text(*current) + ": " + message;
  leave();
}

namespace {

void first_entry() {
  (*body)();
  current->status = Status::kDone;
  leave();
}

void resume(Thread& thread) {
  if (_setjmp(scheduler) != 0) return;
  current = &thread;
  threadIdx = thread.index;
  if (thread.started) _longjmp(thread.state, 1);
  thread.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, first_entry, 0);
  setcontext(&context);
}

void wait(Status status, Site site) {
  current->status = status;
  current->site = site;
  if (_setjmp(current->state) == 0) leave();
}

// ---- barriers --------------------------------------------------------------------------------------------------

bool same(const Site& a, const Site& b) {
  return a.line() == b.line() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

const Thread* find(Status status) {
  for (const Thread& thread : threads) {
    if (thread.number < alive && thread.status == status) return &thread;
  }
  return nullptr;
}

void release_warps() {
  for (int number = 0; number < alive; ++number) {
    Thread& thread = threads[number];
    if (thread.status != Status::kAtExchange) continue;
    const int first = number / warpSize * warpSize;
    bool complete = true;
    for (int lane = 0; lane < warpSize; ++lane) {
      if (!(thread.mask >> lane & 1)) continue;
      const Thread* other = first + lane < alive ? &threads[first + lane] : nullptr;
      const bool missing = other == nullptr || other->status == Status::kDone;
      if (missing || (other->status == Status::kAtExchange &&
                      (other->mask != thread.mask || std::strcmp(other->operation, thread.operation) != 0))) {
        fault = text(thread) + ": " + thread.operation + " at " + text(thread.site) + " waits for lane " +
                std::to_string(lane) + ", which " +
                (missing ? std::string("has exited or does not exist")
                         : "is in " + std::string(other->operation) + " at " + text(other->site) + " with other lanes");
        return;
      }
      complete = complete && other->status == Status::kAtExchange;
    }
    if (!complete) continue;
    Warp& warp = warps[number / warpSize];
    warp.epoch += std::strcmp(thread.operation, "__syncwarp") == 0;
    for (int lane = 0; lane < warpSize; ++lane) {
      if (!(threads[number].mask >> lane & 1)) continue;
      warp.values[lane] = threads[first + lane].value;
      threads[first + lane].status = Status::kReady;
    }
  }
}

void release_block() {
  const Thread* waiting = find(Status::kAtBarrier);
  if (waiting == nullptr || find(Status::kReady) != nullptr) return;
  int sum = 0;
  for (int number = 0; number < alive; ++number) {
    const Thread& other = threads[number];
    if (other.status == Status::kAtBarrier && other.barrier == waiting->barrier && same(other.site, waiting->site)) {
      sum += other.predicate != 0;
      continue;
    }
    fault = text(*waiting) + ": divergent barrier at " + text(waiting->site) + ": thread " + text(other.index) +
            (other.status == Status::kDone ? " has exited" : " waits at " + text(other.site));
    return;
  }
  const Barrier kind = waiting->barrier;
  barrier_result = kind == Barrier::kCount ? sum : kind == Barrier::kAnd ? sum == alive : sum > 0;
  ++epoch;
  ++counters.barriers;
  for (int number = 0; number < alive; ++number) threads[number].status = Status::kReady;
}

void run_block(std::mt19937_64& random, dim3 block, size_t shared_bytes) {
  int number = 0;
  for (unsigned z = 0; z < block.z; ++z) {
    for (unsigned y = 0; y < block.y; ++y) {
      for (unsigned x = 0; x < block.x; ++x, ++number) {
        threads[number].status = Status::kReady;
        threads[number].started = false;
        threads[number].index = {x, y, z};
        threads[number].number = number;
      }
    }
  }
  alive = number;
  ++epoch;
  for (Warp& warp : warps) warp.epoch = 0;
  poison_shared_memory(shared_bytes);

  std::vector<int> order(alive);
  std::iota(order.begin(), order.end(), 0);
  while (find(Status::kReady) != nullptr) {
    std::shuffle(order.begin(), order.end(), random);
    for (int i : order) {
      if (threads[i].status == Status::kReady) resume(threads[i]);
      if (!fault.empty()) return;
    }
    release_warps();
    if (fault.empty()) release_block();
    if (!fault.empty()) return;
  }
}

}  // namespace

// ---- what simt.h declares --------------------------------------------------------------------------------------

void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread) {
  const uint64_t size = uint64_t(block.x) * block.y * block.z;
  const auto fits = [](unsigned value, unsigned limit) { return 0 < value && value <= limit; };
  const bool grid_fits = fits(grid.x, 0x7fffffffu) && fits(grid.y, 65535) && fits(grid.z, 65535);
  if (!grid_fits || size == 0 || size > kMostThreads || block.z > 64 || shared_bytes > kMaxDynamicShared) {
    throw std::runtime_error("invalid launch: grid " + text(grid) + ", block " + text(block) + ", " +
                             std::to_string(shared_bytes) + " bytes of shared memory");
  }
  while (threads.size() < size) threads.emplace_back();
  gridDim = grid;
  blockDim = block;
  body = &thread;
  fault.clear();
  arguments_lie_from(__builtin_frame_address(0));
  ++counters.launches;
  std::mt19937_64 random(seed);
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        run_block(random, block, shared_bytes);
        if (!fault.empty()) throw std::runtime_error(fault);
      }
    }
  }
}

int block_barrier(Barrier kind, int predicate, Site site) {
  current->barrier = kind;
  current->predicate = predicate;
  wait(Status::kAtBarrier, site);
  return barrier_result;
}

unsigned lane() { return current->number % warpSize; }

const uint64_t* exchange(const char* operation, uint32_t mask, uint64_t value, Site site) {
  if (!(mask >> lane() & 1)) fail(std::string(operation) + " at " + text(site) + " with a mask without its own lane");
  current->operation = operation;
  current->mask = mask;
  current->value = value;
  wait(Status::kAtExchange, site);
  return warps[current->number / warpSize].values;
}

void fail_lane(const char* operation, int lane, Site site) {
  fail(std::string(operation) + " at " + text(site) + " reads lane " + std::to_string(lane) +
       ", which is not in its mask");
}

}  // namespace simt
