#include "operations.h"

#include <algorithm>
#include <cmath>

namespace tidemill {
namespace {

struct Share {
  int64_t begin, end;
};

Share share_of(int64_t count, const Worker& worker) {
  return {count * worker.thread / worker.threads, count * (worker.thread + 1) / worker.threads};
}

bool quantized(const Weight& weight) { return weight.format != Format::bf16; }

// Bytes of one row of x as the few-row kernels take it.
int64_t few_row_bytes(const Weight& weight) {
  return quantized(weight) ? weight.columns / kBlockColumns * sizeof(QuantizedBlock)
                           : weight.columns * sizeof(float);
}

}  // namespace

// --- embedding -----------------------------------------------------------------------------

Embed::Embed(const Weight& weight, float scale, Operand out)
    : weight_(weight), scale_(scale), out_(out) {}

void Embed::prepare(const Step& step, Program& program) {
  kernels_ = program.machine().step;
  rows_ = static_cast<float*>(program.rows_of(out_, step.tokens));
}

void Embed::run(const Step& step, Worker& worker) {
  auto* row = static_cast<float*>(worker.scratch);
  for (int64_t i; (i = worker.take(1)) < step.tokens;) {
    kernels_->unpack_row(weight_, step.ids[i], scale_, row);
    std::copy_n(row, weight_.features, rows_ + i * out_.stride);
  }
}

// --- linear --------------------------------------------------------------------------------

// Each thread prepares all rows for itself up to so many elements: cheaper than a barrier.
constexpr int64_t kOwnElements = 4096;

void Linear::prepare(const Step& step, Program& program) {
  machine_ = &program.machine();
  const Weight& w = *o_.weight;
  rows_ = o_.logits ? step.logit_count : step.tokens;
  x_ = program.rows_of(o_.x, step.tokens);
  gemm_.rows = rows_;
  gemm_.weight = &w;
  gemm_.bias = o_.bias;
  gemm_.output = o_.output;
  gemm_.activation = o_.activation;
  gemm_.out = o_.logits ? step.logits : program.rows_of(o_.out, step.tokens);
  gemm_.out_stride = o_.logits ? w.rows : o_.out.stride;
  few_ = rows_ <= machine_->few_rows[static_cast<int>(w.format)];
  prepared_ = nullptr;
  if (!few_) {
    gemm_.x = static_cast<const uint16_t*>(x_);
    gemm_.x_stride = o_.x.stride;
    if (o_.norm != nullptr) {
      prepared_ = program.shared(Program::kRows, rows_ * w.columns * sizeof(uint16_t));
      gemm_.x = static_cast<const uint16_t*>(prepared_);
      gemm_.x_stride = w.columns;
    }
  } else if (rows_ * w.columns > kOwnElements && program.threads() > 1) {
    prepared_ = program.shared(Program::kRows, rows_ * few_row_bytes(w));
  }
}

void Linear::run(const Step& step, Worker& worker) {
  if (rows_ == 0) return;
  few_ ? run_few(step, worker) : run_many(step, worker);
}

const void* Linear::source(const Step& step, int64_t row) const {
  const int64_t at = (o_.logits ? step.logit_tokens[row] : row) * o_.x.stride;
  if (o_.norm != nullptr) return static_cast<const float*>(x_) + at;
  return static_cast<const uint16_t*>(x_) + at;
}

// A row of x as float[weight.columns], normed if there is a norm.
const float* Linear::normed(const Step& step, int64_t row, float* scratch) const {
  const Weight& w = *o_.weight;
  const void* from = source(step, row);
  if (o_.norm != nullptr) {
    machine_->step->norm(static_cast<const float*>(from), o_.norm, o_.eps, w.features, scratch);
  } else {
    machine_->step->widen(static_cast<const uint16_t*>(from), w.features, scratch);
  }
  std::fill(scratch + w.features, scratch + w.columns, 0.0f);
  return scratch;
}

void Linear::run_few(const Step& step, Worker& worker) {
  const Weight& w = *o_.weight;
  auto* row_floats = static_cast<float*>(worker.scratch);
  const int64_t bytes = few_row_bytes(w);
  const bool own = prepared_ == nullptr;
  auto* rows = own ? reinterpret_cast<char*>(row_floats + w.columns) : static_cast<char*>(prepared_);
  const Share mine = own ? Share{0, rows_} : share_of(rows_, worker);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    char* to = rows + row * bytes;
    if (quantized(w)) {
      machine_->step->quantize(normed(step, row, row_floats), w.columns / kBlockColumns,
                               reinterpret_cast<QuantizedBlock*>(to));
    } else {
      normed(step, row, reinterpret_cast<float*>(to));
    }
  }
  if (!own) worker.barrier();

