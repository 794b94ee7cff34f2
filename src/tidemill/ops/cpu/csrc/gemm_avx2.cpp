// Many-row kernels for CPUs with AVX2 and FMA: operands widened to float.
#include "attention_prefill.h"
#include "gemm.h"

#pragma GCC target("avx2,fma,f16c")

#include "attention_prefill_loop.h"
#include "gemm_loop.h"

namespace tidemill {
namespace {

class Avx2Kernel {
 public:
  using Operand = float;
  using RowOperand = float;
  static constexpr int kTile = kPanelRows * kBlockColumns;
  static constexpr int kRowTile = kBlockColumns;
  static constexpr int kRows = 6;  // 12 sums, one panel and one broadcast fill 16 registers
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
      for (const Operand* b : {b0, b1}) {
        __m256 sums[R][2];
        for (int r = 0; r < R; ++r) {
          for (int half = 0; half < 2; ++half) {
            sums[r][half] =
                accumulate ? _mm256_loadu_ps(c + 2 * r * kLanes + half * 8) : __m256{};
          }
        }
        for (int64_t i = 0; i < k; ++i) {
          const __m256 first = _mm256_loadu_ps(b + i * kLanes);
          const __m256 second = _mm256_loadu_ps(b + i * kLanes + 8);
#pragma GCC unroll 6
          for (int r = 0; r < R; ++r) {
            const __m256 value = _mm256_broadcast_ss(a.at + r * a.stride + i);
            sums[r][0] = _mm256_fmadd_ps(value, first, sums[r][0]);
            sums[r][1] = _mm256_fmadd_ps(value, second, sums[r][1]);
          }
        }
        for (int r = 0; r < R; ++r) {
          for (int half = 0; half < 2; ++half) {
            _mm256_storeu_ps(c + 2 * r * kLanes + half * 8, sums[r][half]);
          }
        }
        c += kLanes;
      }
    });
  }
};

}  // namespace

void gemm_avx2(const Gemm& g, int thread, int threads, void* scratch) {
  gemm_part<Avx2Kernel>(g, thread, threads, scratch);
}

void attention_prefill_avx2(const PrefillAttention& a, int thread, int threads, void* scratch) {
  attention_prefill_part<Avx2Kernel>(a, thread, threads, scratch);
}

}  // namespace tidemill
