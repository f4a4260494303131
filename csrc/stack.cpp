#include "stack.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "narrow.h"
#include "pool.h"
#include "scratch.h"

namespace outrider {
namespace {

// Passes of more rows give their working memory back.
constexpr std::size_t kKeptRows = 128;

std::size_t outputs(const std::vector<Matrix>& parts) {
  std::size_t total = 0;
  for (const Matrix& part : parts) total += part.n;
  return total;
}

std::size_t work(const std::vector<Matrix>& parts) {
  std::size_t total = 0;
  for (const Matrix& part : parts) total += part.n * part.k;
  return total;
}

void copy_heads(const float* from, std::size_t count, Dtype dtype, void* store, std::size_t at) {
  if (dtype == Dtype::kF32) {
    std::memcpy(static_cast<float*>(store) + at, from, count * sizeof(float));
    return;
  }
  std::uint16_t* to = static_cast<std::uint16_t*>(store) + at;
  for (std::size_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
}

}  // namespace

void multiply(const Kernels& kernels, const Matrix& matrix, const float* x, float* y, std::size_t rows, std::size_t step) {
  if (matrix.panel_bytes) {
    const std::uint8_t* packed = static_cast<const std::uint8_t*>(matrix.packed);
    return kernels.quant_linear({packed, matrix.bias, x, y, rows, matrix.n, matrix.k, step, matrix.panel_bytes, matrix.type});
  }
  kernels.linear({matrix.packed, matrix.bias, x, y, rows, matrix.n, matrix.k, step, matrix.dtype});
}

// Rows of `shape`; attention and feed-forward use the same memory in turn.
struct Stack::Buffers {
  float* inner;     // [rows][hidden]: what a matrix reads
  float* mixed;     // [rows][hidden]: what a block adds to x
  float* qkv;       // [rows][heads, kv heads, kv heads][width]
  float* attended;  // [rows][heads][width]
  float* gate_up;   // [rows][gate, up][feed]
  float* fed;       // [rows][feed]

  static std::size_t floats(const StackShape& shape, std::size_t rows) {
    const std::size_t attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.width;
    return rows * (2 * shape.hidden + std::max(attention, 3 * shape.feed));
  }

