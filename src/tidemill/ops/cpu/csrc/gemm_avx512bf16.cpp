// Many-row kernels for CPUs with vdpbf16ps at full rate and no AMX (AMD Zen 4 and later).
#include "attention_prefill.h"
#include "gemm.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")
#define TIDEMILL_AVX512
#define TIDEMILL_AVX512_BF16

#include "attention_prefill_loop.h"
#include "gemm_loop.h"

namespace tidemill {
namespace {

class Bf16Kernel {
 public:
  using Operand = uint16_t;
  using RowOperand = uint16_t;
  static constexpr int kTile = kPanelRows * kBlockColumns;
  static constexpr int kRowTile = kBlockColumns;
  static constexpr int kRows = 12;  // 24 sums, two panels and one broadcast fill 32 registers
  static constexpr int64_t kGroupBytes = 384 << 10;  // of at least 1 MiB of L2
  static constexpr int64_t kChunk = 2048;

  static int block_rows(int64_t left) { return even_block(left, kRows); }

  static Rows<Operand> rows_of(const uint16_t* x, ptrdiff_t stride, int, int64_t, Operand*) {
    return {x, stride};
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
      for (int64_t i = 0; i < k; i += 2) {
        const auto first = load<__m512bh>(b0 + i * kLanes);
        const auto second = load<__m512bh>(b1 + i * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const auto pair = (__m512bh)_mm512_set1_epi32(load<int>(a.at + r * a.stride + i));
          sums[r][0] = _mm512_dpbf16_ps(sums[r][0], first, pair);
          sums[r][1] = _mm512_dpbf16_ps(sums[r][1], second, pair);
        }
      }
      for (int r = 0; r < R; ++r) {
        for (int half = 0; half < 2; ++half) store(c + (2 * r + half) * kLanes, sums[r][half]);
      }
    });
  }
};

}  // namespace

void gemm_avx512bf16(const Gemm& g, int thread, int threads, void* scratch) {
  gemm_part<Bf16Kernel>(g, thread, threads, scratch);
}

void attention_prefill_avx512bf16(const PrefillAttention& a, int thread, int threads, void* scratch) {
  attention_prefill_part<Bf16Kernel>(a, thread, threads, scratch);
}

}  // namespace tidemill
