#include "program.h"

#include <chrono>

namespace tidemill {

int Program::add_buffer(int64_t row_bytes) {
  buffers_.push_back({row_bytes, Buffer{}});
  return static_cast<int>(buffers_.size()) - 1;
}

void Program::add(std::unique_ptr<Operation> operation) {
  operations_.push_back(std::move(operation));
}

void* Program::rows_of(const Operand& operand, int64_t rows) {
  if (operand.buffer < 0) return operand.data;
  Rows& buffer = buffers_[operand.buffer];
  return reserve(buffer.memory, rows * buffer.row_bytes);
}

void* Program::reserve(Buffer& buffer, size_t bytes) {
  const void* before = buffer.as<void>();
  void* now = buffer.reserve(bytes);
  moved_ |= now != before;
  return now;
}

void Program::run(const Step& step) {
  do {
    moved_ = false;
    for (const auto& operation : operations_) operation->prepare(step, *this);
  } while (moved_);
  step_ = &step;
  pool_.run(*this);
}

void Program::profile(const Step& step, double* seconds) {
  seconds_ = seconds;
  run(step);
  seconds_ = nullptr;
}

void Program::run(Worker& worker) {
  using Clock = std::chrono::steady_clock;
  double* seconds = worker.thread == 0 ? seconds_ : nullptr;
  Clock::time_point begin = seconds != nullptr ? Clock::now() : Clock::time_point{};
  for (const auto& operation : operations_) {
    operation->run(*step_, worker);
    worker.barrier();
    if (seconds == nullptr) continue;
    const Clock::time_point end = Clock::now();
    *seconds++ += std::chrono::duration<double>(end - begin).count();
    begin = end;
  }
}

}  // namespace tidemill
