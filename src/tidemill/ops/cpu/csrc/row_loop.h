// Row-wise operators of a step: norms, conversions, rotary embedding, embedding rows. Include
// after a target pragma, as gemm_vector.h.
#pragma once

#include <bit>
#include <cmath>

#include "gemm_unpack.h"
#include "gemm_vector.h"
#include "step_kernels.h"

namespace tidemill {
namespace {

inline float sum_lanes(f32 value) {
  float lanes[kLanes];
  store(lanes, value);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// body(at, count) for vectors of 16 elements and a rest.
template <class Body>
TIDEMILL_INLINE void for_vectors(int64_t elements, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= elements; i += kLanes) body(i, kLanes);
  if (i < elements) body(i, static_cast<int>(elements - i));
}

void norm(const float* x, const float* weight, float eps, int64_t features, float* out) {
  f32 squares{};
  for_vectors(features, [&](int64_t i, int count) {
    const f32 value = load_first<f32>(x + i, count);
    squares += value * value;
  });
  const float factor = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(features) + eps);
  for_vectors(features, [&](int64_t i, int count) {
    const f32 value = load_first<f32>(x + i, count) * load_first<f32>(weight + i, count);
    store_first(out + i, value * factor, count);
  });
}

void widen(const uint16_t* x, int64_t features, float* out) {
  for_vectors(features, [&](int64_t i, int count) {
    store_first(out + i, from_bf16(load_first<u16>(x + i, count)), count);
  });
}

void narrow(const float* x, int64_t features, uint16_t* out) {
  for_vectors(features, [&](int64_t i, int count) {
    store_first(out + i, to_bf16(load_first<f32>(x + i, count)), count);
  });
}

TIDEMILL_INLINE float most_lane(f32 value) {
#ifdef TIDEMILL_AVX512
  return _mm512_reduce_max_ps((__m512)value);
#else
  const Halves halves{value};
  const __m256 eight = _mm256_max_ps(halves.half[0], halves.half[1]);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
#endif
}

void quantize(const float* x, int64_t blocks, QuantizedBlock* out) {
  for (int64_t b = 0; b < blocks; ++b, x += kBlockColumns, ++out) {
    const f32 low = load<f32>(x), high = load<f32>(x + kLanes);
    const u32 magnitude = u32{} + 0x7fffffff;
    const float most = most_lane(max((f32)((u32)low & magnitude), (f32)((u32)high & magnitude)));
    const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
    // Adding 1.5 * 2^23 leaves the rounded integer in the lowest bits.
    const i32 q_low = (i32)(low * inverse + kRound) - (i32)splat(kRound);
    const i32 q_high = (i32)(high * inverse + kRound) - (i32)splat(kRound);
    using Bytes16 = int8_t __attribute__((vector_size(16)));
    store(out->q, __builtin_convertvector(q_low, Bytes16));
    store(out->q + kLanes, __builtin_convertvector(q_high, Bytes16));
    out->scale = most * (1.0f / 127.0f);
    out->sum = out->scale * sum_lanes(__builtin_convertvector(q_low + q_high, f32));
  }
}

void unpack_row(const PackedWeight& w, int64_t row, float factor, float* out) {
  const int64_t blocks = w.columns / kBlockColumns;
  const uint8_t* at = w.data + row / kPanelRows * blocks * block_bytes(w.format);
  const int lane = static_cast<int>(row % kPanelRows);
  for (int64_t b = 0; b < blocks; ++b, at += block_bytes(w.format), out += kBlockColumns) {
    if (w.format == Format::bf16) {
      for (int i = 0; i < kBlockColumns; ++i) {
        const auto half = load<uint16_t>(at + 64 * (i / 2) + 4 * lane + 2 * (i % 2));
        out[i] = factor * std::bit_cast<float>(uint32_t{half} << 16);
      }
      continue;
    }
    const float scale = factor * _cvtsh_ss(load<uint16_t>(at + 2 * lane));
    const float min = factor * _cvtsh_ss(load<uint16_t>(at + 32 + 2 * lane));
    const uint8_t* q = at + 64 + 4 * lane;
    for (int i = 0; i < kBlockColumns; ++i) {
      const int code = w.format == Format::u8 ? q[64 * (i / 4) + i % 4]
                                              : q[64 * (i / 8) + i % 4] >> (i / 4 % 2 * 4) & 15;
      out[i] = scale * static_cast<float>(code) + min;
    }
  }
}

// One head: norm (if any), then rotation of the pairs (i, i + head_dim / 2) (Su et al. 2021).
inline void rotate_head(const uint16_t* from, const float* weight, float eps, const float* angles,
                        int head_dim, uint16_t* to) {
  float head[256];
  widen(from, head_dim, head);
  if (weight != nullptr) norm(head, weight, eps, head_dim, head);
  const int half = head_dim / 2;
  for_vectors(half, [&](int64_t i, int count) {
    const f32 a = load_first<f32>(head + i, count), b = load_first<f32>(head + half + i, count);
    const f32 cosine = load_first<f32>(angles + i, count);
    const f32 sine = load_first<f32>(angles + half + i, count);
    store_first(to + i, to_bf16(a * cosine - b * sine), count);
    store_first(to + half + i, to_bf16(b * cosine + a * sine), count);
  });
}

void rope_write(const RopeWrite& r, int begin, int end) {
  for (int token = begin; token < end; ++token) {
    const float* angles = r.table + static_cast<int64_t>(r.positions[token]) * r.head_dim;
    uint16_t* head = r.qkv + token * r.qkv_stride;
    for (int i = 0; i < r.heads; ++i, head += r.head_dim) {
      rotate_head(head, r.q_norm, r.eps, angles, r.head_dim, head);
    }
    const int slot = r.kv_slots[token];
    const ptrdiff_t at = slot / r.kv.page_size * r.kv.page_stride +
                         slot % r.kv.page_size * r.kv.token_stride;
    for (int i = 0; i < r.kv_heads; ++i, head += r.head_dim) {
      rotate_head(head, r.k_norm, r.eps, angles, r.head_dim,
                  const_cast<uint16_t*>(r.kv.k) + at + i * r.kv.head_stride);
    }
    for (int i = 0; i < r.kv_heads; ++i, head += r.head_dim) {
      std::memcpy(const_cast<uint16_t*>(r.kv.v) + at + i * r.kv.head_stride, head,
                  r.head_dim * sizeof *head);
    }
  }
}

}  // namespace
}  // namespace tidemill