  Buffers(const StackShape& shape, std::size_t rows, float* memory)
      : inner(memory),
        mixed(inner + rows * shape.hidden),
        qkv(mixed + rows * shape.hidden),
        attended(qkv + rows * (shape.heads + 2 * shape.kv_heads) * shape.width),
        gate_up(qkv),
        fed(gate_up + rows * 2 * shape.feed) {}
};

std::size_t Stack::row_work() const {
  std::size_t total = 0;
  for (const StackLayer& layer : layers_) total += work(layer.qkv) + work(layer.o) + work(layer.gate_up) + work(layer.down);
  return total;
}

void Stack::product(const std::vector<Matrix>& parts, const float* x, float* y, std::size_t rows) const {
  const std::size_t step = outputs(parts);
  for (const Matrix& part : parts) {
    multiply(*kernels_, part, x, y, rows, step);
    y += part.n;
  }
}

void Stack::norm_heads(const StackLayer& layer, float* qkv, std::size_t rows) const {
  const std::size_t step = joint_heads() * shape_.width, width = shape_.width;
  for (std::size_t row = 0; row < rows; ++row) {
    float* q = qkv + row * step;
    float* k = q + shape_.heads * width;
    kernels_->rms_norm(q, nullptr, layer.q_norm, q, shape_.heads, width, shape_.eps);
    kernels_->rms_norm(k, nullptr, layer.k_norm, k, shape_.kv_heads, width, shape_.eps);
  }
}

void Stack::write_cache(const StackSpan& span, std::size_t index, const float* keys, const float* values) const {
  const std::size_t row_floats = shape_.kv_heads * shape_.width, step = joint_heads() * shape_.width;
  const std::size_t key_base = 2 * index * span.positions, value_base = key_base + span.positions;
  for (std::size_t row = 0; row < span.rows; ++row) {
    const std::size_t position = span.length + row;
    copy_heads(keys + row * step, row_floats, shape_.cache, span.store, (key_base + position) * row_floats);
    copy_heads(values + row * step, row_floats, shape_.cache, span.store, (value_base + position) * row_floats);
  }
}

// The attention of one layer.
struct Stack::SpanJob {
  const Stack& stack;
  const StackPass& pass;
  const Buffers& to;
  std::size_t layer;
  std::vector<std::size_t> firsts;  // of the spans' rows
};

void Stack::attend_span(const SpanJob& job, std::size_t number) const {
  const StackSpan& span = job.pass.spans[number];
  const std::size_t width = shape_.width, step = joint_heads() * width, first = job.firsts[number];
  const std::size_t cache_bytes = 2 * shape_.kv_heads * width * (shape_.cache == Dtype::kF32 ? 4 : 2);
  const float* q = job.to.qkv + first * step;
  const float* k = q + shape_.heads * width;
  write_cache(span, job.layer, k, k + shape_.kv_heads * width);
  const char* keys = static_cast<const char*>(span.store) + job.layer * span.positions * cache_bytes;
  const char* values = keys + span.positions * cache_bytes / 2;
  float* out = job.to.attended + first * shape_.heads * width;
  const std::size_t slots = span.ancestors ? span.rows : 0;
  kernels_->attention({q, keys, values, out, span.lengths, span.starts, span.ancestors, span.rows, step, slots, shape_.heads,
                       shape_.kv_heads, width, shape_.cache});
}

// Many spans of like work are a task each; else the threads share span after span.
void Stack::attend_spans(const SpanJob& job) const {
  std::size_t largest = 0, total = 0;
  for (const StackSpan& span : job.pass.spans) {
    const std::size_t products = span.rows * (span.length + span.rows);
    largest = std::max(largest, products);
    total += products;
  }
  if (2 * largest * static_cast<std::size_t>(threads()) <= total) {
    const Task task = [](const void* job, std::size_t number) {
      const SpanJob& spans = *static_cast<const SpanJob*>(job);
      spans.stack.attend_span(spans, number);
    };
    run_tasks(job.pass.spans.size(), task, &job);
  } else {
    for (std::size_t number = 0; number < job.pass.spans.size(); ++number) attend_span(job, number);
  }
}

void Stack::attend(std::size_t index, const StackPass& pass, const Buffers& to) const {
  const StackLayer& layer = layers_[index];
  const std::size_t width = shape_.width, step = joint_heads() * width;
  product(layer.qkv, index == 0 && pass.read ? pass.read : to.inner, to.qkv, pass.rows);
  if (layer.q_norm) norm_heads(layer, to.qkv, pass.rows);
  kernels_->rope(to.qkv, pass.cos, pass.sin, pass.positions, pass.rows, step, shape_.heads + shape_.kv_heads, width);
  SpanJob job{*this, pass, to, index, {}};
  std::size_t first = 0;
  for (const StackSpan& span : pass.spans) {
    job.firsts.push_back(first);
    first += span.rows;
  }
  attend_spans(job);
  product(layer.o, to.attended, to.mixed, pass.rows);
}

void Stack::feed(const StackLayer& layer, std::size_t rows, const Buffers& to) const {
  product(layer.gate_up, to.inner, to.gate_up, rows);
  kernels_->swiglu(to.gate_up, to.fed, rows, shape_.feed);
  product(layer.down, to.fed, to.mixed, rows);
}

void Stack::run(const StackPass& pass) const {
  const std::size_t rows = pass.rows, hidden = shape_.hidden, floats = Buffers::floats(shape_, rows);
  std::unique_ptr<float[]> own(rows > kKeptRows ? new float[floats] : nullptr);
  float* memory = own ? own.get() : static_cast<float*>(Scratch::of_thread().room(2, floats * sizeof(float)));
  const Buffers to(shape_, rows, memory);
  if (!pass.read) kernels_->rms_norm(pass.x, nullptr, layers_.front().attention_norm, to.inner, rows, hidden, shape_.eps);
  for (std::size_t index = 0; index < layers_.size(); ++index) {
    const bool last = index + 1 == layers_.size();
    attend(index, pass, to);
    kernels_->rms_norm(pass.x, to.mixed, layers_[index].feed_norm, to.inner, rows, hidden, shape_.eps);
    feed(layers_[index], rows, to);
    const float* norm = last ? last_norm_ : layers_[index + 1].attention_norm;
    kernels_->rms_norm(pass.x, to.mixed, norm, last ? pass.out : to.inner, rows, hidden, shape_.eps);
    for (std::size_t tap = 0; tap < pass.taps.size(); ++tap) {
      if (pass.taps[tap] != index) continue;
      for (std::size_t row = 0; row < rows; ++row)
        std::memcpy(pass.features + (row * pass.taps.size() + tap) * hidden, pass.x + row * hidden, hidden * sizeof(float));
    }
  }
}

}  // namespace outrider
