// Four-lane vectors in plain GNU C++: SSE2, NEON or scalar code, as the compiler likes. Multiply and add round twice.
#pragma once

#include <cstdint>
#include <cstring>

// For what keeps sums in registers from end to end. With four lanes that gains nothing, and takes minutes to compile.
#define OUTRIDER_INLINE inline

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
  static void hold(F&) {}
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
  static void store_sums(const F (&v)[4], float* out) {
    for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
  }
  static float largest(F v) {
    float most = v[0];
    for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
    return most;
  }

  // Bytes of four inputs a lane, and their dot products.
  static constexpr bool kWideDots = true;  // a dot never overflows, whatever the codes
  struct B {
    std::uint8_t byte[16];
  };
  using A = I;
  static B bytes(const std::uint8_t* p) {
    B v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static B quad(const std::int8_t* p) {
    B v;
    for (int i = 0; i < 16; ++i) v.byte[i] = static_cast<std::uint8_t>(p[i % 4]);
    return v;
  }
  static B low_nibbles(B v) {
    for (std::uint8_t& byte : v.byte) byte &= 15;
    return v;
  }
  static B high_nibbles(B v) {
    for (std::uint8_t& byte : v.byte) byte >>= 4;
    return v;
  }
  static B either(B a, B b) {
    for (int i = 0; i < 16; ++i) a.byte[i] |= b.byte[i];
    return a;
  }
  template <int Left>
  static B move_bits(B v, int mask) {
    for (std::uint8_t& byte : v.byte) byte = static_cast<std::uint8_t>((Left >= 0 ? byte << (Left & 7) : byte >> (-Left & 7)) & mask);
    return v;
  }
  // Of 32 numbers; NaN counts as larger than all others.
  static float largest_magnitude(const float* x) {
    std::uint32_t most = 0;
    for (int i = 0; i < 32; ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, x + i, sizeof(bits));
      bits &= 0x7fffffffu;
      most = bits > most ? bits : most;
    }
    float largest;
    std::memcpy(&largest, &most, sizeof(largest));
    return largest;
  }
  // codes[i] = x[i] * factor, rounded, for 32 products within [-127, 127]; and the sums of either half of the codes.
  static void round_to_bytes(const float* x, F factor, std::int8_t* codes, std::int32_t* halves) {
    halves[0] = halves[1] = 0;
    for (int i = 0; i < 32; i += kLanes) {
      const F magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
      const I whole = __builtin_convertvector(load(x + i) * factor + magic - magic, I);
      for (int j = 0; j < kLanes; ++j) {
        codes[i + j] = static_cast<std::int8_t>(whole[j]);
        halves[i / 16] += whole[j];
      }
    }
  }
  static A no_dots() { return whole(0); }
  static A dot(A sum, B codes, B values) {
    for (int i = 0; i < 16; ++i) sum[i / 4] += codes.byte[i] * static_cast<std::int8_t>(values.byte[i]);
    return sum;
  }
  static I emptied(A sum) { return sum; }
  static I times_sixteen(I a) { return a * 16; }
  static I plus(I a, I b) { return a + b; }
  static I minus(I a, I b) { return a - b; }
  static I whole(std::int32_t x) { return I{x, x, x, x}; }
  static F floats(I v) { return __builtin_convertvector(v, F); }
  static F unsigned_bytes(const std::uint8_t* p) { return floats(I{p[0], p[1], p[2], p[3]}); }
  static F signed_bytes(const std::uint8_t* p) {
    std::int8_t v[4];
    std::memcpy(v, p, 4);
    return floats(I{v[0], v[1], v[2], v[3]});
  }
  static F halves(const std::uint8_t* p) { return F{half(p), half(p + 2), half(p + 4), half(p + 6)}; }
  static float half(const std::uint8_t* p) {
    const std::uint32_t bits = p[0] | static_cast<std::uint32_t>(p[1]) << 8;
    const std::uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float sign = bits >> 15 ? -1.0f : 1.0f;
    if (exponent == 0) return sign * static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    const std::uint32_t wide = (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | fraction << 13;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return sign * value;
  }
};

}  // namespace
}  // namespace outrider
