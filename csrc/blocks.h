// Blocks of quantised weights as GGUF files hold them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "quantised.h"

namespace outrider {

// Twelve bytes of a Q4_K or Q5_K block hold eight 6-bit scales and eight 6-bit minimums, two to a group of 32.
inline void k_scales(const std::uint8_t* packed, std::uint8_t (*scales)[4]) {
  for (int g = 0; g < 4; ++g) {
    scales[g][0] = packed[g] & 63;
    scales[g][1] = packed[g + 4] & 63;
    scales[g + 4][0] = (packed[g + 8] & 15) | ((packed[g] >> 6) << 4);
    scales[g + 4][1] = (packed[g + 8] >> 4) | ((packed[g + 4] >> 6) << 4);
  }
}

// `values` consecutive weights as float32 or bfloat16, exact in float32 and then rounded once. Works on all threads.
void dequantise(const std::uint8_t* raw, void* out, std::size_t values, GgmlType type, Dtype dtype);

}  // namespace outrider
