#include "crossover.h"

#include <algorithm>
#include <chrono>

#include "operations.h"

namespace tidemill {

int measure_few_rows(Pool& pool, const Machine& machine, const Weight* const* weights, int count) {
  constexpr int kTries = 5;
  constexpr int kSizes[] = {8, 16, 32, 64};
  constexpr int64_t kMostOutputs = 16384;  // of one weight: a vocabulary is larger

  Machine trial = machine;
  Program program(pool, trial);
  std::vector<Weight> samples;
  samples.reserve(count);  // operations refer to them
  for (int i = 0; i < count; ++i) {
    Weight& sample = samples.emplace_back(*weights[i]);
    sample.rows = std::min(sample.rows, kMostOutputs);
    Linear::Options options{};
    options.x = {program.add_buffer(sample.columns * sizeof(uint16_t)), nullptr, sample.columns};
    options.weight = &sample;
    options.output = Gemm::Output::f32;
    options.out = {program.add_buffer(sample.rows * sizeof(float)), nullptr, sample.rows};
    program.add(std::make_unique<Linear>(options));
  }
  // The least of some tries: whatever else the machine does only adds.
  const auto seconds = [&](int rows, bool few) {
    using Clock = std::chrono::steady_clock;
    trial.few_rows[static_cast<int>(weights[0]->format)] = few ? rows : 0;
    Step step{};
    step.tokens = rows;
    auto best = Clock::duration::max();
    for (int i = 0; i < kTries; ++i) {
      const auto begin = Clock::now();
      program.run(step);
      best = std::min(best, Clock::now() - begin);
    }
    return best;
  };
  seconds(kSizes[3], true);  // touches all memory
  int result = 0;
  for (int rows : kSizes) {
    if (seconds(rows, true) > seconds(rows, false)) break;
    result = rows;
  }
  return result;
}

}  // namespace tidemill
