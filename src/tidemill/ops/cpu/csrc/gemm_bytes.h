// What the integer GEMM kernels share: rows of x rounded to int8 (see QuantizedBlock) and packed
// weights as bytes (ByteTile).
#pragma once

#include "gemm_loop.h"
#include "step_kernels.h"

namespace tidemill {
namespace {

// The largest magnitude of 32 bf16 values. Without their signs, bf16 values order as integers do.
TIDEMILL_INLINE float most_of(__m256i low, __m256i high) {
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  const __m256i half =
      _mm256_max_epu16(_mm256_and_si256(low, magnitude), _mm256_and_si256(high, magnitude));
  const __m128i eight =
      _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  // The one horizontal instruction finds a minimum: of the complements.
  const int least = _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((~least & 0x7fff) << 16)));
}

TIDEMILL_INLINE int sum_of(__m256i bytes) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
  const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
  sums = _mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums));
  return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 1)));
}

inline void quantize(const uint16_t* x, QuantizedBlock& to) {
  const float most = most_of(load<__m256i>(x), load<__m256i>(x + 16));
  const __m256 inverse = _mm256_set1_ps(most > 0.0f ? 127.0f / most : 0.0f);
  __m256i q[4];
  for (int i = 0; i < 4; ++i) {
    const __m256i wide = _mm256_cvtepu16_epi32(load<__m128i>(x + 8 * i));
    const __m256 value = _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    q[i] = _mm256_cvtps_epi32(value * inverse);
  }
  // Packing works within 128-bit lanes; the permutation puts the groups of four back in order.
  const __m256i bytes = _mm256_permutevar8x32_epi32(
      _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3])),
      _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  store(to.q, bytes);
  to.scale = most * (1.0f / 127.0f);
  to.sum = to.scale * static_cast<float>(sum_of(bytes));
}

inline Rows<QuantizedBlock> quantize_rows(const uint16_t* x, ptrdiff_t stride, int rows, int64_t k,
                                   QuantizedBlock* scratch) {
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
