// x86, 512 bits, with the dot products of VNNI (u8 x i8 -> i32 in one step). Float formats stay at 256
// bits: their eight sums are the contract's.
#include <immintrin.h>
#define BUILD_NAME "avx512vnni"
enum { LANES = 16, PART_STEPS_U6 = 4 };
typedef __m512i vi, Part, Scale; // Part: i32 sums; Scale: i32
typedef __m512 vf;
typedef __m256 f8;
typedef struct {
    __m512i bytes, minus; // x0 x1 x2 x3 in every lane; -128 * their sum
} xq;
typedef struct {
    int8_t v[4];
    int32_t minus;
} Quad;
INLINE Quad quad_of(const int8_t *x) {
    return (Quad){{x[0], x[1], x[2], x[3]}, -128 * (x[0] + x[1] + x[2] + x[3])};
}

INLINE vi vi_zero(void) { return _mm512_setzero_si512(); }
INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE vi vi_splat(int32_t a) { return _mm512_set1_epi32(a); }
INLINE vi vi_lookup16(const int8_t *table, vi index) {
    return _mm512_shuffle_epi8(
        _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)table)), index);
}
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
INLINE vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
INLINE vi vi_and_bytes(vi a, uint8_t mask) {
    return _mm512_and_si512(a, _mm512_set1_epi8((char)mask));
}
#define vi_shl16(a, n) _mm512_slli_epi16(a, n)
#define vi_shr16(a, n) _mm512_srli_epi16(a, n)
#define vi_shl32(a, n) _mm512_slli_epi32(a, n)
INLINE xq xq_load(const Quad *q) {
    return (xq){_mm512_set1_epi32(load_i32(q->v)), _mm512_set1_epi32(q->minus)};
}
INLINE vi dot_s8(vi acc, xq x, vi w) { // w + 128 is a u8; what it adds goes off again
    return _mm512_dpbusd_epi32(_mm512_add_epi32(acc, x.minus),
                               _mm512_xor_si512(w, _mm512_set1_epi8(-128)), x.bytes);
}
INLINE Part part_zero(void) { return vi_zero(); }
INLINE Part part_dot(Part p, xq x, vi w) { return _mm512_dpbusd_epi32(p, w, x.bytes); }
INLINE vi part_scaled(vi acc, Part p, Scale s) {
    return _mm512_add_epi32(acc, _mm512_mullo_epi32(p, s));
}
INLINE vi part_sum(vi acc, Part p) { return _mm512_add_epi32(acc, p); }
INLINE vi sub_dot(vi sub, xq x, vi w, Scale s) {
    (void)s;
    return dot_s8(sub, x, w);
}
INLINE vi sub_end(vi acc, vi sub, Scale s) { return part_scaled(acc, sub, s); }
INLINE vi pairs_u8(const void *p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vi pairs_i8(const void *p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vi pairs_dot(vi acc, vi pairs, const int16_t *two) {
    return _mm512_dpwssd_epi32(acc, pairs, _mm512_set1_epi32(load_i32(two)));
}
INLINE Scale scale_even(vi pairs) { return _mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16); }
INLINE Scale scale_odd(vi pairs) { return _mm512_srai_epi32(pairs, 16); }
INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
INLINE vf vf_splat(float a) { return _mm512_set1_ps(a); }
INLINE vf vf_of_vi(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE vf vf_of_f16(const void *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vf vf_of_e8m0(const void *p) {
    vi e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    vi first = _mm512_srli_epi32(e, 1), second = vi_sub(e, first), bias = _mm512_set1_epi32(63);
    return vf_mul(_mm512_castsi512_ps(_mm512_slli_epi32(vi_add(first, bias), 23)),
                  _mm512_castsi512_ps(_mm512_slli_epi32(vi_add(second, bias), 23)));
}

// What looked_up.h takes points of a grid with, one index per lane.
#define HAS_GATHER
INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
INLINE vi vi_shr32(vi a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
INLINE Scale scale_lanes(vi a) { return a; }
INLINE vi gather4(const uint32_t *grid, vi index) {
    return _mm512_i32gather_epi32(index, (const void *)grid, 4);
}
INLINE void gather8(const uint64_t *grid, vi index, vi *first, vi *second) {
    const void *points = grid;
    vi a = _mm512_i32gather_epi64(_mm512_castsi512_si256(index), points, 8); // lanes 0..7
    vi b = _mm512_i32gather_epi64(_mm512_extracti64x4_epi64(index, 1), points, 8);
    vi even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    *first = _mm512_permutex2var_epi32(a, even, b);
    *second = _mm512_permutex2var_epi32(a, vi_or(even, vi_splat(1)), b);
}
// Negate byte i of each lane where bit from + i of this byte of its signs is set.
INLINE vi negated(vi q, vi signs, const int byte, const int from) {
    const __m128i lanes = _mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c);
    vi every = vi_add(vi_splat(byte * 0x01010101), _mm512_broadcast_i32x4(lanes));
    __mmask64 minus = _mm512_test_epi8_mask(_mm512_shuffle_epi8(signs, every),
                                            vi_splat(0x08040201 << from));
    return _mm512_mask_sub_epi8(q, minus, vi_zero(), q);
}
#include "f8_avx.h"
