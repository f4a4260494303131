// What every instruction-set level provides. Sizes and steps are elements, not bytes; rows follow one another unless a
// step says otherwise.
//
// Row invariance: each output row depends on that row's inputs alone, by operations in an order that does not depend on
// the number of rows, on the other rows or on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantised.h"

namespace outrider {

enum class Dtype : int { kF32 = 0, kBf16 = 1 };

// y[m][n] = bias[n] + sum over k of x[m][k] w[n][k]; `packed` is the result of `pack`; bias may be null; rows of y are
// `y_step` apart.
struct LinearJob {
  const void* packed;
  const float* bias;
  const float* x;
  float* y;
  std::size_t rows, n, k, y_step;
  Dtype dtype;
};

// The same with packed quantised weights (quantised.h) and activations quantised by row and group of 32.
struct QuantLinearJob {
  const std::uint8_t* packed;
  const float* bias;
  const float* x;
  float* y;
  std::size_t rows, n, k, y_step, panel_bytes;
  GgmlType type;
};

// Row m reads positions [start, length) of a cache, start = starts[m] (0 if null), length = lengths[m]; with `slots` > 0
// also those positions lengths[m] + s for which ancestors[m][s] is set, in order, as if they followed one another.
struct AttentionJob {
  const float* q;     // [rows][heads][width], rows `q_step` apart
  const void* keys;   // [positions][kv_heads][width]
  const void* values;
  float* out;         // [rows][heads][width]
  const std::int32_t* lengths;
  const std::int32_t* starts;
  const std::uint8_t* ancestors;  // [rows][slots]
  std::size_t rows, q_step, slots, heads, kv_heads, width;
  Dtype dtype;
};

struct Kernels {
  std::size_t panel;      // output columns that are packed together
  std::size_t wide_rows;  // from here on quantised products are made in AMX tiles; 0: never
  void (*pack)(const void* weight, void* packed, std::size_t n, std::size_t k, Dtype dtype);
  void (*linear)(const LinearJob& job);
  void (*quant_linear)(const QuantLinearJob& job);
  // x += delta, unless delta is null; out = x / rms(x) * weight; out may be x.
  void (*rms_norm)(float* x, const float* delta, const float* weight, float* out, std::size_t rows, std::size_t k, float eps);
  // gate_up[m] is (gate, up), each `width` long.
  void (*swiglu)(const float* gate_up, float* out, std::size_t rows, std::size_t width);
  // Rotates pairs (x[r], x[r + width / 2]) of each head by the angle of the row's position; tables are
  // [positions][width / 2]; rows are `step` apart.
  void (*rope)(float* x, const float* cos, const float* sin, const std::int64_t* positions, std::size_t rows, std::size_t step,
               std::size_t heads, std::size_t width);
  void (*attention)(const AttentionJob& job);
  // `blocks` times 32 weights as Q4_0 blocks of a file.
  void (*encode_q4_0)(const float* x, std::uint8_t* out, std::size_t blocks);
};

const Kernels& portable_kernels();
#if defined(OUTRIDER_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#endif
#if defined(OUTRIDER_AMX)
const Kernels& amx_kernels();
#endif

}  // namespace outrider
