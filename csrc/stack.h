// The layers of a decoder, run over all rows of a pass in one call: the same kernels in the same order as one call each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels.h"

namespace outrider {

// Packed weights, float or quantised.
struct Matrix {
  const void* packed;
  const float* bias;
  std::size_t n, k;
  std::size_t panel_bytes;  // 0: float weights
  Dtype dtype;              // of float weights
  GgmlType type;            // of quantised weights
};

// y[row] = the matrix times x[row]; rows of y are `step` apart.
void multiply(const Kernels& kernels, const Matrix& matrix, const float* x, float* y, std::size_t rows, std::size_t step);

// Matrices of a list read the same rows, and their outputs stand side by side.
struct StackLayer {
  const float* attention_norm;
  const float* q_norm;  // with k_norm a norm of each head, or both null
  const float* k_norm;
  const float* feed_norm;
  std::vector<Matrix> qkv, o, gate_up, down;
};

struct StackShape {
  std::size_t hidden, feed, heads, kv_heads, width;
  float eps;
  Dtype cache;
};

// Rows of one sequence. `store` is its cache, [layers][keys, values][positions][kv_heads][width]; the rows' keys and
// values are written from position `length` on. Lengths, starts and ancestors (as many slots as rows) as in AttentionJob.
struct StackSpan {
  std::size_t rows;
  void* store;
  std::size_t positions, length;
  const std::int32_t* lengths;
  const std::int32_t* starts;
  const std::uint8_t* ancestors;
};

struct StackPass {
  float* x;    // [rows][hidden]: the residual stream, from the embedding to the last layer
  float* out;  // [rows][hidden]: its norm after the last layer
  std::size_t rows;
  const float* cos;
  const float* sin;
  const std::int64_t* positions;
  std::vector<StackSpan> spans;      // their rows, in order, are those of the pass
  std::vector<std::size_t> taps;     // layers after which x is copied
  float* features;                   // [rows][taps][hidden]
  const float* read = nullptr;       // [rows][inputs of the first qkv]: read there instead of a norm of x
};

class Stack {
 public:
  Stack(const Kernels& kernels, const StackShape& shape) : kernels_(&kernels), shape_(shape) {}

  // What a layer points to must outlive the stack.
  void add(StackLayer layer) { layers_.push_back(std::move(layer)); }
  StackLayer& last_layer() { return layers_.back(); }
  void set_last_norm(const float* norm) { last_norm_ = norm; }

  const Kernels& kernels() const { return *kernels_; }

  // Multiply-adds of the matrices for one row.
  std::size_t row_work() const;

  // The caller has checked sizes and values. Any number of threads may run one stack.
  void run(const StackPass& pass) const;

 private:
  struct Buffers;
  void product(const std::vector<Matrix>& parts, const float* x, float* y, std::size_t rows) const;
  struct SpanJob;
  void attend_span(const SpanJob& job, std::size_t number) const;
  void attend_spans(const SpanJob& job) const;
  void attend(std::size_t index, const StackPass& pass, const Buffers& to) const;
  void feed(const StackLayer& layer, std::size_t rows, const Buffers& to) const;
  void write_cache(const StackSpan& span, std::size_t index, const float* keys, const float* values) const;
  void norm_heads(const StackLayer& layer, float* qkv, std::size_t rows) const;

  std::size_t joint_heads() const { return shape_.heads + 2 * shape_.kv_heads; }

  const Kernels* kernels_;
  StackShape shape_;
  std::vector<StackLayer> layers_;
  const float* last_norm_ = nullptr;
};

}  // namespace outrider
