// The blocked loop of the many-row GEMM, for every instruction set.
//
//   for each group of panel pairs that fits in L2 (threads own disjoint pairs)
//     for each block of k
//       unpack the group's weights once into operand tiles             (gemm_unpack.h)
//       for each block of rows of x
//         for each chunk of k for which these rows fit in L1
//           for each pair of panels in the group
//             multiply: rows × 32 outputs, kept in registers over the chunk
//             after the last one: epilogue
//
// So packed weights are read from memory and unpacked once per call, whatever the number of rows
// (up to kRowsAtOnce); rows of x come from L2 or L3 once per group; outputs are written once.
//
// `Kernel` is what an instruction set brings:
//   Operand, kTile           what an operand tile (32 of k × 16 columns) is made of, and how many
//   RowOperand, kRowTile     the same for 32 of k of one row of x
//   kRows                    rows of the largest register block
//   kGroupBytes, kChunk      the group's size in L2, the chunk's columns
//   block_rows(left)         how many rows to take next when `left` remain
//   rows_of(x, ldx, rows, k, scratch) -> Rows<RowOperand>: rows of x as operands
//   multiply(a, rows, b0, b1, k, c, accumulate, aside): c[rows][32] (+)= a[rows][k] · (b0 | b1);
//                            may call aside() now and then for other work to overlap
#pragma once

#include "gemm_unpack.h"
#include "gemm_vector.h"

namespace tidemill {
namespace {

template <class Operand>
struct Rows {
  const Operand* at;
  ptrdiff_t stride;
};

struct Range {
  int64_t begin, end;
};

// Part `index` of `parts` of [0, count), sizes differing by at most one.
inline Range part(int64_t count, int index, int parts) {
  return {count * index / parts, count * (index + 1) / parts};
}

// The next block of rows when `left` remain: as few blocks as can be, of nearly equal sizes.
inline int even_block(int64_t left, int most) {
  const int64_t blocks = (left + most - 1) / most;
  return static_cast<int>((left + blocks - 1) / blocks);
}

// The same for columns, in whole blocks.
inline int64_t even_step(int64_t columns, int64_t most) {
  const int64_t steps = (columns + most - 1) / most;
  return (columns / kBlockColumns + steps - 1) / steps * kBlockColumns;
}

// Calls body(std::integral_constant<int, rows>): register blocks need their size at compile time.
template <int kMost, class Body>
TIDEMILL_INLINE void with_rows(int rows, Body body) {
  if constexpr (kMost > 1) {
    if (rows < kMost) return with_rows<kMost - 1>(rows, body);
  }
  body(std::integral_constant<int, kMost>{});
}

// bf16 rows as float rows, at a stride that keeps them off each other's cache sets.
inline Rows<float> widen(const uint16_t* x, ptrdiff_t stride, int rows, int64_t k, float* scratch) {
  const int64_t wide_stride = k + kLanes;
  for (int r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < k; i += kLanes) {
      store(scratch + r * wide_stride + i, from_bf16(load<u16>(x + r * stride + i)));
    }
  }
  return {scratch, wide_stride};
}

// Bias, activation, conversion and store of c[rows][32], the outputs of one pair of panels.
inline void finish(const Gemm& g, int64_t row, int rows, int64_t pair, const float* c) {
  if (g.output == Gemm::Output::gated) {
    const int64_t column = pair * kPanelRows;
    const int64_t features = g.weight->rows / 2;
    f32 gate_bias{}, up_bias{};
    if (g.bias != nullptr) {
      gate_bias = load<f32>(g.bias + column);
      up_bias = load<f32>(g.bias + features + column);
    }
    auto* out = static_cast<uint16_t*>(g.out) + row * g.out_stride + column;
    for (int r = 0; r < rows; ++r, c += 2 * kLanes, out += g.out_stride) {
      const f32 gate = load<f32>(c) + gate_bias;
      const f32 up = load<f32>(c + kLanes) + up_bias;
      const f32 active = g.activation == Activation::silu ? silu(gate) : gelu_tanh(gate);
      store(out, to_bf16(active * up));
    }
    return;
  }
  for (int half = 0; half < 2; ++half, c += kLanes) {
    const int64_t column = pair * 2 * kPanelRows + half * kPanelRows;
    const int64_t width = std::min<int64_t>(kLanes, g.weight->rows - column);
    if (width <= 0) return;
    const f32 bias = g.bias != nullptr ? load_first<f32>(g.bias + column, width) : f32{};
    const int64_t at = row * g.out_stride + column;
    for (int r = 0; r < rows; ++r) {
      f32 value = load<f32>(c + r * 2 * kLanes) + bias;
      const int64_t here = at + r * g.out_stride;
      if (g.output == Gemm::Output::bf16) {
        store_first(static_cast<uint16_t*>(g.out) + here, to_bf16(value), width);
        continue;
      }
      float* out = static_cast<float*>(g.out) + here;
      if (g.output == Gemm::Output::add_f32) value += load_first<f32>(out, width);
      store_first(out, value, width);
    }
  }
}

// A finished block of sums whose epilogue has yet to run. Kernels whose arithmetic runs beside the
// vector units (AMX) take it two rows at a time between their own steps, which hides it.
class PendingBlock {
 public:
  explicit PendingBlock(const Gemm& g) : g_(g) {}

  void set(int64_t row, int rows, int64_t pair, const float* c) {
    finish_rows(left_);
    row_ = row, left_ = rows, pair_ = pair, c_ = c;
  }

  void step() {
    if (left_ > 0) finish_rows(std::min(left_, 2));
  }

  void drain() { finish_rows(left_); }

