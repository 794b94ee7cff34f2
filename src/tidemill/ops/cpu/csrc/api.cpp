// The library's C interface, which ops/cpu/library.py declares to ctypes. Functions that can fail
// return null or a negative number; tidemill_error says why.
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "crossover.h"
#include "operations.h"
#include "pack.h"

namespace tidemill {
namespace {

thread_local std::string last_error;

template <class Result, class Body>
Result guarded(Result failure, Body body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
    return failure;
  }
}

const StepKernels* step_kernels_for(const ManyRowKernels& many) {
  if (std::strcmp(many.name, "avx2") == 0) return &step_kernels_avx2;
  if (std::strcmp(many.name, "avxvnni") == 0) return &step_kernels_avxvnni;
  return __builtin_cpu_supports("avx512vnni") && std::strcmp(many.name, "avx512") != 0
             ? &step_kernels_avx512vnni
             : &step_kernels_avx512;
}

struct Engine {
  Engine(int threads, const Machine& machine) : pool(threads), machine(machine) {}

  Pool pool;
  Machine machine;
  WeightMemory memory;
};

class PackTask final : public Task {
 public:
  PackTask(FileFormat format, const uint8_t* data, int64_t rows, int64_t first, const Weight& to)
      : format_(format), data_(data), rows_(rows), first_(first), to_(to) {}

  void run(Worker& worker) override {
    constexpr int64_t kRows = 4 * kPanelRows;
    // Whole panels of the weight, whose rows no other thread writes.
    const int64_t last = (first_ + rows_ + kRows - 1) / kRows;
    for (int64_t i; (i = worker.take(1) + first_ / kRows) < last;) {
      const int64_t begin = std::max<int64_t>(0, i * kRows - first_);
      const int64_t end = std::min(rows_, (i + 1) * kRows - first_);
      pack_rows(format_, data_, to_.features, begin, end, first_, to_);
    }
  }

 private:
  const FileFormat format_;
  const uint8_t* const data_;
  const int64_t rows_, first_;
  const Weight& to_;
};

}  // namespace
}  // namespace tidemill

using namespace tidemill;  // NOLINT: the C interface is all that follows

#pragma GCC visibility push(default)
extern "C" {

const char* tidemill_error() { return last_error.c_str(); }

// `kernels`: a name of gemm_dispatch.h's, or null for the best. Null if the CPU cannot run them.
Engine* tidemill_engine(int threads, const char* kernels) {
  return guarded<Engine*>(nullptr, [&]() -> Engine* {
    const ManyRowKernels* many = many_row_kernels(kernels);
    if (many == nullptr) {
      last_error = kernels == nullptr ? "this CPU lacks AVX2"
                                      : std::string("this CPU cannot run the kernels ") + kernels;
      return nullptr;
    }
    constexpr int kFewRows = 8;  // until measured
    const Machine machine{step_kernels_for(*many), many, {kFewRows, kFewRows, kFewRows}};
    return new Engine(threads, machine);
  });
}

void tidemill_engine_free(Engine* engine) { delete engine; }

// Measures and sets it for the weights' format, one for all; returns it.
int tidemill_measure_few_rows(Engine* engine, const Weight* const* weights, int count) {
  return guarded(-1, [&] {
    int& rows = engine->machine.few_rows[static_cast<int>(weights[0]->format)];
    rows = measure_few_rows(engine->pool, engine->machine, weights, count);
    return rows;
  });
}

const char* tidemill_kernels(const Engine* engine) { return engine->machine.many->name; }

void tidemill_set_few_rows(Engine* engine, int format, int rows) {
  engine->machine.few_rows[format] = rows;
}

int tidemill_packed_format(int file_format) {
  return static_cast<int>(packed_format(static_cast<FileFormat>(file_format)));
}

// A weight of zeros. Its memory is the engine's and lives as long.
Weight* tidemill_weight(Engine* engine, int format, int64_t rows, int64_t features) {
  return guarded<Weight*>(nullptr, [&] {
    auto weight = std::make_unique<Weight>();
    weight->format = static_cast<Format>(format);
    weight->rows = rows;
    weight->features = features;
    weight->columns = (features + kBlockColumns - 1) / kBlockColumns * kBlockColumns;
    const int64_t panels = (rows + kPanelRows - 1) / kPanelRows;
    const int64_t blocks = panels * (weight->columns / kBlockColumns);
    weight->data = engine->memory.take(blocks * block_bytes(weight->format));
    return weight.release();
  });
}

void tidemill_weight_free(Weight* weight) { delete weight; }

// `rows` rows of the file become the weight's rows first, first + 1, …
void tidemill_pack(Engine* engine, const Weight* weight, int file_format, const uint8_t* data,
                   int64_t rows, int64_t first) {
  PackTask task(static_cast<FileFormat>(file_format), data, rows, first, *weight);
  engine->pool.run(task);
}

Program* tidemill_program(Engine* engine) {
  return guarded<Program*>(nullptr,
                           [&] { return new Program(engine->pool, engine->machine); });
}

void tidemill_program_free(Program* program) { delete program; }

int tidemill_buffer(Program* program, int64_t row_bytes) {
  return guarded(-1, [&] { return program->add_buffer(row_bytes); });
}

// Where the rows of a buffer are, once `tokens` of them were run.
void* tidemill_buffer_data(Program* program, int buffer, int64_t tokens) {
  return guarded<void*>(nullptr, [&] { return program->rows_of({buffer, nullptr, 0}, tokens); });
}

int tidemill_embed(Program* program, const Weight* weight, float scale, const Operand* out) {
  return guarded(-1, [&] {
    program->add(std::make_unique<Embed>(*weight, scale, *out));
    return 0;
  });
}

int tidemill_linear(Program* program, const Linear::Options* options) {
  return guarded(-1, [&] {
    program->add(std::make_unique<Linear>(*options));
    return 0;
  });
}

int tidemill_rope_write(Program* program, const Operand* qkv, const AttentionShape* shape,
                        const float* table, const float* q_norm, const float* k_norm, float eps) {
  return guarded(-1, [&] {
    program->add(std::make_unique<RopeWriteOperation>(*qkv, *shape, table, q_norm, k_norm, eps));
    return 0;
  });
}

int tidemill_attention(Program* program, const Operand* q, const AttentionShape* shape,
                       const Operand* out) {
  return guarded(-1, [&] {
    program->add(std::make_unique<AttentionOperation>(*q, *shape, *out));
    return 0;
  });
}

int tidemill_run(Program* program, const Step* step) {
  return guarded(-1, [&] {
    program->run(*step);
    return 0;
  });
}

// seconds: [operations of the program], added to.
int tidemill_profile(Program* program, const Step* step, double* seconds) {
  return guarded(-1, [&] {
    program->profile(*step, seconds);
    return 0;
  });
}

}  // extern "C"
#pragma GCC visibility pop
