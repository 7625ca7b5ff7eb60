// Runs the threads of a grid as fibres and watches what they do. See simt.h.
//
// Compiled without sanitizers, linked with device code that is compiled with them. A fault is noted and control leaves
// the fibre for good: nothing is thrown on a fibre's stack.

#undef _FORTIFY_SOURCE  // it forbids longjmp between stacks

#include "simt/simt.h"

#include <setjmp.h>
#include <ucontext.h>

#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;

// The linker's: this module's image, and in it the section that holds its static shared variables.
extern "C" {
__attribute__((visibility("hidden"))) extern char __ehdr_start[], _end[];
__attribute__((visibility("hidden"), weak)) extern char __start_simt_shared[], __stop_simt_shared[];
}

namespace simt {

Counters counters;
uint64_t seed = 0;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kGuardBytes = 4096;        // around dynamic shared memory
constexpr size_t kMaxDynamicShared = 227 << 10;
constexpr int kPoison = 0xff;               // NaN as a float, -1 as an integer

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

// Who has used a byte of shared memory since the last barrier.
enum class Users { kOneThread, kOneWarp, kSeveralWarps };
struct Use {
  uint32_t epoch = 0;  // of the block: counts barriers, 0 for never
  uint32_t warp_epoch = 0;
  int thread = 0;  // the last one
  Users users = Users::kOneThread;
};
struct Shadow {
  Use read, write;
};

std::vector<Thread> threads;
Warp warps[1024 / warpSize];  // in the module, where device code may read the values
std::vector<Shadow> shadows;             // static shared memory, then dynamic
std::map<uintptr_t, uintptr_t> globals;  // begin -> end
std::vector<char> dynamic_memory;
size_t dynamic_bytes;
uint32_t epoch;
int barrier_result;
int alive;  // threads of the block

Thread* current;  // the fibre that runs; nullptr outside kernels
jmp_buf scheduler;
const std::function<void()>* body;
std::string fault;
uintptr_t host_stack;

std::string text(dim3 index) {
  return "(" + std::to_string(index.x) + "," + std::to_string(index.y) + "," + std::to_string(index.z) + ")";
}
std::string text(const char* file, unsigned line) { return std::string(file) + ":" + std::to_string(line); }
std::string text(const Site& site) { return text(site.file_name(), site.line()); }
bool same(const Site& a, const Site& b) {
  return a.line() == b.line() && std::strcmp(a.file_name(), b.file_name()) == 0;
}
std::string text(const Thread& thread) { return "block " + text(blockIdx) + ", thread " + text(thread.index); }

[[noreturn]] void leave() {
  current = nullptr;
  _longjmp(scheduler, 1);
}

[[noreturn]] void fail(const std::string& message) {
  fault = text(*current) + ": " + message;
  leave();
}

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

// ---- memory ----------------------------------------------------------------------------------------------------

bool within(uintptr_t address, const void* begin, const void* end) {
  return reinterpret_cast<uintptr_t>(begin) <= address && address < reinterpret_cast<uintptr_t>(end);
}

// Whether nothing orders an earlier use and what the current thread is about to do.
bool unordered(const Use& use) {
  if (use.epoch != epoch) return false;
  if (use.users == Users::kSeveralWarps || use.thread / warpSize != current->number / warpSize) return true;
  if (use.warp_epoch != warps[current->number / warpSize].epoch) return false;
  return use.users == Users::kOneWarp || use.thread != current->number;
}

void note(Use& use) {
  Users users = Users::kOneThread;
  if (unordered(use)) {
    const bool same_warp = use.thread / warpSize == current->number / warpSize;
    users = same_warp && use.users != Users::kSeveralWarps ? Users::kOneWarp : Users::kSeveralWarps;
  }
  use = {epoch, warps[current->number / warpSize].epoch, current->number, users};
}

enum class Access { kRead, kWrite, kAtomic };

const char* verb(Access access) {
  return access == Access::kRead ? "reads" : access == Access::kWrite ? "writes" : "changes";
}

// Atomics are ordered among themselves; what else uses the same bytes is not checked against them.
void access_shared(Shadow* shadow, size_t bytes, Access access) {
  if (access == Access::kAtomic) return;
  const bool write = access == Access::kWrite;
  ++(write ? counters.shared_stores : counters.shared_loads);
  for (; bytes > 0; --bytes, ++shadow) {
    const bool after_write = unordered(shadow->write);
    if (after_write || (write && unordered(shadow->read))) {
      const int other = (after_write ? shadow->write : shadow->read).thread;
      fail(std::string("race on shared memory: ") + verb(access) + " what thread " + text(threads[other].index) +
           (after_write ? " wrote" : " read") + " with no barrier in between");
    }
    note(write ? shadow->write : shadow->read);
  }
}

void watch(const void* pointer, size_t bytes, Access access) {
  if (current == nullptr) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  const char* stack = current->stack.get();
  if (within(address, stack, stack + kStackBytes)) return;
  counters.atomics += access == Access::kAtomic;
  if (within(address, __start_simt_shared, __stop_simt_shared)) {
    return access_shared(&shadows[address - reinterpret_cast<uintptr_t>(__start_simt_shared)], bytes, access);
  }
  const char* dynamic = dynamic_memory.data();
  if (within(address, dynamic, dynamic + dynamic_memory.size())) {
    const intptr_t offset = static_cast<const char*>(pointer) - (dynamic + kGuardBytes);
    if (offset < 0 || offset + bytes > dynamic_bytes) {
      fail("out-of-bounds shared index: byte " + std::to_string(offset) + " of " + std::to_string(dynamic_bytes) +
           " dynamic ones");
    }
    return access_shared(&shadows[__stop_simt_shared - __start_simt_shared + offset], bytes, access);
  }
  auto region = globals.upper_bound(address);
  if (region != globals.begin() && (--region)->second >= address + bytes) {
    if (access == Access::kAtomic) return;
    const bool write = access == Access::kWrite;
    ++(write ? counters.global_stores : counters.global_loads);
    (write ? counters.global_store_bytes : counters.global_load_bytes) += bytes;
    return;
  }
  // What is left is the launch's own: kernel arguments on the host's stack, variables and constants of the module.
  const bool argument = host_stack <= address && address < host_stack + (1 << 20) && access == Access::kRead;
  if (!argument && !within(address, __ehdr_start, _end)) {
    fail(std::string(verb(access)) + " " + std::to_string(bytes) + " bytes outside of every buffer");
  }
}

void run_block(std::mt19937_64& random, dim3 block) {
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
  const size_t static_bytes = __stop_simt_shared - __start_simt_shared;
  std::fill_n(__start_simt_shared, static_bytes, char(kPoison));
  shadows.resize(std::max(shadows.size(), static_bytes + dynamic_bytes));
  dynamic_memory.assign(dynamic_bytes + 2 * kGuardBytes, char(kPoison));

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

Global::Global(const void* data, size_t bytes) : begin_(reinterpret_cast<uintptr_t>(data)) {
  globals[begin_] = begin_ + bytes;
}
Global::~Global() { globals.erase(begin_); }

void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& thread) {
  const uint64_t size = uint64_t(block.x) * block.y * block.z;
  const auto fits = [](unsigned value, unsigned limit) { return 0 < value && value <= limit; };
  const bool grid_fits = fits(grid.x, 0x7fffffffu) && fits(grid.y, 65535) && fits(grid.z, 65535);
  if (!grid_fits || size == 0 || size > 1024 || block.z > 64 || shared_bytes > kMaxDynamicShared) {
    throw std::runtime_error("invalid launch: grid " + text(grid) + ", block " + text(block) + ", " +
                             std::to_string(shared_bytes) + " bytes of shared memory");
  }
  while (threads.size() < size) threads.emplace_back();
  gridDim = grid;
  blockDim = block;
  dynamic_bytes = shared_bytes;
  body = &thread;
  fault.clear();
  host_stack = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  ++counters.launches;
  std::mt19937_64 random(seed);
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        run_block(random, block);
        if (!fault.empty()) throw std::runtime_error(fault);
      }
    }
  }
}

