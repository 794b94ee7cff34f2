// Causal attention of many query tokens over a paged KV cache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tidemill {

// One layer's keys and values, bf16. Element (token, head, d) of a sequence lies at
// page_table[token / page_size] * page_stride + (token % page_size) * token_stride +
// head * head_stride + d. Strides are in elements.
struct KvPages {
  const uint16_t* k;
  const uint16_t* v;
  ptrdiff_t page_stride, token_stride, head_stride;
  int page_size;
};

struct PrefillAttention {
  const uint16_t* q;  // bf16[T][heads * head_dim], rotated
  ptrdiff_t q_stride;
  uint16_t* out;  // bf16[T][heads * head_dim]
  ptrdiff_t out_stride;
  KvPages kv;
  const int32_t* row_starts;  // row r owns tokens row_starts[r] … row_starts[r + 1]
  const int32_t* contexts;    // tokens in the cache, the row's own included
  const int32_t* page_table;  // [rows][table_stride]
  ptrdiff_t table_stride;
  int first_row, end_row;  // the rows to compute
  int heads, kv_heads;
  int head_dim;  // a multiple of 16, at most 256
  float scale;
  int window;     // a token sees itself and window - 1 before it; 0: all before it
  float softcap;  // scores become softcap * tanh(score / softcap); 0: they do not
};

// Every thread of a pool calls this with the same `a`. `scratch` as for the GEMM.
using PrefillFunction = void(const PrefillAttention& a, int thread, int threads, void* scratch);

PrefillFunction attention_prefill_amx, attention_prefill_avx512bf16, attention_prefill_avx512,
    attention_prefill_avx2;

}  // namespace tidemill
