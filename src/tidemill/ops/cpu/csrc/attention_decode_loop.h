// Attention of one token over the paged cache: all query heads of a KV head together, since they
// read the same keys and values, with an online softmax (Milakov and Gimelshein 2018) over blocks
// that stay in L1. Long rows are cut into spans that threads share (as Flash-Decoding does) and
// that merge_spans puts together. Include after a target pragma, as gemm_vector.h.
#pragma once

#include <algorithm>

#include "gemm_loop.h"
#include "gemm_vector.h"
#include "step_kernels.h"

namespace tidemill {
namespace {

constexpr int kKeys = 64;    // of a block
constexpr int kChunk = 32;   // elements of a head: 16 pairs, whose halves make two vectors
constexpr float kNone = -1e30f;

#ifdef TIDEMILL_AVX512
constexpr int kSumVectors = 16;  // registers for sums
#else
constexpr int kSumVectors = 4;
#endif

// Heads that are computed together.
constexpr int head_tile(int chunks) { return std::max(1, kSumVectors / (2 * chunks)); }

struct Pairs {
  f32 even, odd;
};

// 32 bf16 values as two vectors; the last chunk of a head may be half as wide.
TIDEMILL_INLINE Pairs load_pairs(const uint16_t* at, bool half) {
  u32 bits{};
  if (half) {
    std::memcpy(&bits, at, sizeof bits / 2);
  } else {
    bits = load<u32>(at);
  }
  return {(f32)(bits << 16), (f32)(bits & 0xffff0000u)};
}

struct Head {  // of a partial result
  float* most;
  float* sum;
  float* outputs;  // pairs' even halves, then odd ones, chunk by chunk

  Head(float* partial, int index, int chunks) {
    most = partial + index * (2 * kLanes + chunks * kChunk);
    sum = most + kLanes;
    outputs = most + 2 * kLanes;
  }
};

// sums[i] = the sum of rows[i]'s lanes.
TIDEMILL_INLINE f32 sums_of(u32 (&rows)[kLanes]) {
  transpose(rows);
  f32 sums = (f32)rows[0];
  for (int i = 1; i < kLanes; ++i) sums += (f32)rows[i];
  return sums;
}

// Keys of a span that are taken together.
struct KeyBlock {
  const uint16_t* keys[kKeys];
  int count = 0;

