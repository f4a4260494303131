// Float32 to 16-bit floats, rounded to nearest, ties to even. In an unnamed namespace: the file of each instruction set keeps
// a copy of its own.
#pragma once

#include <cstdint>
#include <cstring>

namespace outrider {
namespace {

// NaN stays NaN.
inline std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return std::uint16_t(bits >> 16 | 64);
  return std::uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// Too large becomes infinite, too small a subnormal or 0; NaN stays NaN.
inline std::uint16_t to_half(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const std::uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return std::uint16_t(sign | 0x7e00u);
  if (size >= 0x477ff000u) return std::uint16_t(sign | 0x7c00u);  // 65520 and more
  if (size < 0x38800000u) {                                       // below 2^-14: adding 2^-1 leaves the subnormal's bits
    float magnitude;
    std::memcpy(&magnitude, &size, sizeof(magnitude));
    magnitude += 0.5f;
    std::uint32_t shifted;
    std::memcpy(&shifted, &magnitude, sizeof(shifted));
    return std::uint16_t(sign | (shifted - 0x3f000000u));
  }
  return std::uint16_t(sign | ((size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13));
}

}  // namespace
}  // namespace outrider
