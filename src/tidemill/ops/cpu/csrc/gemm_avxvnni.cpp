// GEMM on quantized weights for CPUs with AVX-VNNI and no AVX-512 (laptops since 2021).
#include "gemm.h"

#pragma GCC target("avx2,avxvnni,fma,f16c")

#include "gemm_bytes.h"

namespace tidemill {
namespace {

class AvxVnniKernel {
 public:
  using Operand = ByteTile;
  using RowOperand = QuantizedBlock;
  static constexpr int kTile = 1;
  static constexpr int kRowTile = 1;
  static constexpr int kRows = 6;  // 6 sums in float, 6 in integers, weights and one broadcast
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
        for (int half = 0; half < kLanes; half += 8) {
          __m256 sums[R];
          for (int r = 0; r < R; ++r) {
            sums[r] = accumulate ? load<__m256>(c + 2 * r * kLanes + half) : __m256{};
          }
          for (int64_t i = 0; i < k / kBlockColumns; ++i) {
            __m256i dots[R] = {};
#pragma GCC unroll 8
            for (int v = 0; v < 8; ++v) {
              const auto q = load<__m256i>(b[i].q[v] + 4 * half);
#pragma GCC unroll 6
              for (int r = 0; r < R; ++r) {
                const int four = load<int>(a.at[r * a.stride + i].q + 4 * v);
                dots[r] = _mm256_dpbusd_avx_epi32(dots[r], q, _mm256_set1_epi32(four));
              }
            }
            const auto scale = load<__m256>(b[i].scale + half);
            const auto min = load<__m256>(b[i].min + half);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
              const QuantizedBlock& row = a.at[r * a.stride + i];
              sums[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[r]), scale * row.scale, sums[r]);
              sums[r] = _mm256_fmadd_ps(min, _mm256_set1_ps(row.sum), sums[r]);
            }
          }
          for (int r = 0; r < R; ++r) store(c + 2 * r * kLanes + half, sums[r]);
        }
        c += kLanes;
      }
    });
  }
};

}  // namespace

void gemm_avxvnni(const Gemm& g, int thread, int threads, void* scratch) {
  gemm_part<AvxVnniKernel>(g, thread, threads, scratch);
}

}  // namespace tidemill
