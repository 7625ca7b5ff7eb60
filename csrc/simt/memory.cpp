// Watches what the threads of a block read and write: races on shared memory, accesses beyond every buffer. See simt.h.
//
// Device code is compiled with a sanitizer's calls before each access; this file answers them.

#include <map>

#include "simt/block.h"

// The linker's: this module's image, and in it the section that holds its static shared variables.
extern "C" {
__attribute__((visibility("hidden"))) extern char __ehdr_start[], _end[];
__attribute__((visibility("hidden"), weak)) extern char __start_simt_shared[], __stop_simt_shared[];
}

namespace simt {
namespace {

constexpr size_t kGuardBytes = 4096;  // around dynamic shared memory
constexpr int kPoison = 0xff;         // NaN as a float, -1 as an integer

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

std::vector<Shadow> shadows;             // static shared memory, then dynamic
std::map<uintptr_t, uintptr_t> globals;  // begin -> end
std::vector<char> dynamic_memory;
size_t dynamic_bytes;
uintptr_t host_stack;

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

}  // namespace

void poison_shared_memory(size_t bytes) {
  dynamic_bytes = bytes;
  const size_t static_bytes = __stop_simt_shared - __start_simt_shared;
  std::fill_n(__start_simt_shared, static_bytes, char(kPoison));
  shadows.resize(std::max(shadows.size(), static_bytes + dynamic_bytes));
  dynamic_memory.assign(dynamic_bytes + 2 * kGuardBytes, char(kPoison));
}

void arguments_lie_from(const void* frame) { host_stack = reinterpret_cast<uintptr_t>(frame); }

// ---- what simt.h declares --------------------------------------------------------------------------------------

Global::Global(const void* data, size_t bytes) : begin_(reinterpret_cast<uintptr_t>(data)) {
  globals[begin_] = begin_ + bytes;
}
Global::~Global() { globals.erase(begin_); }

void* dynamic_shared() { return dynamic_memory.data() + kGuardBytes; }

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
