// Four-lane vectors in plain GNU C++: SSE2, NEON or scalar code, as the compiler likes. Multiply and add round twice.
#pragma once

#include <cstdint>
#include <cstring>

namespace outrider {
namespace {

struct Vec {
  static constexpr int kLanes = 4;
  static constexpr int kMaxRows = 4;
  typedef float F __attribute__((vector_size(16)));
  typedef std::int32_t I __attribute__((vector_size(16)));
  typedef std::uint32_t U __attribute__((vector_size(16)));

  static F load(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void store(float* p, F v) { std::memcpy(p, &v, sizeof(v)); }
  static F all(float x) { return F{x, x, x, x}; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F bf16(const std::uint16_t* p) {
    const U v = {p[0], p[1], p[2], p[3]};
    return reinterpret_cast<F>(v << 16);
  }
  static void bf16_pair(const std::uint16_t* p, F& low, F& high) {
    U v;
    std::memcpy(&v, p, sizeof(v));
    low = reinterpret_cast<F>(v << 16);
    high = reinterpret_cast<F>(v & 0xffff0000u);
  }
  // 2^n of whole numbers n in [-126, 127].
  static F power_of_two(F n) { return reinterpret_cast<F>((__builtin_convertvector(n, I) + 127) << 23); }
  static float sum(F v) { return (v[0] + v[2]) + (v[1] + v[3]); }
  static float largest(F v) {
    float most = v[0];
    for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
    return most;
  }
};

}  // namespace
}  // namespace outrider
