#pragma once

#include <cstdint>
#include <cstring>

namespace outrider {

// Rounds to nearest, ties to even; NaN stays NaN.
inline std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return std::uint16_t(bits >> 16 | 64);
  return std::uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

}  // namespace outrider
