// Vectors of the width that the CPU has, for loops in which registers are counted. (The 16-lane
// vectors of gemm_vector.h are two registers on AVX2.) Include after a target pragma.
#pragma once

#include "gemm_vector.h"

namespace tidemill {
namespace {

#ifdef TIDEMILL_AVX512
using Floats = __m512;
using Ints = __m512i;
TIDEMILL_INLINE Ints broadcast(const int8_t* four) { return _mm512_set1_epi32(load<int>(four)); }
TIDEMILL_INLINE Ints splat_bytes(int8_t value) { return _mm512_set1_epi8(value); }
TIDEMILL_INLINE Ints splat_shorts(int16_t value) { return _mm512_set1_epi16(value); }
TIDEMILL_INLINE Ints high_nibbles(Ints bits) {
  return _mm512_and_si512(_mm512_srli_epi16(bits, 4), splat_bytes(15));
}
TIDEMILL_INLINE Floats to_floats(Ints value) { return _mm512_cvtepi32_ps(value); }
TIDEMILL_INLINE Floats halves_to_floats(const void* at) {
  return _mm512_cvtph_ps(load<__m256i>(at));
}
TIDEMILL_INLINE Floats splat_floats(float value) { return _mm512_set1_ps(value); }
TIDEMILL_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return _mm512_fmadd_ps(a, b, c);
}
#else
using Floats = __m256;
using Ints = __m256i;
TIDEMILL_INLINE Ints broadcast(const int8_t* four) { return _mm256_set1_epi32(load<int>(four)); }
TIDEMILL_INLINE Ints splat_bytes(int8_t value) { return _mm256_set1_epi8(value); }
TIDEMILL_INLINE Ints splat_shorts(int16_t value) { return _mm256_set1_epi16(value); }
TIDEMILL_INLINE Ints high_nibbles(Ints bits) {
  return _mm256_and_si256(_mm256_srli_epi16(bits, 4), splat_bytes(15));
}
TIDEMILL_INLINE Floats to_floats(Ints value) { return _mm256_cvtepi32_ps(value); }
TIDEMILL_INLINE Floats halves_to_floats(const void* at) {
  return _mm256_cvtph_ps(load<__m128i>(at));
}
TIDEMILL_INLINE Floats splat_floats(float value) { return _mm256_set1_ps(value); }
TIDEMILL_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return _mm256_fmadd_ps(a, b, c);
}
#endif
using Shorts = int16_t __attribute__((vector_size(sizeof(Ints))));
using Words = int32_t __attribute__((vector_size(sizeof(Ints))));
using Bits = uint32_t __attribute__((vector_size(sizeof(Ints))));
constexpr int kFloats = sizeof(Floats) / sizeof(float);

// Result i: the sum of rows[i]'s lanes.
TIDEMILL_INLINE Floats sums_of(const Floats (&rows)[kFloats]) {
#ifdef TIDEMILL_AVX512
  u32 lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = (u32)rows[i];
  transpose(lanes);
  Floats sums = (Floats)lanes[0];
  for (int i = 1; i < kLanes; ++i) sums += (Floats)lanes[i];
  return sums;
#else
  Floats fours[2];  // of rows 4i … 4i + 3: sums of their lower and upper lanes
  for (int i = 0; i < 2; ++i) {
    fours[i] = _mm256_hadd_ps(_mm256_hadd_ps(rows[4 * i], rows[4 * i + 1]),
                              _mm256_hadd_ps(rows[4 * i + 2], rows[4 * i + 3]));
  }
  return _mm256_permute2f128_ps(fours[0], fours[1], 0x20) +
         _mm256_permute2f128_ps(fours[0], fours[1], 0x31);
#endif
}

// bf16 values at `at`, 2 * kFloats of them: those at even places and those at odd ones.
struct Pairs {
  Floats even, odd;
};

TIDEMILL_INLINE Pairs split_pairs(Bits bits) {
  return {(Floats)(bits << 16), (Floats)(bits & 0xffff0000u)};
}

// The inverse, rounding (ties to even).
TIDEMILL_INLINE Bits join_pairs(const Pairs& pairs) {
  const auto round = [](Floats value) {
    const Bits bits = (Bits)value;
    return bits + 0x7fff + ((bits >> 16) & 1);
  };
  return (round(pairs.even) >> 16) | (round(pairs.odd) & 0xffff0000u);
}

}  // namespace
}  // namespace tidemill