void* dynamic_shared() { return dynamic_memory.data() + kGuardBytes; }

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

void watch_atomic(const void* address, size_t bytes) { watch(address, bytes, Access::kAtomic); }

}  // namespace simt

// ---- what -fsanitize=thread,bounds calls -----------------------------------------------------------------------

using simt::Access;

#define SIMT_ACCESS(bytes)                                                                              \
  void __tsan_read##bytes(void* address) { simt::watch(address, bytes, Access::kRead); }                \
  void __tsan_write##bytes(void* address) { simt::watch(address, bytes, Access::kWrite); }              \
  void __tsan_unaligned_read##bytes(void* address) { simt::watch(address, bytes, Access::kRead); }      \
  void __tsan_unaligned_write##bytes(void* address) { simt::watch(address, bytes, Access::kWrite); }

extern "C" {

SIMT_ACCESS(1)
SIMT_ACCESS(2)
SIMT_ACCESS(4)
SIMT_ACCESS(8)
SIMT_ACCESS(16)
void __tsan_read_range(void* address, size_t bytes) { simt::watch(address, bytes, Access::kRead); }
void __tsan_write_range(void* address, size_t bytes) { simt::watch(address, bytes, Access::kWrite); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

struct Place {
  const char* file;
  unsigned line;
};
void __ubsan_handle_out_of_bounds(const Place* place, size_t index) {
  if (simt::current == nullptr) return;
  simt::fail("index " + std::to_string(index) + " out of bounds at " + simt::text(place->file, place->line));
}
}
