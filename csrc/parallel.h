// How a kernel asks its caller for threads: run(task) once for every task in [0, count), in any order, on any thread.
#pragma once

#include <cstdint>
#include <functional>

namespace iecl_fast {

using ParallelFor = void (*)(int64_t count, const std::function<void(int64_t)>& run);

}  // namespace iecl_fast