  void find(const PrefillAttention& a, const AttentionSpan& span, int begin) {
    const int32_t* table = a.page_table + span.row * a.table_stride;
    const int end = std::min(begin + kKeys, span.end);
    int page = begin / a.kv.page_size, offset = begin % a.kv.page_size;
    for (count = 0; begin < end; ++page, offset = 0) {
      const uint16_t* key = a.kv.k + table[page] * a.kv.page_stride +
                            offset * a.kv.token_stride + span.kv_head * a.kv.head_stride;
      for (; begin < end && offset < a.kv.page_size; ++begin, ++offset, key += a.kv.token_stride) {
        keys[count++] = key;
      }
    }
  }
};

// The pieces are too short for the hardware to see where they lead.
template <int kChunks>
TIDEMILL_INLINE void prefetch_head(const uint16_t* at) {
  for (int c = 0; c < kChunks; ++c) {
    _mm_prefetch(reinterpret_cast<const char*>(at + c * kChunk), _MM_HINT_T0);
  }
}

template <int kChunks, int kHeads>
void score(const PrefillAttention& a, const KeyBlock& block, const float* queries, float* scores) {
  const bool half = a.head_dim % kChunk != 0;
  const ptrdiff_t to_values = a.kv.v - a.kv.k;
  f32 q[kHeads][kChunks][2];
  for (int h = 0; h < kHeads; ++h) {
    for (int c = 0; c < kChunks; ++c) {
      q[h][c][0] = load<f32>(queries + (h * kChunks + c) * kChunk);
      q[h][c][1] = load<f32>(queries + (h * kChunks + c) * kChunk + kLanes);
    }
  }
  for (int first = 0; first < block.count; first += kLanes) {
    u32 products[kHeads][kLanes];
    const int count = std::min(kLanes, block.count - first);
    if (count < kLanes) std::memset(products, 0, sizeof products);
    for (int i = 0; i < count; ++i) {
      const uint16_t* key = block.keys[first + i];
      prefetch_head<kChunks>(key + to_values);
      f32 sums[kHeads] = {};
#pragma GCC unroll 8
      for (int c = 0; c < kChunks; ++c) {
        const Pairs k = load_pairs(key + c * kChunk, half && c == kChunks - 1);
#pragma GCC unroll 8
        for (int h = 0; h < kHeads; ++h) {
          sums[h] += k.even * q[h][c][0];
          sums[h] += k.odd * q[h][c][1];
        }
      }
      for (int h = 0; h < kHeads; ++h) products[h][i] = (u32)sums[h];
    }
    for (int h = 0; h < kHeads; ++h) {
      float* to = scores + h * kKeys + first;
      store(to, sums_of(products[h]));
      for (int i = count; i < kLanes; ++i) to[i] = kNone;
    }
  }
}

// Scores (in powers of two) become weights; sums and outputs so far shrink to a new maximum.
inline void softmax(const Head& head, int count, int chunks, float* scores) {
  f32 most = splat(*head.most);
  for (int i = 0; i < count; i += kLanes) most = max(most, load<f32>(scores + i));
  float lanes[kLanes];
  store(lanes, most);
  const float new_most = *std::max_element(lanes, lanes + kLanes);
  f32 sums{};
  for (int i = 0; i < count; i += kLanes) {
    const f32 weight = exp2(load<f32>(scores + i) - new_most);
    store(scores + i, weight);
    sums += weight;
  }
  if (new_most > *head.most) {
    const f32 shrink = exp2(splat(*head.most - new_most));
    for (int i = 0; i < chunks * kChunk; i += kLanes) {
      store(head.outputs + i, load<f32>(head.outputs + i) * shrink);
    }
    *head.sum *= shrink[0];
    *head.most = new_most;
  }
  store(lanes, sums);
  for (float lane : lanes) *head.sum += lane;
}

template <int kChunks, int kHeads>
void add_values(const PrefillAttention& a, const KeyBlock& block, const KeyBlock& next,
                const float* weights, float* partial, int first_head) {
  const bool half = a.head_dim % kChunk != 0;
  const ptrdiff_t to_values = a.kv.v - a.kv.k;
  f32 sums[kHeads][kChunks][2];
  for (int h = 0; h < kHeads; ++h) {
    const float* outputs = Head(partial, first_head + h, kChunks).outputs;
    for (int c = 0; c < 2 * kChunks; ++c) sums[h][c / 2][c % 2] = load<f32>(outputs + c * kLanes);
  }
  for (int i = 0; i < block.count; ++i) {
    const uint16_t* value = block.keys[i] + to_values;
    if (i < next.count) prefetch_head<kChunks>(next.keys[i]);
#pragma GCC unroll 8
    for (int c = 0; c < kChunks; ++c) {
      const Pairs v = load_pairs(value + c * kChunk, half && c == kChunks - 1);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        sums[h][c][0] += v.even * weights[h * kKeys + i];
        sums[h][c][1] += v.odd * weights[h * kKeys + i];
      }
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    float* outputs = Head(partial, first_head + h, kChunks).outputs;
    for (int c = 0; c < 2 * kChunks; ++c) store(outputs + c * kLanes, sums[h][c / 2][c % 2]);
  }
}

template <int kChunks>
void attend(const PrefillAttention& a, const AttentionSpan& span, const AttentionSpan* next,
            float* partial, float* scratch) {
  constexpr int kTile = head_tile(kChunks);
  const int group = a.heads / a.kv_heads;
  const bool half = a.head_dim % kChunk != 0;
  const float scale = a.softcap > 0.0f ? a.scale / a.softcap : a.scale * kLog2e;
  float* scores = scratch;  // [kTile][kKeys]
  float* queries = scratch + kTile * kKeys;

  const uint16_t* q = a.q + span.token * a.q_stride + span.kv_head * group * a.head_dim;
  for (int h = 0; h < group; ++h) {
    for (int c = 0; c < kChunks; ++c) {
      const Pairs pairs = load_pairs(q + h * a.head_dim + c * kChunk, half && c == kChunks - 1);
      store(queries + (h * kChunks + c) * kChunk, pairs.even * scale);
      store(queries + (h * kChunks + c) * kChunk + kLanes, pairs.odd * scale);
    }
    const Head head(partial, h, kChunks);
    *head.most = kNone;
    *head.sum = 0.0f;
    std::memset(head.outputs, 0, kChunks * kChunk * sizeof(float));
  }

  KeyBlock blocks[2];
  KeyBlock* block = &blocks[0];
  KeyBlock* ahead = &blocks[1];
  block->find(a, span, span.begin);
  for (int begin = span.begin; begin < span.end; begin += kKeys, std::swap(block, ahead)) {
    ahead->count = 0;
    if (begin + kKeys < span.end) {
      ahead->find(a, span, begin + kKeys);
    } else if (next != nullptr) {
      ahead->find(a, *next, next->begin);
    }
    for (int first = 0, count; first < group; first += count) {
      count = std::min(kTile, group - first);
      with_rows<kTile>(count, [&](auto heads) {
        score<kChunks, heads>(a, *block, queries + first * kChunks * kChunk, scores);
        for (int h = 0; h < heads; ++h) {
          float* at = scores + h * kKeys;
          if (a.softcap > 0.0f) {
            for (int i = 0; i < block->count; ++i) {
              at[i] = a.softcap * kLog2e * tanh(splat(at[i]))[0];
            }
          }
          softmax(Head(partial, first + h, kChunks), block->count, kChunks, at);
        }
        add_values<kChunks, heads>(a, *block, *ahead, scores, partial, first);
      });
    }
  }
}

void attention_span(const PrefillAttention& a, const AttentionSpan& span,
                    const AttentionSpan* next, float* partial, void* scratch) {
  const int chunks = (a.head_dim + kChunk - 1) / kChunk;
  with_rows<8>(chunks, [&](auto count) {
    attend<count>(a, span, next, partial, static_cast<float*>(scratch));
  });
}

void merge_spans(const PrefillAttention& a, int token, int kv_head, float* partials, int count) {
  const int group = a.heads / a.kv_heads;
  const int chunks = (a.head_dim + kChunk - 1) / kChunk;
  const int64_t stride = span_floats(group, a.head_dim);
  uint16_t* out = a.out + token * a.out_stride + kv_head * group * a.head_dim;
  for (int h = 0; h < group; ++h, out += a.head_dim) {
    float most = kNone;
    for (int s = 0; s < count; ++s) {
      most = std::max(most, *Head(partials + s * stride, h, chunks).most);
    }
    float sum = 0.0f;
    for (int s = 0; s < count; ++s) {
      const Head head(partials + s * stride, h, chunks);
      *head.most = exp2(splat(*head.most - most))[0];  // now its share
      sum += *head.sum * *head.most;
    }
    for (int c = 0; c < chunks; ++c) {
      f32 even{}, odd{};
      for (int s = 0; s < count; ++s) {
        const Head head(partials + s * stride, h, chunks);
        even += load<f32>(head.outputs + c * kChunk) * *head.most;
        odd += load<f32>(head.outputs + c * kChunk + kLanes) * *head.most;
      }
      const u32 pairs = to_bf16_pairs(even * (1.0f / sum), odd * (1.0f / sum));
      std::memcpy(out + c * kChunk, &pairs,
                  std::min(kChunk, a.head_dim - c * kChunk) * sizeof *out);
    }
  }
}

}  // namespace
}  // namespace tidemill
