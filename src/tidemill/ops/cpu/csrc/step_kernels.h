// What a decode step needs besides the many-row kernels: products with few rows, attention of one
// token a row, and the row-wise operators. One table of functions per instruction set.
#pragma once

#include <cstdint>

#include "attention_prefill.h"
#include "gemm.h"
#include "packed.h"

namespace tidemill {

// 32 columns of a row rounded to int8 with a scale of their own, as llama.cpp's Q8 does.
// With x = scale * q and w = s * p + m over a block, sum(x w) = scale * s * sum(q p) + m * sum,
// where sum(q p) is exact in integers.
struct QuantizedBlock {
  int8_t q[kBlockColumns];
  float scale;
  float sum;  // of the 32 values scale * q
};

// Part of the attention of one token: the group of query heads that share a KV head, over the
// keys begin … end of its row.
struct AttentionSpan {
  int token, row, kv_head;
  int begin, end;
};

// Rotary embedding, head norms and cache write of tokens begin … end.
struct RopeWrite {
  uint16_t* qkv;  // bf16[T][(heads + 2 kv_heads) * head_dim]; q is rotated in place
  ptrdiff_t qkv_stride;
  KvPages kv;
  const int32_t* positions;
  const int32_t* kv_slots;
  const float* table;  // [positions][head_dim]: cosines, then sines
  const float* q_norm;  // float[head_dim], or null
  const float* k_norm;
  float eps;
  int heads, kv_heads, head_dim;
};

struct StepKernels {
  const char* name;

  // RMSNorm of a row (Zhang and Sennrich 2019): out = x * weight / sqrt(mean(x^2) + eps).
  void (*norm)(const float* x, const float* weight, float eps, int64_t features, float* out);
  void (*widen)(const uint16_t* x, int64_t features, float* out);     // bf16 to float
  void (*narrow)(const float* x, int64_t features, uint16_t* out);    // float to bf16
  void (*quantize)(const float* x, int64_t blocks, QuantizedBlock* out);

  // The Gemm's outputs for pairs of panels begin … end (gated: a gate panel and its up panel,
  // else neighbours). `x` holds g.rows rows of weight->columns each, as QuantizedBlocks for u4 and
  // u8 weights and as float for bf16; g.x is not read.
  void (*few_rows)(const Gemm& g, const void* x, int64_t begin, int64_t end);

  // Row `row` of a weight times `factor`.
  void (*unpack_row)(const PackedWeight& weight, int64_t row, float factor, float* out);

  void (*rope_write)(const RopeWrite& r, int begin, int end);

  // `partial`: span_floats of them, which merge_spans takes. `next`: the span that this thread
  // computes after this one, or null; it is prefetched. `scratch`: a worker's.
  void (*attention_span)(const PrefillAttention& a, const AttentionSpan& span,
                         const AttentionSpan* next, float* partial, void* scratch);
  // Writes the output of the group of heads from `count` consecutive partials.
  void (*merge_spans)(const PrefillAttention& a, int token, int kv_head, float* partials,
                      int count);
};

// Per query head: the maximum, the sum, and head_dim (rounded up to 32) outputs.
constexpr int64_t span_floats(int group, int head_dim) {
  return group * (2 * 16 + (head_dim + 31) / 32 * 32);
}

extern const StepKernels step_kernels_avx512vnni, step_kernels_avx512, step_kernels_avxvnni,
    step_kernels_avx2;

}  // namespace tidemill
