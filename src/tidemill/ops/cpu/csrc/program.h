// A program: the operators of one forward pass in order, recorded once and run each step on all
// threads, for any number of tokens. What a CUDA graph is to a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gemm_dispatch.h"
#include "memory.h"
#include "pool.h"
#include "step_kernels.h"

namespace tidemill {

// The step that a program runs: ops/backend.py's Batch, field by field.
struct Step {
  const int32_t* ids;
  const int32_t* positions;
  const int32_t* kv_slots;
  const int32_t* row_starts;
  const int32_t* contexts;
  const int32_t* page_table;
  int64_t table_stride;
  const int32_t* logit_tokens;
  float* logits;  // [logit_count][vocabulary]
  int32_t tokens, rows, logit_count;
};

// Kernels and thresholds of this machine.
struct Machine {
  const StepKernels* step;
  const ManyRowKernels* many;
  int few_rows[3];  // by Format: up to so many rows the few-row kernels are faster
};

struct Weight : PackedWeight {
  int64_t features;  // columns before padding
};

// Rows of a tensor: a buffer of the program or memory of the caller's.
struct Operand {
  int buffer;      // index, or -1: `data`
  void* data;
  int64_t stride;  // elements
};

class Program;

class Operation {
 public:
  virtual ~Operation() = default;
  // Called once a step, by one thread, before any operation runs: the place for allocating. Called
  // for all operations again if that moved a buffer.
  virtual void prepare(const Step& step, Program& program) = 0;
  virtual void run(const Step& step, Worker& worker) = 0;
};

class Program final : private Task {
 public:
  Program(Pool& pool, const Machine& machine) : pool_(pool), machine_(machine) {}

  // A buffer of `row_bytes` a token; returns its index.
  int add_buffer(int64_t row_bytes);
  void add(std::unique_ptr<Operation> operation);

  // Throws std::bad_alloc; then nothing has run.
  void run(const Step& step);

  // As `run`, and adds each operation's seconds to seconds[operation].
  void profile(const Step& step, double* seconds);
  int operations() const { return static_cast<int>(operations_.size()); }

  const Machine& machine() const { return machine_; }
  int threads() const { return pool_.threads(); }

  // For operations, in `prepare`.
  void* rows_of(const Operand& operand, int64_t rows);
  // Memory that an operation's threads share while it runs.
  enum Shared { kRows, kPartials, kCounters };  // counters: each operation leaves zeros behind
  void* shared(Shared which, size_t bytes) { return reserve(shared_[which], bytes); }

 private:
  void run(Worker& worker) override;
  void* reserve(Buffer& buffer, size_t bytes);

  struct Rows {
    int64_t row_bytes;
    Buffer memory;
  };

  Pool& pool_;
  const Machine& machine_;
  std::vector<Rows> buffers_;
  Buffer shared_[3];
  bool moved_ = false;  // since `prepare` was last called
  std::vector<std::unique_ptr<Operation>> operations_;
  const Step* step_ = nullptr;
  double* seconds_ = nullptr;
};

}  // namespace tidemill
