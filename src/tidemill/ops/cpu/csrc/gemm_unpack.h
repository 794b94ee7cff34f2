// From packed panels to operand tiles: for each 32 of k, 16 columns (the panel's output rows) by
// 32 of k. As float: [k][16]. As bf16: [k / 2][16][2], what AMX and vdpbf16ps take.
#pragma once

#include "gemm_vector.h"
#include "packed.h"

namespace tidemill {
namespace {

TIDEMILL_INLINE f32 from_f16(const void* at) {
#ifdef TIDEMILL_AVX512
  return (f32)_mm512_cvtph_ps(load<__m256i>(at));
#else
  union {
    __m256 half[2];
    f32 all;
  } wide;
  wide.half[0] = _mm256_cvtph_ps(load<__m128i>(at));
  wide.half[1] = _mm256_cvtph_ps(load<__m128i>(static_cast<const char*>(at) + 16));
  return wide.all;
#endif
}

// Values k = 2i and 2i + 1 of a tile.
TIDEMILL_INLINE void put(float* tile, int pair, f32 even, f32 odd) {
  store(tile + 2 * pair * kLanes, even);
  store(tile + (2 * pair + 1) * kLanes, odd);
}

TIDEMILL_INLINE void put(uint16_t* tile, int pair, f32 even, f32 odd) {
  store(tile + 2 * pair * kLanes, to_bf16_pairs(even, odd));
}

// What the hardware fetches by itself stops at every page.
TIDEMILL_INLINE void prefetch_block(const uint8_t* at, int64_t size) {
  constexpr int64_t kAhead = 4096;
  for (int64_t line = 0; line < size; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(at + kAhead + line), _MM_HINT_T0);
  }
}

// Bytes as they are, for integer arithmetic: value = scale * q + min.
struct alignas(64) ByteTile {
  uint8_t q[8][64];  // [k / 4][16 columns][4]
  float scale[kPanelRows], min[kPanelRows];
};

inline void unpack(const PackedWeight& w, int64_t panel, int64_t k0, int64_t k, ByteTile* tile) {
  const int64_t size = block_bytes(w.format);
  const uint8_t* at = w.data + (panel * (w.columns / kBlockColumns) + k0 / kBlockColumns) * size;
  for (int64_t block = 0; block < k / kBlockColumns; ++block, at += size, ++tile) {
    prefetch_block(at, size);
    store(tile->scale, from_f16(at));
    store(tile->min, from_f16(at + 32));
    const uint8_t* q = at + 64;
    if (w.format == Format::u8) {
      std::memcpy(tile->q, q, sizeof tile->q);
    } else {
      for (int v = 0; v < 4; ++v) {
        const u32 bits = load<u32>(q + 64 * v);
        store(tile->q[2 * v], bits & 0x0f0f0f0fu);
        store(tile->q[2 * v + 1], (bits >> 4) & 0x0f0f0f0fu);
      }
    }
  }
}

// q of a nibble as a float without a conversion: its bits become the upper mantissa bits of 1.0.
TIDEMILL_INLINE f32 one_plus_sixteenths(u32 bits, int from) {
  constexpr int kTo = 19;  // of 23 mantissa bits
  const u32 placed = from < kTo ? bits << (kTo - from) : bits >> (from - kTo);
  return (f32)((placed & (15u << kTo)) | 0x3f800000u);
}

inline void unpack_u4(const uint8_t* q, f32 scale, f32 min, auto* tile) {
  const f32 scale16 = scale * 16.0f;  // scale * q + min = scale16 * (1 + q / 16) + (min - scale16)
  const f32 rest = min - scale16;
  for (int v = 0; v < 4; ++v) {
    const u32 bits = load<u32>(q + 64 * v);
    const auto value = [&](int i) {  // k = 8v + i: four bytes' low nibbles, then the high ones
      return one_plus_sixteenths(bits, 8 * (i % 4) + 4 * (i / 4)) * scale16 + rest;
    };
    for (int i = 0; i < 8; i += 2) put(tile, 4 * v + i / 2, value(i), value(i + 1));
  }
}

inline void unpack_u8(const uint8_t* q, f32 scale, f32 min, auto* tile) {
  for (int v = 0; v < 8; ++v) {
    const u32 bits = load<u32>(q + 64 * v);
    const auto value = [&](int i) {
      return __builtin_convertvector((i32)((bits >> (8 * i)) & 0xffu), f32) * scale + min;
    };
    for (int i = 0; i < 4; i += 2) put(tile, 2 * v + i / 2, value(i), value(i + 1));
  }
}

inline void unpack_bf16(const uint8_t* pairs, float* tile) {
  for (int i = 0; i < kBlockColumns / 2; ++i) {
    const u32 pair = load<u32>(pairs + 64 * i);
    put(tile, i, (f32)(pair << 16), (f32)(pair & 0xffff0000u));
  }
}

template <class Operand>
inline void unpack(const PackedWeight& w, int64_t panel, int64_t k0, int64_t k, Operand* tile) {
  const int64_t size = block_bytes(w.format);
  const uint8_t* at = w.data + (panel * (w.columns / kBlockColumns) + k0 / kBlockColumns) * size;
  for (int64_t block = 0; block < k / kBlockColumns; ++block, at += size) {
    prefetch_block(at, size);
    if constexpr (std::is_same_v<Operand, float>) {
      if (w.format == Format::bf16) {
        unpack_bf16(at, tile);
        tile += kPanelRows * kBlockColumns;
        continue;
      }
    }
    const f32 scale = from_f16(at), min = from_f16(at + 32);
    if (w.format == Format::u4) {
      unpack_u4(at + 64, scale, min, tile);
    } else {
      unpack_u8(at + 64, scale, min, tile);
    }
    tile += kPanelRows * kBlockColumns;
  }
}

// Whether packed panels are operand tiles already, and where they lie.
template <class Operand>
constexpr bool as_it_lies(const PackedWeight& w) {
  return std::is_same_v<Operand, uint16_t> && w.format == Format::bf16;
}

template <class Operand>
inline const Operand* operands_at(const PackedWeight& w, int64_t panel, int64_t k) {
  return reinterpret_cast<const Operand*>(w.data) + (panel * w.columns + k) * kPanelRows;
}

}  // namespace
}  // namespace tidemill
