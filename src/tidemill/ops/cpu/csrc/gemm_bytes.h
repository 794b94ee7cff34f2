// What the integer GEMM kernels share: rows of x rounded to int8, each 32 of k with their own
// scale (as llama.cpp rounds activations to Q8), and packed weights as bytes (ByteTile).
//
// With x = s q and w = t p + m over a block: sum(x w) = s t sum(q p) + m sum(s q), where sum(q p)
// is exact in integers.
#pragma once

#include "gemm_loop.h"

namespace tidemill {
namespace {

struct ByteRow {
  int8_t q[kBlockColumns];
  float scale, sum;  // sum: of the 32 values scale * q
};

TIDEMILL_INLINE float reduce_max(f32 x) {
#ifdef TIDEMILL_AVX512
  return _mm512_reduce_max_ps((__m512)x);
#else
  const Halves halves{x};
  const __m256 eight = _mm256_max_ps(halves.half[0], halves.half[1]);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#endif
}

TIDEMILL_INLINE int reduce_add(i32 x) {
#ifdef TIDEMILL_AVX512
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  __m128i quarter[4];
  std::memcpy(quarter, &x, sizeof x);
  __m128i four = _mm_add_epi32(_mm_add_epi32(quarter[0], quarter[1]),
                               _mm_add_epi32(quarter[2], quarter[3]));
  four = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 1)));
#endif
}

TIDEMILL_INLINE __m128i to_int8(i32 x) {
#ifdef TIDEMILL_AVX512
  return _mm512_cvtepi32_epi8((__m512i)x);
#else
  __m128i quarter[4];
  std::memcpy(quarter, &x, sizeof x);
  return _mm_packs_epi16(_mm_packs_epi32(quarter[0], quarter[1]),
                         _mm_packs_epi32(quarter[2], quarter[3]));
#endif
}

inline void quantize(const uint16_t* x, ByteRow& to) {
  const f32 low = from_bf16(load<u16>(x)), high = from_bf16(load<u16>(x + kLanes));
  const float most = reduce_max(max(max(low, -low), max(high, -high)));
  const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
  const i32 zero = (i32)splat(kRound);
  const i32 q_low = (i32)(low * inverse + kRound) - zero;
  const i32 q_high = (i32)(high * inverse + kRound) - zero;
  store(to.q, to_int8(q_low));
  store(to.q + kLanes, to_int8(q_high));
  to.scale = most / 127.0f;
  to.sum = to.scale * static_cast<float>(reduce_add(q_low + q_high));
}

inline Rows<ByteRow> quantize_rows(const uint16_t* x, ptrdiff_t stride, int rows, int64_t k,
                                   ByteRow* scratch) {
  const int64_t blocks = k / kBlockColumns;
  for (int r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < blocks; ++i) {
      quantize(x + r * stride + i * kBlockColumns, scratch[r * blocks + i]);
    }
  }
  return {scratch, blocks};
}

}  // namespace
}  // namespace tidemill
