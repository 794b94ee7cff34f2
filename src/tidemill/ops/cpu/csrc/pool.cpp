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
  runs_.fetch_add(1, std::memory_order_release);
  runs_.notify_all();
  for (std::thread& thread : started_) thread.join();
  for (const auto& worker : workers_) unmap_memory(worker->scratch, kScratchBytes);
}

void Pool::run(Task& task) {
  task_ = &task;
  runs_.fetch_add(1, std::memory_order_release);
  runs_.notify_all();
  task.run(*workers_[0]);
  barrier();
}

void Pool::work(Worker& worker) {
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
  phase_.store(phase + 1, std::memory_order_release);
  phase_.notify_all();
}

}  // namespace tidemill
