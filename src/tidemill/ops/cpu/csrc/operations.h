// The operators of ops/backend.py as operations of a program.
#pragma once

#include "program.h"

namespace tidemill {

// Rows `step.ids` of the weight, times a factor -> float.
class Embed final : public Operation {
 public:
  Embed(const Weight& weight, float scale, Operand out);
  void prepare(const Step& step, Program& program) override;
  void run(const Step& step, Worker& worker) override;

 private:
  const Weight& weight_;
  const float scale_;
  const Operand out_;
  const StepKernels* kernels_ = nullptr;
  float* rows_ = nullptr;
};

// A product with a weight, and what happens to its rows before and after.
class Linear final : public Operation {
 public:
  struct Options {
    Operand x;          // with a norm: float, the residual stream; without: bf16
    const float* norm;  // RMSNorm's weight, or null
    float eps;
    const Weight* weight;
    const float* bias;  // or null
    Gemm::Output output;
    Activation activation;
    Operand out;
    bool logits;  // only rows step.logit_tokens, to step.logits
  };

  explicit Linear(const Options& options) : o_(options) {}
  void prepare(const Step& step, Program& program) override;
  void run(const Step& step, Worker& worker) override;

 private:
  void run_few(const Step& step, Worker& worker);
  void run_many(const Step& step, Worker& worker);
  const void* source(const Step& step, int64_t row) const;
  const float* normed(const Step& step, int64_t row, float* scratch) const;

  const Options o_;
  const Machine* machine_ = nullptr;
  const void* x_ = nullptr;
  void* prepared_ = nullptr;  // rows of x as the kernels take them, shared by the threads
  int64_t rows_ = 0;
  bool few_ = false;
  Gemm gemm_{};
};

// One layer's cache and heads, as rope and attention need them.
struct AttentionShape {
  KvPages kv;
  int heads, kv_heads, head_dim;
  float scale;
  int window;     // 0: none
  float softcap;  // 0: none
};

class RopeWriteOperation final : public Operation {
 public:
  RopeWriteOperation(Operand qkv, const AttentionShape& shape, const float* table,
                     const float* q_norm, const float* k_norm, float eps);
  void prepare(const Step& step, Program& program) override;
  void run(const Step& step, Worker& worker) override;

 private:
  const Operand qkv_;
  RopeWrite arguments_;
  const StepKernels* kernels_ = nullptr;
};

// Rows of one token (they come first) by spans, the others by the many-row kernels.
class AttentionOperation final : public Operation {
 public:
  AttentionOperation(Operand q, const AttentionShape& shape, Operand out);
  void prepare(const Step& step, Program& program) override;
  void run(const Step& step, Worker& worker) override;

 private:
  void plan_spans(const Step& step, Program& program);
  void run_spans(Worker& worker);
  AttentionSpan span_at(int64_t index) const;
  void finish_span(const AttentionSpan& span, int64_t index, int64_t size);

  const Operand q_, out_;
  PrefillAttention arguments_;
  const Machine* machine_ = nullptr;
  int single_rows_ = 0;            // rows of one token
  int span_keys_ = 0;              // keys of a span
  std::vector<int> first_span_;    // [single_rows + 1], within a KV head
  std::vector<int> first_key_;     // the window's begin
  float* partials_ = nullptr;
  std::atomic<int>* done_ = nullptr;  // [kv_heads][single_rows]: spans so far
};

}  // namespace tidemill
