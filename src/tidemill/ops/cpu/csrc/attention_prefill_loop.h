// Blocked attention with online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), for every
// instruction set: `Kernel` is the GEMM's register block (gemm_loop.h).
//
// Everything is computed transposed. The columns of a block are its queries: the tokens of the
// block times the heads that share a key head. Scores S^T[key][query] = K · Q^T and outputs
// O^T[d][query] = V^T · P^T then keep one query per vector lane, so maxima, sums and rescaling
// need no reduction across lanes, and exp(S^T) is already the operand that the second product
// takes. What has to be transposed is small: queries and outputs once, values once per block of
// keys and group of heads.
#pragma once

#include "attention_prefill.h"
#include "gemm_loop.h"

namespace tidemill {
namespace {

constexpr int kKeys = 64;         // keys of a block
constexpr int kPairLanes = 2 * kLanes;
constexpr float kHidden = -1e30f;  // finite, so that differences of hidden scores are no NaN

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// How many of k the elements of one vector cover: 16 floats, or 16 pairs of bf16.
template <class Operand>
constexpr int kDepth = 64 / sizeof(Operand);

// kDepth elements of a bf16 row as operands, the first `count` of them present.
TIDEMILL_INLINE u32 row_piece(const uint16_t* at, int64_t count, uint16_t) {
  if (count >= 32) return load<u32>(at);
  u32 piece{};
  std::memcpy(&piece, at, 32);  // head_dim is a multiple of 16
  return piece;
}

TIDEMILL_INLINE u32 row_piece(const uint16_t* at, int64_t, float) {
  return (u32)from_bf16(load<u16>(at));
}

// One task: the tokens [begin, end) of a row, for all query heads that share one key head.
template <class Kernel>
class QueryBlock {
 public:
  using Operand = typename Kernel::Operand;

  QueryBlock(const PrefillAttention& a, int row, int head, int begin, int end, void* scratch)
      : a_(a),
        table_(a.page_table + row * a.table_stride),
        head_(head),
        begin_(begin),
        tokens_(end - begin),
        first_position_(a.contexts[row] - a.row_starts[row + 1] + begin),
        group_(a.heads / a.kv_heads),
        columns_(group_ * tokens_),
        pairs_((columns_ + kPairLanes - 1) / kPairLanes),
        depth_(round_up(a.head_dim, kBlockColumns)) {
    Arena arena(scratch);
    queries_ = arena.take<Operand>(pairs_ * kPairLanes * depth_);
    keys_ = arena.take<Operand>(kKeys * depth_);
    values_ = arena.take<Operand>(kKeys * depth_);
    scores_ = arena.take<float>(kKeys * kPairLanes);
    weights_ = arena.take<Operand>(kKeys * kPairLanes);
    outputs_ = arena.take<float>(pairs_ * kPairLanes * depth_);
    most_ = arena.take<float>(pairs_ * kPairLanes);
    sums_ = arena.take<float>(pairs_ * kPairLanes);
    positions_ = arena.take<int32_t>(pairs_ * kPairLanes);
  }

  void run(Kernel& kernel) {
    load_queries();
    const int last = first_position_ + tokens_ - 1;
    int key = a_.window > 0 ? std::max(0, first_position_ - a_.window + 1) : 0;
    for (; key <= last; key += kKeys) {
      const int count = std::min(kKeys, last + 1 - key);
      load_keys(key, count);
      prefetch_keys(key + kKeys, last + 1);
      for (int pair = 0; pair < pairs_; ++pair) attend(kernel, pair, key, count);
    }
    store_outputs();
  }

 private:
  const uint16_t* query(int column) const {
    const int token = begin_ + column % tokens_;
    const int head = head_ * group_ + column / tokens_;
    return a_.q + token * a_.q_stride + head * a_.head_dim;
  }

  // Queries as operand tiles, [pair][half][depth][16 queries]; lanes without a query repeat the
  // last one.
  void load_queries() {
    for (int column = 0; column < pairs_ * kPairLanes; column += kLanes) {
      for (int d = 0; d < depth_; d += kDepth<Operand>) {
        u32 rows[kLanes] = {};
        if (d < a_.head_dim) {
          for (int i = 0; i < kLanes; ++i) {
            const uint16_t* from = query(std::min(column + i, columns_ - 1));
            rows[i] = row_piece(from + d, a_.head_dim - d, Operand{});
          }
          transpose(rows);
        }
        Operand* to = queries_ + column * depth_ + d * kLanes;
        for (int i = 0; i < kLanes; ++i) store(to + i * 64 / sizeof(Operand), rows[i]);
      }
      for (int i = 0; i < kLanes; ++i) {
        positions_[column + i] = first_position_ + std::min(column + i, columns_ - 1) % tokens_;
      }
    }
    std::fill_n(most_, pairs_ * kPairLanes, kHidden);
    std::fill_n(sums_, pairs_ * kPairLanes, 0.0f);
    std::fill_n(outputs_, pairs_ * kPairLanes * depth_, 0.0f);
  }

