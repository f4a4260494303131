// One thread pool for all kernels of the process.
#pragma once

#include <cstddef>

namespace outrider {

// Does task `index` of a job. Must not throw.
using Task = void (*)(const void* job, std::size_t index);

// Runs tasks 0 .. count-1 of `job`, this thread included; returns when all are done. Tasks are claimed one at a time, so
// that a thread that the system has stopped holds up no more than one task. Jobs of several callers run one by one. A task
// may run tasks of its own: its thread does them all.
void run_tasks(std::size_t count, Task task, const void* job);

// Threads that work on a job, the caller included. Starts none: the first job does.
void set_threads(int count);
int threads();

// Physical cores that this process may run on.
int physical_cores();

}  // namespace outrider
