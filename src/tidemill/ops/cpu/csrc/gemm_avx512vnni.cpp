// GEMM on quantized weights for CPUs with AVX-512 VNNI and no AMX.
#include "gemm.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c")
#define TIDEMILL_AVX512

#include "gemm_bytes.h"

namespace tidemill {
namespace {

class VnniKernel {
 public:
  using Operand = ByteTile;
  using RowOperand = QuantizedBlock;
  static constexpr int kTile = 1;
  static constexpr int kRowTile = 1;
  static constexpr int kRows = 12;  // 12 sums, 8 vectors of weights, their scales and minima
  // Of at least 1 MiB of L2. Rows are rounded again for every group.
  static constexpr int64_t kGroupBytes = 512 << 10;
  static constexpr int64_t kChunk = 2048;

  static int block_rows(int64_t left) { return even_block(left, kRows); }

  static Rows<QuantizedBlock> rows_of(const uint16_t* x, ptrdiff_t stride, int rows, int64_t k,
                               QuantizedBlock* scratch) {
    return quantize_rows(x, stride, rows, k, scratch);
  }

  template <class Aside>
  void multiply(Rows<QuantizedBlock> a, int rows, const ByteTile* b0, const ByteTile* b1, int64_t k,
                float* c, bool accumulate, Aside) {
    with_rows<kRows>(rows, [&](auto count) {
      constexpr int R = count;
      for (const ByteTile* b : {b0, b1}) {
        __m512 sums[R];
        for (int r = 0; r < R; ++r) {
          sums[r] = accumulate ? load<__m512>(c + 2 * r * kLanes) : __m512{};
        }
        for (int64_t i = 0; i < k / kBlockColumns; ++i, ++b) {
          __m512i q[8];
          for (int v = 0; v < 8; ++v) q[v] = load<__m512i>(b->q[v]);
          const auto scale = load<__m512>(b->scale);
          const auto min = load<__m512>(b->min);
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) {
            const QuantizedBlock& row = a.at[r * a.stride + i];
            __m512i dot{};
            for (int v = 0; v < 8; ++v) {
              dot = _mm512_dpbusd_epi32(dot, q[v], _mm512_set1_epi32(load<int>(row.q + 4 * v)));
            }
            sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale * row.scale, sums[r]);
            sums[r] = _mm512_fmadd_ps(min, _mm512_set1_ps(row.sum), sums[r]);
          }
        }
        for (int r = 0; r < R; ++r) store(c + 2 * r * kLanes, sums[r]);
        c += kLanes;
      }
    });
  }
};

}  // namespace

void gemm_avx512vnni(const Gemm& g, int thread, int threads, void* scratch) {
  gemm_part<VnniKernel>(g, thread, threads, scratch);
}

}  // namespace tidemill
