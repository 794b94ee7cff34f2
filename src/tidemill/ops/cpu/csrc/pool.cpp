#include "pool.h"

#include <immintrin.h>

#include "memory.h"

namespace tidemill {
namespace {

// A pause takes about 50 ns on current CPUs.
constexpr int kBarrierSpins = 600;
constexpr int kIdleSpins = 1200;

// Until `value` is no longer `old`.
void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

void Worker::barrier() { pool_.barrier(); }

int64_t Worker::take(int64_t count) {
  return pool_.taken_.fetch_add(count, std::memory_order_relaxed);
}

Pool::Pool(int threads) : threads_(threads) {
  CPU_ZERO(&allowed_);
  if (sched_getaffinity(0, sizeof allowed_, &allowed_) == 0 && CPU_COUNT(&allowed_) == threads) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &allowed_)) cpus_.push_back(cpu);
    }
  }
  for (int i = 0; i < threads; ++i) {
    void* scratch = map_memory(kScratchBytes);
    workers_.push_back(std::make_unique<Worker>(*this, i, threads, scratch));
  }
  for (int i = 1; i < threads; ++i) {
    started_.emplace_back([this, i] { work(*workers_[i]); });
  }
}

Pool::~Pool() {
  task_ = nullptr;
  runs_.fetch_add(1);
  runs_.notify_all();
  for (std::thread& thread : started_) thread.join();
  for (const auto& worker : workers_) unmap_memory(worker->scratch, kScratchBytes);
}

void Pool::run(Task& task) {
  task_ = &task;
  runs_.fetch_add(1);
  runs_.notify_all();
  keep_to_own_cpu(0);
  task.run(*workers_[0]);
  barrier();
  if (!cpus_.empty()) sched_setaffinity(0, sizeof allowed_, &allowed_);
}

// The calling thread's. Where it is not permitted, threads move: slower, not wrong.
void Pool::keep_to_own_cpu(int thread) const {
  if (cpus_.empty()) return;
  cpu_set_t own;
  CPU_ZERO(&own);
  CPU_SET(cpus_[thread], &own);
  sched_setaffinity(0, sizeof own, &own);
}

void Pool::work(Worker& worker) {
  keep_to_own_cpu(worker.thread);
  for (uint32_t seen = 0;; ++seen) {
    wait_for_change(runs_, seen, kIdleSpins);
    if (task_ == nullptr) return;
    task_->run(worker);
    barrier();
  }
}

void Pool::barrier() {
  if (threads_ == 1) {
    taken_.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < threads_) {
    wait_for_change(phase_, phase, kBarrierSpins);
    return;
  }
  arrived_.store(0, std::memory_order_relaxed);
  taken_.store(0, std::memory_order_relaxed);
  // Sequentially consistent: notify_all looks for waiters, and must not do so before the store.
  phase_.store(phase + 1);
  phase_.notify_all();
}

}  // namespace tidemill
