// Many-row kernels for CPUs with AMX: bf16 tiles of 16 × 32 times 32 × 16, fp32 sums.
#include "attention_prefill.h"
#include "gemm.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,amx-tile,amx-bf16")
#define TIDEMILL_AVX512
#define TIDEMILL_AVX512_BF16

#include "attention_prefill_loop.h"
#include "gemm_loop.h"

namespace tidemill {
namespace {

// Tiles 0-3 hold sums (row half × panel), 4 and 5 the two halves of a's rows, 6 and 7 the panels.
class AmxKernel {
 public:
  using Operand = uint16_t;
  using RowOperand = uint16_t;
  static constexpr int kTile = kPanelRows * kBlockColumns;
  static constexpr int kRowTile = kBlockColumns;
  static constexpr int kRows = 32;
  static constexpr int64_t kGroupBytes = 768 << 10;  // of at least 2 MiB of L2
  static constexpr int64_t kChunk = 640;             // 32 rows: 40 of 48 KiB of L1

  AmxKernel() = default;
  AmxKernel(const AmxKernel&) = delete;
  AmxKernel& operator=(const AmxKernel&) = delete;
  ~AmxKernel() { _tile_release(); }  // an unreleased state costs every context switch 8 KiB

  static int block_rows(int64_t left) { return left < kRows ? static_cast<int>(left) : kRows; }

  static Rows<Operand> rows_of(const uint16_t* x, ptrdiff_t stride, int, int64_t, Operand*) {
    return {x, stride};
  }

  // The panels are read with the streaming hint: they pass through from L2 while a's rows stay in
  // L1. (Measured: 1.4 times as fast as plain loads.)
  template <class Aside>
  void multiply(Rows<Operand> a, int rows, const Operand* b0, const Operand* b1, int64_t k,
                float* c, bool accumulate, Aside aside) {
    configure(rows);
    asm volatile("" ::: "memory");  // the tile loads below are not known to read memory
    constexpr ptrdiff_t kStrideC = 2 * kLanes * sizeof(float);
    constexpr ptrdiff_t kStrideB = 64;
    const ptrdiff_t stride_a = a.stride * sizeof(Operand);
    float* c_low = c + 16 * 2 * kLanes;
    if (rows <= 16) {
      if (accumulate) {
        _tile_loadd(0, c, kStrideC);
        _tile_loadd(1, c + kLanes, kStrideC);
      } else {
        _tile_zero(0);
        _tile_zero(1);
      }
      for (; k > 0; k -= 32, a.at += 32, b0 += kTile, b1 += kTile) {
        _tile_loadd(4, a.at, stride_a);
        _tile_stream_loadd(6, b0, kStrideB);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stream_loadd(7, b1, kStrideB);
        _tile_dpbf16ps(1, 4, 7);
        aside();
      }
      _tile_stored(0, c, kStrideC);
      _tile_stored(1, c + kLanes, kStrideC);
      return;
    }
    if (accumulate) {
      _tile_loadd(0, c, kStrideC);
      _tile_loadd(1, c + kLanes, kStrideC);
      _tile_loadd(2, c_low, kStrideC);
      _tile_loadd(3, c_low + kLanes, kStrideC);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const Operand* a_low = a.at + 16 * a.stride;
    for (; k > 0; k -= 32, a.at += 32, a_low += 32, b0 += kTile, b1 += kTile) {
      _tile_stream_loadd(6, b0, kStrideB);
      _tile_loadd(4, a.at, stride_a);
      _tile_dpbf16ps(0, 4, 6);
      _tile_stream_loadd(7, b1, kStrideB);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a_low, stride_a);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      aside();
    }
    _tile_stored(0, c, kStrideC);
    _tile_stored(1, c + kLanes, kStrideC);
    _tile_stored(2, c_low, kStrideC);
    _tile_stored(3, c_low + kLanes, kStrideC);
  }

 private:
  // Tiles of exactly the rows there are: nothing beyond them is read or computed.
  void configure(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    struct alignas(64) {
      uint8_t palette = 1;
      uint8_t start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const auto high = static_cast<uint8_t>(rows < 16 ? rows : 16);
    const auto low = static_cast<uint8_t>(rows < 17 ? 1 : rows - 16);
    const uint8_t tile_rows[8] = {high, high, low, low, high, low, 16, 16};
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = tile_rows[tile];
      config.row_bytes[tile] = 64;
    }
    _tile_loadconfig(&config);
  }

  int rows_ = 0;
};

}  // namespace

void gemm_amx(const Gemm& g, int thread, int threads, void* scratch) {
  gemm_part<AmxKernel>(g, thread, threads, scratch);
}

void attention_prefill_amx(const PrefillAttention& a, int thread, int threads, void* scratch) {
  attention_prefill_part<AmxKernel>(a, thread, threads, scratch);
}

}  // namespace tidemill
