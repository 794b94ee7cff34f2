// Attention of one token over the paged cache: all query heads of a KV head together, since they
// read the same keys and values, with an online softmax (Milakov and Gimelshein 2018) over blocks
// that stay in L1. Long rows are cut into spans that threads share (as Flash-Decoding does) and
// that merge_spans puts together. Include after a target pragma, as gemm_vector.h.
//
// A head is taken in chunks of two vectors: its elements at even places and those at odd ones, into
// which a vector of bf16 falls apart most cheaply.
#pragma once

#include <algorithm>

#include "gemm_loop.h"
#include "native_vector.h"
#include "step_kernels.h"

namespace tidemill {
namespace {

constexpr int kKeys = 64;             // of a block
constexpr int kChunk = 2 * kFloats;   // elements
constexpr float kNone = -1e30f;       // the score of no key

// Heads that are computed together: with two sums each, what registers hold.
#ifdef TIDEMILL_AVX512
constexpr int kHeadTile = 8;
#else
constexpr int kHeadTile = 4;
#endif

inline int chunks_of(const PrefillAttention& a) { return (a.head_dim + kChunk - 1) / kChunk; }

// One chunk of a head; the last one may be half as wide, and is then filled up with zeros.
TIDEMILL_INLINE Pairs load_chunk(const PrefillAttention& a, const uint16_t* head, int chunk) {
  Bits bits{};
  if ((chunk + 1) * kChunk <= a.head_dim) {
    bits = load<Bits>(head + chunk * kChunk);
  } else {
    std::memcpy(&bits, head + chunk * kChunk, sizeof bits / 2);
  }
  return split_pairs(bits);
}

// One head of a partial result, as span_floats counts it.
struct Head {
  float* most;     // of the scores, in powers of two
  float* sum;      // of the weights
  float* outputs;  // not yet divided by the sum

  Head(float* partial, int index, int chunks) {
    most = partial + index * (2 * kLanes + chunks * kChunk);
    sum = most + kLanes;
    outputs = most + 2 * kLanes;
  }
};

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

// Pages are too short for the hardware to see where they lead.
TIDEMILL_INLINE void prefetch_head(const PrefillAttention& a, const uint16_t* head) {
  constexpr int kLine = 32;  // elements
  for (int i = 0; i < a.head_dim; i += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(head + i), _MM_HINT_T0);
  }
}

// scores[kHeads][kKeys] of queries[kHeads][chunks * kChunk].
template <int kHeads>
void score(const PrefillAttention& a, const KeyBlock& block, const float* queries, float* scores) {
  const int chunks = chunks_of(a);
  const ptrdiff_t to_values = a.kv.v - a.kv.k;
  for (int first = 0; first < block.count; first += kFloats) {
    Floats products[kHeads][kFloats];
    const int count = std::min(kFloats, block.count - first);
    if (count < kFloats) std::memset(products, 0, sizeof products);
    for (int i = 0; i < count; ++i) {
      const uint16_t* key = block.keys[first + i];
      prefetch_head(a, key + to_values);
      Floats sums[kHeads] = {};
      for (int c = 0; c < chunks; ++c) {
        const Pairs k = load_chunk(a, key, c);
        const float* q = queries + c * kChunk;
#pragma GCC unroll 8
        for (int h = 0; h < kHeads; ++h, q += chunks * kChunk) {
          sums[h] = multiply_add(k.even, load<Floats>(q), sums[h]);
          sums[h] = multiply_add(k.odd, load<Floats>(q + kFloats), sums[h]);
        }
      }
      for (int h = 0; h < kHeads; ++h) products[h][i] = sums[h];
    }
    for (int h = 0; h < kHeads; ++h) {
      float* to = scores + h * kKeys + first;
      store(to, sums_of(products[h]));
      for (int i = count; i < kFloats; ++i) to[i] = kNone;
    }
  }
}

// Soft-capped scores (Gemma 2), in powers of two. They come divided by the cap.
inline void cap(float* scores, int count, float factor) {
  for (int i = 0; i < count; i += kLanes) {
    store_first(scores + i, factor * tanh(load<f32>(scores + i)), std::min(kLanes, count - i));
  }
}

// Scores (in powers of two) become weights; sums and outputs so far shrink to a new maximum.
inline void softmax(const Head& head, int count, int chunks, float* scores) {
  for (int i = count; i % kLanes != 0; ++i) scores[i] = kNone;
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
    const float shrink = exp2(splat(*head.most - new_most))[0];
    for (int i = 0; i < chunks * kChunk; i += kFloats) {
      store(head.outputs + i, load<Floats>(head.outputs + i) * splat_floats(shrink));
    }
    *head.sum *= shrink;
    *head.most = new_most;
  }
  store(lanes, sums);
  for (float lane : lanes) *head.sum += lane;
}