  const int64_t panels = (w.rows + kPanelRows - 1) / kPanelRows;
  const int64_t pairs = (panels + 1) / 2;
  const int64_t chunk = std::max<int64_t>(1, pairs / (8 * worker.threads));
  for (int64_t pair; (pair = worker.take(chunk)) < pairs;) {
    machine_->step->few_rows(gemm_, rows, pair, std::min(pair + chunk, pairs));
  }
}

void Linear::run_many(const Step& step, Worker& worker) {
  const Weight& w = *o_.weight;
  if (prepared_ != nullptr) {
    auto* row_floats = static_cast<float*>(worker.scratch);
    const Share mine = share_of(rows_, worker);
    for (int64_t row = mine.begin; row < mine.end; ++row) {
      machine_->step->narrow(normed(step, row, row_floats), w.columns,
                             static_cast<uint16_t*>(prepared_) + row * w.columns);
    }
    worker.barrier();
  }
  machine_->many->gemm(w.format)(gemm_, worker.thread, worker.threads, worker.scratch);
}

// --- attention -----------------------------------------------------------------------------

RopeWriteOperation::RopeWriteOperation(Operand qkv, const AttentionShape& shape,
                                       const float* table, const float* q_norm,
                                       const float* k_norm, float eps)
    : qkv_(qkv), arguments_{} {
  arguments_.qkv_stride = qkv.stride;
  arguments_.kv = shape.kv;
  arguments_.table = table;
  arguments_.q_norm = q_norm;
  arguments_.k_norm = k_norm;
  arguments_.eps = eps;
  arguments_.heads = shape.heads;
  arguments_.kv_heads = shape.kv_heads;
  arguments_.head_dim = shape.head_dim;
}

void RopeWriteOperation::prepare(const Step& step, Program& program) {
  kernels_ = program.machine().step;
  arguments_.qkv = static_cast<uint16_t*>(program.rows_of(qkv_, step.tokens));
  arguments_.positions = step.positions;
  arguments_.kv_slots = step.kv_slots;
}

void RopeWriteOperation::run(const Step& step, Worker& worker) {
  const Share mine = share_of(step.tokens, worker);
  kernels_->rope_write(arguments_, static_cast<int>(mine.begin), static_cast<int>(mine.end));
}

AttentionOperation::AttentionOperation(Operand q, const AttentionShape& shape, Operand out)
    : q_(q), out_(out), arguments_{} {
  arguments_.q_stride = q.stride;
  arguments_.out_stride = out.stride;
  arguments_.kv = shape.kv;
  arguments_.heads = shape.heads;
  arguments_.kv_heads = shape.kv_heads;
  arguments_.head_dim = shape.head_dim;
  arguments_.scale = shape.scale;
  arguments_.window = shape.window;
  arguments_.softcap = shape.softcap;
}

void AttentionOperation::prepare(const Step& step, Program& program) {
  machine_ = &program.machine();
  PrefillAttention& a = arguments_;
  a.q = static_cast<const uint16_t*>(program.rows_of(q_, step.tokens));
  a.out = static_cast<uint16_t*>(program.rows_of(out_, step.tokens));
  a.row_starts = step.row_starts;
  a.contexts = step.contexts;
  a.page_table = step.page_table;
  a.table_stride = step.table_stride;
  single_rows_ = 0;
  while (single_rows_ < step.rows && step.row_starts[single_rows_ + 1] == single_rows_ + 1) {
    ++single_rows_;
  }
  a.first_row = single_rows_;
  a.end_row = step.rows;
  plan_spans(step, program);
}

