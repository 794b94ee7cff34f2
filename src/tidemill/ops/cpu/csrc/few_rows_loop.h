// Products with few rows: weights stream from memory once, in the order in which they lie there,
// and every load of them serves up to kMostRows rows. There are no horizontal sums: a lane of a
// vector belongs to one output. Include after a target pragma, as gemm_vector.h.
#pragma once

#include "gemm_loop.h"
#include "native_vector.h"
#include "step_kernels.h"

namespace tidemill {
namespace {

#ifdef TIDEMILL_AVX512
constexpr int kMostRows = 8;  // 8 sums, 8 vectors of weights, their scales and minima
#else
constexpr int kMostRows = 3;  // 6 sums, 8 vectors of weights
#endif
constexpr int kSlices = kPanelRows / kFloats;  // vectors that make a panel's width

// The weights of a slice's block as eight vectors of four columns each, and their product with a
// row's 32 int8 values.
struct Nibbles {
  explicit Nibbles(const uint8_t* at) {
    for (int v = 0; v < 4; ++v) {
      const Ints bits = load<Ints>(at + 64 * v);
      q[2 * v] = bits & splat_bytes(15);
      q[2 * v + 1] = high_nibbles(bits);
    }
  }
  Ints q[8];
};

struct Bytes {
  explicit Bytes(const uint8_t* at) {
    for (int v = 0; v < 8; ++v) q[v] = load<Ints>(at + 64 * v);
  }
  Ints q[8];
};

#if defined(TIDEMILL_VNNI)
TIDEMILL_INLINE Ints dot_four(Ints sums, Ints q, Ints x) {
#ifdef TIDEMILL_AVX512
  return _mm512_dpbusd_epi32(sums, q, x);
#else
  return _mm256_dpbusd_avx_epi32(sums, q, x);
#endif
}

template <class Weights>
TIDEMILL_INLINE Ints dot(const Weights& w, const int8_t* x) {
  Ints sums[2] = {};  // two chains: the instruction takes five cycles
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) sums[v % 2] = dot_four(sums[v % 2], w.q[v], broadcast(x + 4 * v));
  return (Ints)((Words)sums[0] + (Words)sums[1]);
}
#else
TIDEMILL_INLINE Ints multiply_pairs(Ints q, Ints x) {
#ifdef TIDEMILL_AVX512
  return _mm512_maddubs_epi16(q, x);
#else
  return _mm256_maddubs_epi16(q, x);
#endif
}

TIDEMILL_INLINE Ints add_pairs(Ints sums, int16_t factor) {
#ifdef TIDEMILL_AVX512
  return _mm512_madd_epi16(sums, splat_shorts(factor));
#else
  return _mm256_madd_epi16(sums, splat_shorts(factor));
#endif
}

// Sums stay in 16 bits for the whole block: 16 products of at most 15 * 127 do not overflow.
TIDEMILL_INLINE Ints dot(const Nibbles& w, const int8_t* x) {
  Shorts sums{};
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) sums += (Shorts)multiply_pairs(w.q[v], broadcast(x + 4 * v));
  return add_pairs((Ints)sums, 1);
}

TIDEMILL_INLINE Ints dot(const Bytes& w, const int8_t* x) {
  Shorts low{}, high{};
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) {
    const Ints four = broadcast(x + 4 * v);
    low += (Shorts)multiply_pairs(w.q[v] & splat_bytes(15), four);
    high += (Shorts)multiply_pairs(high_nibbles(w.q[v]), four);
  }
  return (Ints)((Words)add_pairs((Ints)low, 1) + (Words)add_pairs((Ints)high, 16));
}
#endif

// Ahead of what the hardware fetches by itself, which stops at every page.
constexpr int kPrefetchBytes = 2048;

template <int kBytes>
TIDEMILL_INLINE void prefetch(const uint8_t* at) {
#pragma GCC unroll 16
  for (int i = 0; i < kBytes; i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(at + kPrefetchBytes + i), _MM_HINT_T0);
  }
}

