#include "pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace outrider {
namespace {

constexpr int kIdleSpins = 40000;  // pauses before an idle worker sleeps: some 2 ms where one takes 140 cycles
constexpr int kEndSpins = 4000;    // before who waits for the others' last tasks gives way to whoever may hold their cores
constexpr std::uint64_t kIndexBits = 24;
constexpr std::uint64_t kIndexMask = (std::uint64_t{1} << kIndexBits) - 1;

thread_local bool in_task = false;  // whether this thread does a task now

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

class Pool {
 public:
  Pool() = default;
  explicit Pool(int threads) : wanted_(threads) {}

  void run(std::size_t count, Task task, const void* job) {
    if (count == 0) return;
    if (in_task) {
      for (std::size_t i = 0; i < count; ++i) task(job, i);
      return;
    }
    std::lock_guard<std::mutex> one_job(job_mutex_);
    if (wanted_ <= 1 || count == 1) {
      in_task = true;
      for (std::size_t i = 0; i < count; ++i) task(job, i);
      in_task = false;
      return;
    }
    if (static_cast<int>(workers_.size()) != wanted_ - 1) restart();
    task_ = task;
    job_ = job;
    done_.store(0, std::memory_order_relaxed);
    // `state_` is (jobs begun, tasks, tasks claimed). The job cannot change between a claim and the end of its task.
    ++epoch_;
    state_.store((epoch_ << (2 * kIndexBits)) | (count << kIndexBits));
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      wake_.notify_all();
    }
    while (claim_and_do()) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) != count; ++spins) {
      if (spins < kEndSpins) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

  void set(int count) {
    std::lock_guard<std::mutex> one_job(job_mutex_);
    wanted_ = std::max(1, count);
  }

  int size() const { return wanted_.load(); }

 private:
  bool pending() const {
    const std::uint64_t state = state_.load(std::memory_order_relaxed);
    return (state & kIndexMask) < ((state >> kIndexBits) & kIndexMask);
  }

  bool claim_and_do() {
    if (!pending()) return false;
    const std::uint64_t state = state_.fetch_add(1);
    const std::uint64_t index = state & kIndexMask;
    if (index >= ((state >> kIndexBits) & kIndexMask)) return false;
    in_task = true;
    task_(job_, index);
    in_task = false;
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  void work() {
    int spins = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
      if (claim_and_do()) {
        spins = 0;
      } else if (++spins < kIdleSpins) {
        pause();
      } else {
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [this] { return stop_.load() || pending(); });
        sleepers_.fetch_sub(1);
        spins = 0;
      }
    }
  }

  void restart() {
    {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      stop_.store(true);
      wake_.notify_all();
    }
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stop_.store(false);
    for (int i = 1; i < wanted_; ++i) workers_.emplace_back([this] { work(); });
  }

  std::mutex job_mutex_;
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<std::uint64_t> state_{0};
  alignas(64) std::atomic<std::size_t> done_{0};
  std::uint64_t epoch_ = 0;
  Task task_ = nullptr;
  const void* job_ = nullptr;
  std::vector<std::thread> workers_;
  std::atomic<int> wanted_{physical_cores()};
};

// Never destroyed: workers may outlive static destructors. In a forked child the workers do not exist, and locks may be held
// by threads that do not either: it gets a pool of its own, and the parent's stays as it was.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
  static const bool made = [] {
    the_pool.store(new Pool);
#if defined(__linux__)
    pthread_atfork(nullptr, nullptr, [] { the_pool.store(new Pool(the_pool.load()->size())); });
#endif
    return true;
  }();
  (void)made;
  return *the_pool.load();
}

}  // namespace

void run_tasks(std::size_t count, Task task, const void* job) { pool().run(count, task, job); }

void set_threads(int count) { pool().set(count); }

int threads() { return pool().size(); }

int physical_cores() {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) {
    std::set<std::string> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed)) continue;
      std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
      std::string siblings;
      if (!std::getline(file, siblings)) siblings = std::to_string(cpu);
      cores.insert(siblings);
    }
    if (!cores.empty()) return static_cast<int>(cores.size());
  }
#endif
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace outrider