  // keys_[key][depth] and values_[depth][key], zero beyond `count` and beyond head_dim.
  void load_keys(int first, int count) {
    const int padded = static_cast<int>(round_up(count, kBlockColumns));
    ptrdiff_t offsets[kKeys];
    for (int j = 0; j < count; ++j) offsets[j] = offset(first + j);
    for (int j = 0; j < padded; ++j) {
      Operand* to = keys_ + j * depth_;
      for (int d = 0; d < depth_; d += kDepth<Operand>) {
        const bool present = j < count && d < a_.head_dim;
        const uint16_t* from = a_.kv.k + (present ? offsets[j] + d : 0);
        store(to + d, present ? row_piece(from, a_.head_dim - d, Operand{}) : u32{});
      }
    }
    for (int j = 0; j < padded; j += kDepth<Operand>) {
      for (int d = 0; d < depth_; d += kLanes) {
        u32 rows[kLanes] = {};
        if (d < a_.head_dim) {
          for (int i = 0; i < kLanes; ++i) rows[i] = value_piece(a_.kv.v + d, offsets, count, j, i, Operand{});
          transpose(rows);
        }
        for (int i = 0; i < kLanes; ++i) store(values_ + (d + i) * kKeys + j, rows[i]);
      }
    }
  }

  // The next block's rows are too short and scattered for the hardware to foresee.
  void prefetch_keys(int first, int end) const {
    for (int token = first; token < std::min(first + kKeys, end); ++token) {
      const ptrdiff_t at = offset(token);
      for (int d = 0; d < a_.head_dim; d += 32) {
        _mm_prefetch(reinterpret_cast<const char*>(a_.kv.k + at + d), _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(a_.kv.v + at + d), _MM_HINT_T1);
      }
    }
  }

  ptrdiff_t offset(int token) const {
    const KvPages& kv = a_.kv;
    return table_[token / kv.page_size] * kv.page_stride +
           token % kv.page_size * kv.token_stride + head_ * kv.head_stride;
  }

  // 16 values of token j + i, or of the pair of tokens j + 2i and j + 2i + 1.
  static u32 value_piece(const uint16_t* v, const ptrdiff_t* offsets, int count, int j, int i,
                         float) {
    return j + i < count ? (u32)from_bf16(load<u16>(v + offsets[j + i])) : u32{};
  }

  static u32 value_piece(const uint16_t* v, const ptrdiff_t* offsets, int count, int j, int i,
                         uint16_t) {
    j += 2 * i;
    if (j >= count) return u32{};
    const u32 even = __builtin_convertvector(load<u16>(v + offsets[j]), u32);
    return j + 1 < count ? even | (u32)from_bf16(load<u16>(v + offsets[j + 1])) : even;
  }

  // One block of keys for 32 queries.
  void attend(Kernel& kernel, int pair, int first, int count) {
    const int lane = pair * kPairLanes;
    const auto [low, high] = std::minmax_element(positions_ + lane, positions_ + lane + kPairLanes);
    const bool after = first + count - 1 > *low;
    const bool before = a_.window > 0 && first <= *high - a_.window;
    if (first > *high || (before && first + count - 1 <= *low - a_.window)) return;

    const int padded = static_cast<int>(round_up(count, kBlockColumns));
    product(kernel, keys_, depth_, padded, queries_ + lane * depth_, kLanes * depth_, depth_,
            scores_, false);
    if (a_.softcap > 0.0f) cap_scores(padded);
    if (after || before || padded != count) hide_scores(lane, first, count, padded);
    for (int half = 0; half < 2; ++half) softmax(lane, half, padded);
    product(kernel, values_, kKeys, depth_, weights_, kKeys * kLanes, padded,
            outputs_ + lane * depth_, true);
  }

  // c[rows][32] (+)= a[rows][k] · b, in register blocks.
  static void product(Kernel& kernel, const Operand* a, ptrdiff_t stride, int64_t rows,
                      const Operand* b, ptrdiff_t panel, int64_t k, float* c, bool accumulate) {
    for (int count; rows > 0; rows -= count) {
      count = Kernel::block_rows(rows);
      kernel.multiply(Rows<Operand>{a, stride}, count, b, b + panel, k, c, accumulate, [] {});
      a += count * stride;
      c += count * kPairLanes;
    }
  }