// c[R][32] = R rows times one panel of integers.
template <int R, class Weights, int kBytes>
TIDEMILL_INLINE void multiply_panel(const uint8_t* at, int64_t blocks, const QuantizedBlock* x,
                                    float* c) {
  Floats sums[R][kSlices] = {};
  for (int64_t b = 0; b < blocks; ++b, at += kBytes) {
    prefetch<kBytes>(at);
    for (int slice = 0; slice < kSlices; ++slice) {
      const Weights weights(at + 64 + slice * sizeof(Ints));
      const Floats scale = halves_to_floats(at + 2 * kFloats * slice);
      const Floats min = halves_to_floats(at + 32 + 2 * kFloats * slice);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const QuantizedBlock& block = x[r * blocks + b];
        const Floats dots = to_floats(dot(weights, block.q));
        Floats& sum = sums[r][slice];
        sum = multiply_add(dots, scale * splat_floats(block.scale), sum);
        sum = multiply_add(min, splat_floats(block.sum), sum);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int slice = 0; slice < kSlices; ++slice) {
      store(c + 2 * kLanes * r + kFloats * slice, sums[r][slice]);
    }
  }
}

// The same for a panel of bf16, whose lanes hold two columns each.
template <int R>
TIDEMILL_INLINE void multiply_panel(const uint8_t* at, int64_t blocks, const float* x, float* c) {
  constexpr int kBytes = block_bytes(Format::bf16);
  const int64_t columns = blocks * kBlockColumns;
  f32 sums[R][2] = {};
  for (int64_t b = 0; b < blocks; ++b, at += kBytes, x += kBlockColumns) {
    prefetch<kBytes>(at);
#pragma GCC unroll 4
    for (int i = 0; i < kBlockColumns / 2; ++i) {
      const u32 pair = load<u32>(at + 64 * i);
      const f32 even = (f32)(pair << 16), odd = (f32)(pair & 0xffff0000u);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        sums[r][0] += even * x[r * columns + 2 * i];
        sums[r][1] += odd * x[r * columns + 2 * i + 1];
      }
    }
  }
  for (int r = 0; r < R; ++r) store(c + 2 * kLanes * r, sums[r][0] + sums[r][1]);
}

template <int R>
TIDEMILL_INLINE void multiply_panel(const PackedWeight& w, int64_t panel, const void* x, int64_t row,
                                    float* c) {
  const int64_t blocks = w.columns / kBlockColumns;
  const uint8_t* at = w.data + panel * blocks * block_bytes(w.format);
  if (w.format == Format::bf16) {
    return multiply_panel<R>(at, blocks, static_cast<const float*>(x) + row * w.columns, c);
  }
  const auto* quantized = static_cast<const QuantizedBlock*>(x) + row * blocks;
  if (w.format == Format::u4) {
    return multiply_panel<R, Nibbles, block_bytes(Format::u4)>(at, blocks, quantized, c);
  }
  multiply_panel<R, Bytes, block_bytes(Format::u8)>(at, blocks, quantized, c);
}

void few_rows(const Gemm& g, const void* x, int64_t begin, int64_t end) {
  const PackedWeight& w = *g.weight;
  const int64_t panels = (w.rows + kPanelRows - 1) / kPanelRows;
  const bool gated = g.output == Gemm::Output::gated;
  alignas(64) float c[kMostRows * 2 * kLanes];
  for (int64_t pair = begin; pair < end; ++pair) {
    const int64_t first = gated ? pair : 2 * pair;
    const int64_t second = gated ? first + panels / 2 : first + 1;
    for (int64_t row = 0, count; row < g.rows; row += count) {
      count = even_block(g.rows - row, kMostRows);
      with_rows<kMostRows>(static_cast<int>(count), [&](auto rows) {
        multiply_panel<rows>(w, first, x, row, c);
        if (second < panels) multiply_panel<rows>(w, second, x, row, c + kLanes);
      });
      finish(g, row, static_cast<int>(count), pair, c);
    }
  }
}

}  // namespace
}  // namespace tidemill
