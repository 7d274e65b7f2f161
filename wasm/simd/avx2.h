// x86, 256 bits
#include <immintrin.h>
#define BUILD_NAME "avx2"
enum { LANES = 8, PART_STEPS_U6 = 2 };
typedef __m256i vi, xq, Part, Scale; // Part, Scale: i16 pairs; a scale stands twice
typedef __m256 vf, f8;
typedef struct {
    int8_t v[4];
} Quad;
INLINE Quad quad_of(const int8_t *x) { return (Quad){{x[0], x[1], x[2], x[3]}}; }

INLINE vi vi_zero(void) { return _mm256_setzero_si256(); }
INLINE vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE vi vi_splat(int32_t a) { return _mm256_set1_epi32(a); }
INLINE vi vi_lookup16(const int8_t *table, vi index) {
    return _mm256_shuffle_epi8(
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)table)), index);
}
INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vi vi_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
INLINE vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
INLINE vi vi_and_bytes(vi a, uint8_t mask) {
    return _mm256_and_si256(a, _mm256_set1_epi8((char)mask));
}
#define vi_shl16(a, n) _mm256_slli_epi16(a, n)
#define vi_shr16(a, n) _mm256_srli_epi16(a, n)
#define vi_shl32(a, n) _mm256_slli_epi32(a, n)
INLINE xq xq_load(const Quad *q) { return _mm256_set1_epi32(load_i32(q)); }
INLINE vi dot_s8(vi acc, xq x, vi w) { // |w| as u8 (128 fits), its sign moved to x
    vi pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE Part part_zero(void) { return vi_zero(); }
INLINE Part part_dot(Part p, xq x, vi w) { return _mm256_add_epi16(p, _mm256_maddubs_epi16(w, x)); }
INLINE vi part_scaled(vi acc, Part p, Scale s) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(p, s));
}
INLINE vi part_sum(vi acc, Part p) { return part_scaled(acc, p, _mm256_set1_epi16(1)); }
INLINE vi sub_dot(vi sub, xq x, vi w, Scale s) {
    return part_scaled(sub, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), s);
}
INLINE vi sub_end(vi acc, vi sub, Scale s) {
    (void)s;
    return vi_add(acc, sub);
}
INLINE vi pairs_u8(const void *p) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
}
INLINE vi pairs_i8(const void *p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
}
INLINE vi pairs_dot(vi acc, vi pairs, const int16_t *two) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi32(load_i32(two))));
}
INLINE Scale scale_even(vi pairs) {
    const int64_t lo = 0x0504050401000100, hi = 0x0d0c0d0c09080908;
    return _mm256_shuffle_epi8(pairs, _mm256_set_epi64x(hi, lo, hi, lo));
}
INLINE Scale scale_odd(vi pairs) {
    const int64_t lo = 0x0706070603020302, hi = 0x0f0e0f0e0b0a0b0a;
    return _mm256_shuffle_epi8(pairs, _mm256_set_epi64x(hi, lo, hi, lo));
}
INLINE vf vf_zero(void) { return _mm256_setzero_ps(); }
INLINE vf vf_splat(float a) { return _mm256_set1_ps(a); }
INLINE vf vf_of_vi(vi a) { return _mm256_cvtepi32_ps(a); }
INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE vf vf_of_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf vf_of_e8m0(const void *p) {
    vi e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    vi first = _mm256_srli_epi32(e, 1), second = vi_sub(e, first), bias = _mm256_set1_epi32(63);
    return vf_mul(_mm256_castsi256_ps(_mm256_slli_epi32(vi_add(first, bias), 23)),
                  _mm256_castsi256_ps(_mm256_slli_epi32(vi_add(second, bias), 23)));
}

// What looked_up.h takes points of a grid with, one index per lane.
#define HAS_GATHER
INLINE vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
INLINE vi vi_xor(vi a, vi b) { return _mm256_xor_si256(a, b); }
INLINE vi vi_shr32(vi a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE Scale scale_lanes(vi a) { return vi_or(a, vi_shl32(a, 16)); }
INLINE vi gather4(const uint32_t *grid, vi index) {
    return _mm256_i32gather_epi32((const int *)(const void *)grid, index, 4);
}
INLINE void gather8(const uint64_t *grid, vi index, vi *first, vi *second) {
    const long long *points = (const long long *)(const void *)grid;
    __m256 a = _mm256_castsi256_ps(
        _mm256_i32gather_epi64(points, _mm256_castsi256_si128(index), 8)); // lanes 0..3
    __m256 b = _mm256_castsi256_ps(
        _mm256_i32gather_epi64(points, _mm256_extracti128_si256(index, 1), 8));
    *first = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), 0xd8);
    *second = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8);
}
// Negate byte i of each lane where bit from + i of this byte of its signs is set.
INLINE vi negated(vi q, vi signs, const int byte, const int from) {
    const __m128i lanes = _mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c);
    vi every = vi_add(vi_splat(byte * 0x01010101), _mm256_broadcastsi128_si256(lanes));
    vi bit = _mm256_set1_epi32(0x08040201 << from);
    vi minus = _mm256_cmpeq_epi8(vi_and(_mm256_shuffle_epi8(signs, every), bit), bit);
    return _mm256_sub_epi8(vi_xor(q, minus), minus);
}
#include "f8_avx.h"