 private:
  void finish_rows(int rows) {
    if (rows == 0) return;
    finish(g_, row_, rows, pair_, c_);
    row_ += rows, left_ -= rows, c_ += rows * 2 * kLanes;
  }

  const Gemm& g_;
  int64_t row_ = 0, pair_ = 0;
  int left_ = 0;
  const float* c_ = nullptr;
};

// How threads share the outputs: `across` parts of the panels times `down` parts of the rows.
struct Split {
  int across, down;
};

// The split whose largest part is cheapest. Unpacking a panel costs about what multiplying it with
// kUnpackRows rows does, so few rows are not split, and many threads do not wait for uneven parts.
inline Split split_work(int64_t pairs, int64_t rows, int threads) {
  constexpr int64_t kUnpackRows = 64;
  Split best{};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int down = 1; down <= threads && down <= rows; ++down) {
    const int across = static_cast<int>(std::min<int64_t>(pairs, threads / down));
    const int64_t cost =
        ((pairs + across - 1) / across) * ((rows + down - 1) / down + kUnpackRows);
    if (cost < least) {
      least = cost;
      best = {across, down};
    }
  }
  return best;
}

template <class Kernel>
void gemm_part(const Gemm& g, int thread, int threads, void* scratch) {
  using Operand = typename Kernel::Operand;
  using RowOperand = typename Kernel::RowOperand;
  constexpr int64_t kRowsAtOnce = 2048;
  constexpr int64_t kMaxBlockK = 2048;

  const PackedWeight& w = *g.weight;
  const bool gated = g.output == Gemm::Output::gated;
  const int64_t panels = (w.rows + kPanelRows - 1) / kPanelRows;
  const int64_t pairs = (panels + 1) / 2;
  const auto panel_of = [&](int64_t pair, int64_t half) {
    return gated ? pair + half * panels / 2 : 2 * pair + half;
  };

  const Split split = split_work(pairs, g.rows, threads);
  if (thread >= split.across * split.down) return;
  const Range mine = part(pairs, thread % split.across, split.across);
  const Range rows = part(g.rows, thread / split.across, split.down);

  const int64_t k_step = even_step(w.columns, kMaxBlockK);
  const int64_t panel_size = k_step / kBlockColumns * Kernel::kTile;
  const int64_t pair_size = 2 * panel_size;
  const int64_t group = std::clamp<int64_t>(
      Kernel::kGroupBytes / (pair_size * static_cast<int64_t>(sizeof(Operand))), 1,
      mine.end - mine.begin);

  Arena arena(scratch);
  auto* tiles = arena.take<Operand>(group * pair_size);
  auto* row_scratch = arena.take<RowOperand>(
      Kernel::kRows * (k_step / kBlockColumns * Kernel::kRowTile + kLanes));
  // Sums of all rows when they wait for another block of k, else of two register blocks of rows:
  // the epilogue of one runs while the other is computed.
  const bool partial = k_step < w.columns;
  const int64_t row_sums = group * 2 * kLanes;
  auto* sums = arena.take<float>(
      (partial ? std::min(kRowsAtOnce, rows.end - rows.begin) : 2 * Kernel::kRows) * row_sums);

  Kernel kernel;
  PendingBlock pending(g);
  for (int64_t row0 = rows.begin; row0 < rows.end; row0 += kRowsAtOnce) {
    const int64_t row_end = std::min(rows.end, row0 + kRowsAtOnce);
    for (int64_t pair0 = mine.begin; pair0 < mine.end; pair0 += group) {
      const int64_t group_pairs = std::min(group, mine.end - pair0);
      for (int64_t k0 = 0; k0 < w.columns; k0 += k_step) {
        const int64_t k = std::min(k_step, w.columns - k0);
        for (int64_t i = 0; i < 2 * group_pairs && !as_it_lies<Operand>(w); ++i) {
          const int64_t panel = panel_of(pair0 + i / 2, i % 2);
          if (panel < panels) unpack(w, panel, k0, k, tiles + i * panel_size);
        }
        const int64_t chunk = even_step(k, Kernel::kChunk);
        bool odd = false;
        int64_t row = row0;
        for (int count; row < row_end; row += count, odd = !odd) {
          count = Kernel::block_rows(row_end - row);
          Rows<RowOperand> a =
              Kernel::rows_of(g.x + row * g.x_stride + k0, g.x_stride, count, k, row_scratch);
          float* c = sums + (partial ? row - row0 : odd * Kernel::kRows) * row_sums;
          for (int64_t at = 0; at < k; at += chunk, a.at += chunk / kBlockColumns * Kernel::kRowTile) {
            const int64_t depth = std::min(chunk, k - at);
            for (int64_t i = 0; i < group_pairs; ++i) {
              const int64_t tile = at / kBlockColumns * Kernel::kTile;
              const Operand* b[2] = {tiles + 2 * i * panel_size, tiles + (2 * i + 1) * panel_size};
              if (as_it_lies<Operand>(w)) {
                // An odd last panel stands in for the one that is missing beside it.
                for (int j = 0; j < 2; ++j) {
                  const int64_t panel = std::min(panel_of(pair0 + i, j), panels - 1);
                  b[j] = operands_at<Operand>(w, panel, k0);
                }
              }
              float* block = c + i * count * 2 * kLanes;
              kernel.multiply(a, count, b[0] + tile, b[1] + tile, depth, block, k0 + at > 0,
                              [&] { pending.step(); });
              if (k0 + at + depth == w.columns) pending.set(row, count, pair0 + i, block);
            }
          }
        }
        pending.drain();
      }
    }
  }
}

}  // namespace
}  // namespace tidemill