// Cuts rows so that there are some spans for every thread, of equal length, and none is short.
void AttentionOperation::plan_spans(const Step& step, Program& program) {
  constexpr int64_t kSpansPerThread = 4, kShortest = 64;
  const PrefillAttention& a = arguments_;
  first_span_.resize(single_rows_ + 1);
  first_key_.resize(single_rows_);
  int64_t keys = 0;
  for (int row = 0; row < single_rows_; ++row) {
    const int context = step.contexts[row];
    first_key_[row] = a.window > 0 ? std::max(0, context - a.window) : 0;
    keys += context - first_key_[row];
  }
  const int64_t even = keys * a.kv_heads / (kSpansPerThread * program.threads());
  span_keys_ = static_cast<int>(std::max(kShortest, (even + kShortest - 1) / kShortest * kShortest));
  first_span_[0] = 0;
  for (int row = 0; row < single_rows_; ++row) {
    const int count = (step.contexts[row] - first_key_[row] + span_keys_ - 1) / span_keys_;
    first_span_[row + 1] = first_span_[row] + count;
  }
  const int64_t size = span_floats(a.heads / a.kv_heads, a.head_dim) * sizeof(float);
  partials_ = static_cast<float*>(program.shared(Program::kPartials, first_span_.back() * a.kv_heads * size));
  const int64_t counters = int64_t{single_rows_} * a.kv_heads;
  done_ = static_cast<std::atomic<int>*>(program.shared(Program::kCounters, counters * sizeof(int)));
}

void AttentionOperation::run(const Step& step, Worker& worker) {
  if (single_rows_ > 0) run_spans(worker);
  if (single_rows_ < step.rows) {
    machine_->many->attention_prefill(arguments_, worker.thread, worker.threads, worker.scratch);
  }
}

// KV heads outside: rows that share pages find them in the cache.
AttentionSpan AttentionOperation::span_at(int64_t index) const {
  const int spans = first_span_.back();
  const int head = static_cast<int>(index / spans), span = static_cast<int>(index % spans);
  const auto after = std::upper_bound(first_span_.begin(), first_span_.end(), span);
  const int row = static_cast<int>(after - first_span_.begin()) - 1;
  const int begin = first_key_[row] + (span - first_span_[row]) * span_keys_;
  return {row, row, head, begin, std::min(begin + span_keys_, arguments_.contexts[row])};
}

void AttentionOperation::run_spans(Worker& worker) {
  const PrefillAttention& a = arguments_;
  const int64_t spans = int64_t{first_span_.back()} * a.kv_heads;
  const int64_t size = span_floats(a.heads / a.kv_heads, a.head_dim);
  int64_t i = worker.take(1);
  if (i >= spans) return;
  for (AttentionSpan span = span_at(i), next; i < spans; span = next) {
    const int64_t after = worker.take(1);
    if (after < spans) next = span_at(after);
    machine_->step->attention_span(a, span, after < spans ? &next : nullptr, partials_ + i * size,
                                   worker.scratch);
    finish_span(span, i, size);
    i = after;
  }
}

// Whoever finishes a row's last span puts them together.
void AttentionOperation::finish_span(const AttentionSpan& span, int64_t index, int64_t size) {
  const int count = first_span_[span.row + 1] - first_span_[span.row];
  std::atomic<int>& done = done_[span.kv_head * single_rows_ + span.row];
  if (count > 1 && done.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return;
  done.store(0, std::memory_order_relaxed);  // for the next layer
  const int64_t first = index - (span.begin - first_key_[span.row]) / span_keys_;
  machine_->step->merge_spans(arguments_, span.token, span.kv_head, partials_ + first * size, count);
}

}  // namespace tidemill
