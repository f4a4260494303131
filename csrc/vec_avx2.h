// Eight-lane vectors: AVX2 with FMA.
#pragma once

#include <immintrin.h>

#include <cstdint>

// For what keeps sums in registers from end to end.
#define OUTRIDER_INLINE __attribute__((always_inline)) inline

namespace outrider {
namespace {

struct Vec {
  static constexpr int kLanes = 8;
  static constexpr int kMaxRows = 6;
  using F = __m256;

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void hold(F& v) { __asm__("" : "+x"(v)); }  // in a register: else the compiler loads it for each use
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F all(float x) { return _mm256_set1_ps(x); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F bf16(const std::uint16_t* p) {
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
  }
  static void bf16_pair(const std::uint16_t* p, F& low, F& high) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    low = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
    high = _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static F power_of_two(F n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  static float sum(F v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  // out[i] = sum of the lanes of v[i].
  static void store_sums(const F (&v)[4], float* out) {
    const F ab = _mm256_unpacklo_ps(v[0], v[1]) + _mm256_unpackhi_ps(v[0], v[1]);
    const F cd = _mm256_unpacklo_ps(v[2], v[3]) + _mm256_unpackhi_ps(v[2], v[3]);
    const F four = _mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xee);
    _mm_storeu_ps(out, _mm256_castps256_ps128(four) + _mm256_extractf128_ps(four, 1));
  }
  static float largest(F v) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  // Bytes of four inputs a lane, and their dot products.
  static constexpr bool kWideDots = false;  // whether a dot never overflows, whatever the codes
  using B = __m256i;
  using A = __m256i;
  using I = __m256i;
  static B bytes(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static B quad(const std::int8_t* p) {
    std::int32_t four;
    __builtin_memcpy(&four, p, sizeof(four));
    return _mm256_set1_epi32(four);
  }
  static B low_nibbles(B v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static B high_nibbles(B v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
  static B either(B a, B b) { return _mm256_or_si256(a, b); }
  template <int Left>
  static B move_bits(B v, int mask) {
    const B moved = Left >= 0 ? _mm256_slli_epi16(v, Left & 15) : _mm256_srli_epi16(v, -Left & 15);
    return _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(mask)));
  }
  // Of 32 numbers; NaN counts as larger than all others.
  static float largest_magnitude(const float* x) {
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += 8) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
      most = _mm256_max_epi32(most, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1))));
  }
  // codes[i] = x[i] * factor, rounded, for 32 products within [-127, 127]; and the sums of either half of the codes.
  static void round_to_bytes(const float* x, F factor, std::int8_t* codes, std::int32_t* halves) {
    const auto whole = [&](int i) { return _mm256_cvtps_epi32(load(x + i) * factor); };
    const __m256i low = _mm256_packs_epi32(whole(0), whole(8)), high = _mm256_packs_epi32(whole(16), whole(24));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
    const __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
    const __m256i pairs = _mm256_hadd_epi32(fours, fours), sums = _mm256_hadd_epi32(pairs, pairs);
    halves[0] = _mm256_extract_epi32(sums, 0);
    halves[1] = _mm256_extract_epi32(sums, 4);
  }
  static A no_dots() { return _mm256_setzero_si256(); }
  static A dot(A sum, B codes, B values) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, values));
    __asm__("" : "+x"(sum));  // else the compiler regroups the sums and spills their terms
    return sum;
  }
  static I emptied(A sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
  static I times_sixteen(I a) { return _mm256_slli_epi32(a, 4); }
  static I plus(I a, I b) { return _mm256_add_epi32(a, b); }
  static I minus(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I whole(std::int32_t x) { return _mm256_set1_epi32(x); }
  static F floats(I v) { return _mm256_cvtepi32_ps(v); }
  static F unsigned_bytes(const std::uint8_t* p) { return floats(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
  static F signed_bytes(const std::uint8_t* p) { return floats(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
  static F halves(const std::uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
};

}  // namespace
}  // namespace outrider
