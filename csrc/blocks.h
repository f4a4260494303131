// Blocks of quantised weights as GGUF files hold them, one column's at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "quantised.h"

namespace outrider {

// Codes as bytes (signed ones shifted to unsigned), head and scales as they are packed.
struct Block {
  std::uint8_t codes[256];
  std::uint8_t head[4];
  std::uint8_t scales[8][4];
};

void read_block(const std::uint8_t* raw, GgmlType type, Block& block);

// `values` consecutive weights as float32 or bfloat16, exact in float32 and then rounded once. Works on all threads.
void dequantise(const std::uint8_t* raw, void* out, std::size_t values, GgmlType type, Dtype dtype);

}  // namespace outrider
