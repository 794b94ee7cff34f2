// A pool of threads that run one task together, with barriers inside it.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace tidemill {

class Pool;

// One thread's view of the pool, passed to every task.
class Worker {
 public:
  Worker(Pool& pool, int thread, int threads, void* scratch)
      : thread(thread), threads(threads), scratch(scratch), pool_(pool) {}

  // Waits for the others. Everything that any thread wrote before is visible to all after.
  void barrier();

  // The next of the tasks that all threads share between two barriers: numbered from 0, handed
  // out `count` at a time. Returns the first one's number; the caller knows where they end.
  // Whoever is held up by another process takes fewer.
  int64_t take(int64_t count);

  const int thread, threads;
  void* const scratch;  // kScratchBytes of its own, aligned to 64

 private:
  Pool& pool_;
};

class Task {
 public:
  virtual void run(Worker& worker) = 0;

 protected:
  ~Task() = default;
};

// Waits spin for some microseconds, which is what a step's operators need of each other, and
// then sleep in the kernel: an idle pool costs nothing.
//
// If there is a thread for every CPU that the process may use, each keeps to its own while a task
// runs: on a busy machine, Linux wakes threads that wait for each other on one CPU, and leaves
// them there to take turns.
class Pool {
 public:
  static constexpr size_t kScratchBytes = 8 << 20;  // rarely touched beyond the first

  // `threads` includes the one that calls `run`. Throws std::bad_alloc or std::system_error.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Runs the task on every thread, the caller's included; returns when all are done. One caller
  // at a time.
  void run(Task& task);

 private:
  friend class Worker;

  void work(Worker& worker);
  void barrier();
  void keep_to_own_cpu(int thread) const;

  const int threads_;
  cpu_set_t allowed_;      // the CPUs that the process may use
  std::vector<int> cpus_;  // the same, or empty: threads may move
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::thread> started_;
  Task* task_ = nullptr;  // null: stop
  alignas(64) std::atomic<uint32_t> runs_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int64_t> taken_{0};
};

}  // namespace tidemill
