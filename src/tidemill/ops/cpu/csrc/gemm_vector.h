// Sixteen-lane vectors in the compiler's own vector types, so that one source serves AVX2 (two
// registers each) and AVX-512 (one). Include this only after a target pragma (see gemm_amx.cpp):
// everything here has internal linkage and is compiled once per instruction set.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gemm.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // 64-byte arguments: all of these are inlined

#define TIDEMILL_INLINE static inline __attribute__((always_inline))

namespace tidemill {
namespace {

constexpr int kLanes = 16;

using f32 = float __attribute__((vector_size(64)));
using i32 = int32_t __attribute__((vector_size(64)));
using u32 = uint32_t __attribute__((vector_size(64)));
using u16 = uint16_t __attribute__((vector_size(32)));

template <class V>
TIDEMILL_INLINE V load(const void* at) {
  V value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <class V>
TIDEMILL_INLINE void store(void* at, V value) {
  std::memcpy(at, &value, sizeof value);
}

// The first `count` of 16 elements; the branch is there because the full width is the usual case.
template <class V, class Element>
TIDEMILL_INLINE V load_first(const Element* at, int64_t count) {
  if (count == kLanes) return load<V>(at);
  V value{};
  std::memcpy(&value, at, count * sizeof(Element));
  return value;
}

template <class Element, class V>
TIDEMILL_INLINE void store_first(Element* at, V value, int64_t count) {
  if (count == kLanes) return store(at, value);
  std::memcpy(at, &value, count * sizeof(Element));
}

TIDEMILL_INLINE f32 splat(float value) { return value - f32{}; }

#ifdef TIDEMILL_AVX512
TIDEMILL_INLINE f32 max(f32 a, f32 b) { return (f32)_mm512_max_ps((__m512)a, (__m512)b); }
TIDEMILL_INLINE f32 min(f32 a, f32 b) { return (f32)_mm512_min_ps((__m512)a, (__m512)b); }
TIDEMILL_INLINE bool any(i32 mask) {
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
}
#else
union Halves {
  f32 all;
  __m256 half[2];
};
TIDEMILL_INLINE f32 max(f32 a, f32 b) {
  const Halves x{a}, y{b};
  Halves result;
  for (int i = 0; i < 2; ++i) result.half[i] = _mm256_max_ps(x.half[i], y.half[i]);
  return result.all;
}
TIDEMILL_INLINE f32 min(f32 a, f32 b) {
  const Halves x{a}, y{b};
  Halves result;
  for (int i = 0; i < 2; ++i) result.half[i] = _mm256_min_ps(x.half[i], y.half[i]);
  return result.all;
}
TIDEMILL_INLINE bool any(i32 mask) {
  const Halves x{(f32)mask};
  return _mm256_movemask_ps(_mm256_or_ps(x.half[0], x.half[1])) != 0;
}
#endif

TIDEMILL_INLINE f32 from_bf16(u16 value) {
  return (f32)(__builtin_convertvector(value, u32) << 16);
}

// The upper halves of the sums below are the values rounded to bfloat16, ties to even. NaN is
// kept as long as its payload does not overflow, which quiet NaNs' payloads do not.
TIDEMILL_INLINE u32 round_bf16(f32 value) {
  const u32 bits = (u32)value;
  return bits + 0x7fff + ((bits >> 16) & 1);
}

TIDEMILL_INLINE u16 to_bf16(f32 value) {
#ifdef TIDEMILL_AVX512_BF16
  return (u16)_mm512_cvtneps_pbh((__m512)value);
#else
  return __builtin_convertvector(round_bf16(value) >> 16, u16);
#endif
}

// Two vectors as 16 pairs: the layout in which vdpbf16ps and AMX take their second operand.
TIDEMILL_INLINE u32 to_bf16_pairs(f32 even, f32 odd) {
#ifdef TIDEMILL_AVX512_BF16
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  alignas(64) static constexpr uint16_t kInterleave[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (u32)_mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), halves);
#else
  return (round_bf16(even) >> 16) | (round_bf16(odd) & 0xffff0000u);
#endif
}

// 1 / x to at least 20 bits.
TIDEMILL_INLINE f32 reciprocal(f32 x) {
#ifdef TIDEMILL_AVX512
  const f32 guess = (f32)_mm512_rcp14_ps((__m512)x);
#else
  Halves halves{x};
  for (__m256& half : halves.half) half = _mm256_rcp_ps(half);
  const f32 guess = halves.all;
#endif
  return guess * (2.0f - x * guess);
}

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer

// 2^x to 2e-7 relative, for x clamped to [-126, 127].
TIDEMILL_INLINE f32 exp2(f32 x) {
  x = min(max(x, splat(-126.0f)), splat(127.0f));
  const f32 rounded = x + kRound;
  const f32 f = x - (rounded - kRound);  // [-0.5, 0.5]
  f32 p = f * 1.3276475e-3f + 9.6755433e-3f;
  p = p * f + 5.5507132e-2f;
  p = p * f + 2.4022120e-1f;
  p = p * f + 6.9314697e-1f;
  p = p * f + 1.0f;
  return (f32)((i32)p + ((i32)rounded << 23));
}

// 2^x to 8e-5 relative, a twentieth of bf16's rounding, for x at most 127. What is far below 1 may
// become 0 or stop at 2^-100: not 2^-126, lest products become denormal numbers, which many CPUs
// handle slowly.
TIDEMILL_INLINE f32 exp2_for_bf16(f32 x) {
#ifdef TIDEMILL_AVX512
  const f32 f = (f32)_mm512_reduce_ps((__m512)x, 0);  // x - round(x)
#else
  x = max(x, splat(-100.0f));
  const f32 rounded = x + kRound;
  const f32 f = x - (rounded - kRound);
#endif
  f32 p = f * 5.5171646e-2f + 2.4261112e-1f;
  p = p * f + 6.9326099e-1f;
  p = p * f + 9.9992807e-1f;
#ifdef TIDEMILL_AVX512
  return (f32)_mm512_scalef_ps((__m512)p, (__m512)(x - f));
#else
  return (f32)((i32)p + ((i32)rounded << 23));
#endif
}

constexpr float kLog2e = 1.44269504f;

TIDEMILL_INLINE f32 sigmoid(f32 x) { return reciprocal(1.0f + exp2(x * -kLog2e)); }

// tanh(x) = 2 sigmoid(2x) - 1
TIDEMILL_INLINE f32 tanh(f32 x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }

TIDEMILL_INLINE f32 silu(f32 x) { return x * sigmoid(x); }

// x * (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2
TIDEMILL_INLINE f32 gelu_tanh(f32 x) {
  return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
}

// rows[i][j] <-> rows[j][i]
#ifdef TIDEMILL_AVX512
TIDEMILL_INLINE void transpose(u32 (&rows)[kLanes]) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // b[i + c]: column c of each 128-bit lane, rows i … i + 3
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512i even_low = _mm512_shuffle_i32x4(b[c], b[c + 4], 0x88);  // lanes 0, 2
    const __m512i odd_low = _mm512_shuffle_i32x4(b[c], b[c + 4], 0xdd);   // lanes 1, 3
    const __m512i even_high = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0xdd);
    rows[c] = (u32)_mm512_shuffle_i32x4(even_low, even_high, 0x88);
    rows[c + 4] = (u32)_mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    rows[c + 8] = (u32)_mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    rows[c + 12] = (u32)_mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
}
#else
TIDEMILL_INLINE void transpose8(__m256 (&rows)[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int c = 0; c < 4; ++c) {
    rows[c] = _mm256_permute2f128_ps(b[c], b[c + 4], 0x20);
    rows[c + 4] = _mm256_permute2f128_ps(b[c], b[c + 4], 0x31);
  }
}

TIDEMILL_INLINE void transpose(u32 (&rows)[kLanes]) {
  __m256 quarters[2][2][8];  // [rows' half][columns' half]
  for (int i = 0; i < 16; ++i) {
    const Halves row{(f32)rows[i]};
    for (int half = 0; half < 2; ++half) quarters[i / 8][half][i % 8] = row.half[half];
  }
  for (auto& pair : quarters) {
    for (auto& quarter : pair) transpose8(quarter);
  }
  for (int i = 0; i < 16; ++i) {
    Halves row;
    for (int half = 0; half < 2; ++half) row.half[half] = quarters[half][i / 8][i % 8];
    rows[i] = (u32)row.all;
  }
}
#endif

}  // namespace
}  // namespace tidemill
