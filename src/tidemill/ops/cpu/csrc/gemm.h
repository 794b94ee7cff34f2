// Matrix products with many rows: out[rows, n] = x[rows, k] · W[n, k]^T on packed weights.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "packed.h"

namespace tidemill {

enum class Activation { silu, gelu_tanh };

struct Gemm {
  enum class Output {
    f32,      // out float: the product
    bf16,     // out bf16: the product
    add_f32,  // out float: += the product (the residual stream)
    gated,    // out bf16, n / 2 wide: activation(gate) * up; W is gate's rows, then up's
  };

  const uint16_t* x;  // bf16[rows][x_stride]
  ptrdiff_t x_stride;
  int64_t rows;
  const PackedWeight* weight;
  const float* bias;  // float[n], or null
  Output output;
  Activation activation;  // read when gated, where n / 2 must be a multiple of 16
  void* out;
  ptrdiff_t out_stride;  // elements
};

// Every thread of a pool calls this with the same `g`; each computes its own part of the outputs.
// `scratch`: kGemmScratchBytes of its own, aligned to 64.
using GemmFunction = void(const Gemm& g, int thread, int threads, void* scratch);

GemmFunction gemm_amx, gemm_avx512bf16, gemm_avx512, gemm_avx2;
// For u4 and u8 weights alone.
GemmFunction gemm_avx512vnni, gemm_avxvnni;

constexpr size_t kGemmScratchBytes = 8 << 20;  // rarely touched beyond the first

// Cuts a thread's scratch memory into arrays.
class Arena {
 public:
  explicit Arena(void* memory) : next_(static_cast<char*>(memory)) {}

  template <class T>
  T* take(int64_t count) {
    T* result = reinterpret_cast<T*>(next_);
    next_ += (count * sizeof(T) + 63) / 64 * 64;
    return result;
  }

 private:
  char* next_;
};

}  // namespace tidemill