template <int kHeads>
void add_values(const PrefillAttention& a, const KeyBlock& block, const KeyBlock& next,
                const float* weights, float* partial, int first_head) {
  const int chunks = chunks_of(a);
  const ptrdiff_t to_values = a.kv.v - a.kv.k;
  for (int c = 0; c < chunks; ++c) {
    Pairs sums[kHeads] = {};
    for (int i = 0; i < block.count; ++i) {
      const Pairs v = load_chunk(a, block.keys[i] + to_values, c);
      if (c == 0 && i < next.count) prefetch_head(a, next.keys[i]);
#pragma GCC unroll 8
      for (int h = 0; h < kHeads; ++h) {
        const Floats weight = splat_floats(weights[h * kKeys + i]);
        sums[h].even = multiply_add(v.even, weight, sums[h].even);
        sums[h].odd = multiply_add(v.odd, weight, sums[h].odd);
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      float* outputs = Head(partial, first_head + h, chunks).outputs + c * kChunk;
      store(outputs, load<Floats>(outputs) + sums[h].even);
      store(outputs + kFloats, load<Floats>(outputs + kFloats) + sums[h].odd);
    }
  }
}

void attention_span(const PrefillAttention& a, const AttentionSpan& span,
                    const AttentionSpan* next, float* partial, void* scratch) {
  const int group = a.heads / a.kv_heads;
  const int chunks = chunks_of(a);
  const float scale = a.softcap > 0.0f ? a.scale / a.softcap : a.scale * kLog2e;
  Arena arena(scratch);
  auto* scores = arena.take<float>(kHeadTile * kKeys);
  auto* queries = arena.take<float>(group * chunks * kChunk);

  const uint16_t* q = a.q + span.token * a.q_stride + span.kv_head * group * a.head_dim;
  for (int h = 0; h < group; ++h) {
    for (int c = 0; c < chunks; ++c) {
      const Pairs pairs = load_chunk(a, q + h * a.head_dim, c);
      float* query = queries + (h * chunks + c) * kChunk;
      store(query, pairs.even * splat_floats(scale));
      store(query + kFloats, pairs.odd * splat_floats(scale));
    }
    const Head head(partial, h, chunks);
    *head.most = kNone;
    *head.sum = 0.0f;
    std::memset(head.outputs, 0, chunks * kChunk * sizeof(float));
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
      count = even_block(group - first, kHeadTile);
      with_rows<kHeadTile>(count, [&](auto heads) {
        score<heads>(a, *block, queries + first * chunks * kChunk, scores);
        for (int h = 0; h < heads; ++h) {
          float* own = scores + h * kKeys;
          if (a.softcap > 0.0f) cap(own, block->count, a.softcap * kLog2e);
          softmax(Head(partial, first + h, chunks), block->count, chunks, own);
        }
        add_values<heads>(a, *block, *ahead, scores, partial, first);
      });
    }
  }
}

void merge_spans(const PrefillAttention& a, int token, int kv_head, float* partials, int count) {
  const int group = a.heads / a.kv_heads;
  const int chunks = chunks_of(a);
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
      Pairs total{};
      for (int s = 0; s < count; ++s) {
        const Head head(partials + s * stride, h, chunks);
        const Floats share = splat_floats(*head.most / sum);
        total.even = multiply_add(load<Floats>(head.outputs + c * kChunk), share, total.even);
        total.odd = multiply_add(load<Floats>(head.outputs + c * kChunk + kFloats), share, total.odd);
      }
      const Bits pairs = join_pairs(total);
      std::memcpy(out + c * kChunk, &pairs,
                  std::min(kChunk, a.head_dim - c * kChunk) * sizeof *out);
    }
  }
}

}  // namespace
}  // namespace tidemill
