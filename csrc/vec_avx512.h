// Sixteen-lane vectors: AVX-512 F.
#pragma once

#include <immintrin.h>

#include <cstdint>

// For what keeps sums in registers from end to end.
#define OUTRIDER_INLINE __attribute__((always_inline)) inline

namespace outrider {
namespace {

struct Vec {
  static constexpr int kLanes = 16;
  static constexpr int kMaxRows = 8;
  using F = __m512;

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void hold(F& v) { __asm__("" : "+v"(v)); }  // in a register: else the compiler loads it for each use
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
  // out[i] = sum of the lanes of v[i].
  static void store_sums(const F (&v)[4], float* out) {
    const F ab = _mm512_mask_blend_ps(0xcccc, v[0], v[1]) + _mm512_shuffle_ps(v[0], v[1], 0x4e);
    const F cd = _mm512_mask_blend_ps(0xcccc, v[2], v[3]) + _mm512_shuffle_ps(v[2], v[3], 0x4e);
    const F four = _mm512_shuffle_ps(ab, cd, 0x88) + _mm512_shuffle_ps(ab, cd, 0xdd);
    const __m256 two = _mm512_castps512_ps256(four) + _mm512_extractf32x8_ps(four, 1);
    _mm_storeu_ps(out, _mm256_castps256_ps128(two) + _mm256_extractf128_ps(two, 1));
  }
  static float largest(F v) { return _mm512_reduce_max_ps(v); }

  // Bytes of four inputs a lane, and their dot products.
  static constexpr bool kWideDots = true;  // whether a dot never overflows, whatever the codes
  using B = __m512i;
  using A = __m512i;
  using I = __m512i;
  static B bytes(const std::uint8_t* p) { return _mm512_loadu_si512(reinterpret_cast<const __m512i*>(p)); }
  static B quad(const std::int8_t* p) {
    std::int32_t four;
    __builtin_memcpy(&four, p, sizeof(four));
    return _mm512_set1_epi32(four);
  }
  static B low_nibbles(B v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static B high_nibbles(B v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
  static B either(B a, B b) { return _mm512_or_si512(a, b); }
  template <int Left>
  static B move_bits(B v, int mask) {
    const B moved = Left >= 0 ? _mm512_slli_epi16(v, Left & 15) : _mm512_srli_epi16(v, -Left & 15);
    return _mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(mask)));
  }
  // Of 32 numbers; NaN counts as larger than all others.
  static float largest_magnitude(const float* x) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i low = _mm512_and_si512(_mm512_loadu_si512(x), magnitude), high = _mm512_and_si512(_mm512_loadu_si512(x + 16), magnitude);
    const std::int32_t bits = _mm512_reduce_max_epi32(_mm512_max_epi32(low, high));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits)));
  }
  // codes[i] = x[i] * factor, rounded, for 32 products within [-127, 127]; and the sums of either half of the codes.
  static void round_to_bytes(const float* x, F factor, std::int8_t* codes, std::int32_t* halves) {
    const __m128i low = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(load(x) * factor));
    const __m128i high = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(load(x + 16) * factor));
    const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
    const __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    const __m256i pairs = _mm256_hadd_epi32(fours, fours), sums = _mm256_hadd_epi32(pairs, pairs);
    halves[0] = _mm256_extract_epi32(sums, 0);
    halves[1] = _mm256_extract_epi32(sums, 4);
  }
  static A no_dots() { return _mm512_setzero_si512(); }
  static A dot(A sum, B codes, B values) { return _mm512_dpbusd_epi32(sum, codes, values); }
  static I emptied(A sum) { return sum; }
  static I times_sixteen(I a) { return _mm512_slli_epi32(a, 4); }
  static I plus(I a, I b) { return _mm512_add_epi32(a, b); }
  static I minus(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I whole(std::int32_t x) { return _mm512_set1_epi32(x); }
  static F floats(I v) { return _mm512_cvtepi32_ps(v); }
  static F unsigned_bytes(const std::uint8_t* p) { return floats(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
  static F signed_bytes(const std::uint8_t* p) { return floats(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
  static F halves(const std::uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
};

}  // namespace
}  // namespace outrider
