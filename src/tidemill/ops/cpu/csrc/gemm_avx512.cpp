// Many-row kernels for CPUs with AVX-512F but no bf16 arithmetic: operands widened to float.
#include "attention_prefill.h"
#include "gemm.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#define TIDEMILL_AVX512

#include "attention_prefill_loop.h"
#include "gemm_loop.h"

namespace tidemill {
namespace {

class Avx512Kernel {
 public:
  using Operand = float;
  using RowOperand = float;
  static constexpr int kTile = kPanelRows * kBlockColumns;
  static constexpr int kRowTile = kBlockColumns;
  static constexpr int kRows = 12;  // 24 sums, two panels and one broadcast fill 32 registers
  static constexpr int64_t kGroupBytes = 384 << 10;  // of at least 1 MiB of L2
  static constexpr int64_t kChunk = 2048;

  static int block_rows(int64_t left) { return even_block(left, kRows); }

  static Rows<Operand> rows_of(const uint16_t* x, ptrdiff_t stride, int rows, int64_t k,
                               Operand* scratch) {
    return widen(x, stride, rows, k, scratch);
  }

  template <class Aside>
  void multiply(Rows<Operand> a, int rows, const Operand* b0, const Operand* b1, int64_t k,
                float* c, bool accumulate, Aside) {
    with_rows<kRows>(rows, [&](auto count) {
      constexpr int R = count;
      __m512 sums[R][2];
      for (int r = 0; r < R; ++r) {
        for (int half = 0; half < 2; ++half) {
          sums[r][half] = accumulate ? load<__m512>(c + (2 * r + half) * kLanes) : __m512{};
        }
      }
      for (int64_t i = 0; i < k; ++i) {
        const auto first = load<__m512>(b0 + i * kLanes);
        const auto second = load<__m512>(b1 + i * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const __m512 value = _mm512_set1_ps(a.at[r * a.stride + i]);
          sums[r][0] = _mm512_fmadd_ps(value, first, sums[r][0]);
          sums[r][1] = _mm512_fmadd_ps(value, second, sums[r][1]);
        }
      }
      for (int r = 0; r < R; ++r) {
        for (int half = 0; half < 2; ++half) store(c + (2 * r + half) * kLanes, sums[r][half]);
      }
    });
  }
};

}  // namespace

void gemm_avx512(const Gemm& g, int thread, int threads, void* scratch) {
  gemm_part<Avx512Kernel>(g, thread, threads, scratch);
}

void attention_prefill_avx512(const PrefillAttention& a, int thread, int threads, void* scratch) {
  attention_prefill_part<Avx512Kernel>(a, thread, threads, scratch);
}

}  // namespace tidemill