  void cap_scores(int count) {
    const float in = a_.scale / a_.softcap;
    for (int i = 0; i < count * kPairLanes; i += kLanes) {
      store(scores_ + i, tanh(load<f32>(scores_ + i) * in) * (1.0f / in));
    }
  }

  void hide_scores(int lane, int first, int count, int padded) {
    for (int half = 0; half < 2; ++half) {
      const i32 last = load<i32>(positions_ + lane + half * kLanes) - first;
      const i32 begin = a_.window > 0 ? last - (a_.window - 1) : i32{} - first;
      float* scores = scores_ + half * kLanes;
      for (int j = 0; j < padded; ++j, scores += kPairLanes) {
        const i32 seen = (last >= j) & (begin <= j) & -(j < count);
        store(scores, seen ? load<f32>(scores) : splat(kHidden));
      }
    }
  }

  // weights = 2^(scores * scale * log2(e) - most), added up in sums. The maximum may lag behind by
  // a factor of 2^8, which bf16 and float hold as well: outputs are rarely rescaled.
  void softmax(int lane, int half, int count) {
    constexpr float kSlack = 8.0f;
    const float scale = a_.scale * kLog2e;
    const float* scores = scores_ + half * kLanes;
    f32 most[2] = {splat(kHidden), splat(kHidden)};
    for (int j = 0; j < count; j += 2) {
      for (int i = 0; i < 2; ++i) most[i] = max(most[i], load<f32>(scores + (j + i) * kPairLanes));
    }
    const f32 block_most = max(most[0], most[1]) * scale;
    f32 old_most = load<f32>(most_ + lane + half * kLanes);
    f32 sum = load<f32>(sums_ + lane + half * kLanes);
    if (any(block_most > old_most + kSlack)) {
      const f32 new_most = max(block_most, old_most);
      const f32 shrink = exp2(old_most - new_most);
      float* outputs = outputs_ + lane * depth_ + half * kLanes;
      for (int d = 0; d < depth_; ++d, outputs += kPairLanes) {
        store(outputs, load<f32>(outputs) * shrink);
      }
      sum *= shrink;
      store(most_ + lane + half * kLanes, new_most);
      old_most = new_most;
    }
    Operand* weights = weights_ + half * kKeys * kLanes;
    f32 odd_sum{};
    for (int j = 0; j < count; j += 2) {
      const f32 even = exp2_for_bf16(load<f32>(scores + j * kPairLanes) * scale - old_most);
      const f32 odd = exp2_for_bf16(load<f32>(scores + (j + 1) * kPairLanes) * scale - old_most);
      sum += even;
      odd_sum += odd;
      put(weights, j / 2, even, odd);
    }
    store(sums_ + lane + half * kLanes, sum + odd_sum);
  }

  void store_outputs() {
    for (int column = 0; column < columns_; column += kLanes) {
      const float* from =
          outputs_ + column / kPairLanes * kPairLanes * depth_ + column % kPairLanes;
      const f32 share = reciprocal(load<f32>(sums_ + column));
      for (int d = 0; d < a_.head_dim; d += kLanes) {
        u32 rows[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          rows[i] = (u32)(load<f32>(from + (d + i) * kPairLanes) * share);
        }
        transpose(rows);
        for (int i = 0; i < std::min(kLanes, columns_ - column); ++i) {
          const int token = begin_ + (column + i) % tokens_;
          const int head = head_ * group_ + (column + i) / tokens_;
          store(a_.out + token * a_.out_stride + head * a_.head_dim + d, to_bf16((f32)rows[i]));
        }
      }
    }
  }

  const PrefillAttention& a_;
  const int32_t* table_;
  int head_, begin_, tokens_, first_position_, group_, columns_, pairs_;
  int64_t depth_;  // head_dim, padded to whole tiles
  Operand *queries_, *keys_, *values_, *weights_;
  float *scores_, *outputs_, *most_, *sums_;  // most: maximum, in powers of two
  int32_t* positions_;
};

template <class Kernel>
void attention_prefill_part(const PrefillAttention& a, int thread, int threads, void* scratch) {
  const int group = a.heads / a.kv_heads;
  const int tokens = std::clamp(384 / group / kLanes * kLanes, kLanes, 128);
  Kernel kernel;
  int task = 0;
  for (int row = a.first_row; row < a.end_row; ++row) {
    const int end = a.row_starts[row + 1];
    for (int begin = a.row_starts[row]; begin < end; begin += tokens) {
      for (int head = 0; head < a.kv_heads; ++head, ++task) {
        if (task % threads != thread) continue;
        QueryBlock<Kernel>(a, row, head, begin, std::min(end, begin + tokens), scratch).run(kernel);
      }
    }
  }
}

}  // namespace
}  // namespace tidemill
