// Sixteen-lane vectors: AVX-512 F.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace outrider {
namespace {

struct Vec {
  static constexpr int kLanes = 16;
  static constexpr int kMaxRows = 8;
  using F = __m512;

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F all(float x) { return _mm512_set1_ps(x); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F bf16(const std::uint16_t* p) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
  }
  static void bf16_pair(const std::uint16_t* p, F& low, F& high) {
    const __m512i v = _mm512_loadu_si512(p);
    low = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
    high = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static F power_of_two(F n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
  }
  static float sum(F v) { return _mm512_reduce_add_ps(v); }
  static float largest(F v) { return _mm512_reduce_max_ps(v); }
};

}  // namespace
}  // namespace outrider
