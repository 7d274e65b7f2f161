// x86, 128 bits
#include <smmintrin.h>
#define BUILD_NAME "sse41"
enum { LANES = 4, PART_STEPS_U6 = 2 };
typedef __m128i vi, xq, Part, Scale; // Part, Scale: i16 pairs; a scale stands twice
typedef __m128 vf;
typedef struct {
    __m128 lo, hi;
} f8;
typedef struct {
    int8_t v[4];
} Quad;
INLINE Quad quad_of(const int8_t *x) { return (Quad){{x[0], x[1], x[2], x[3]}}; }

INLINE vi vi_zero(void) { return _mm_setzero_si128(); }
INLINE vi vi_load(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
INLINE vi vi_splat(int32_t a) { return _mm_set1_epi32(a); }
INLINE vi vi_lookup16(const int8_t *table, vi index) {
    return _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)table), index);
}
INLINE vi vi_add(vi a, vi b) { return _mm_add_epi32(a, b); }
INLINE vi vi_sub(vi a, vi b) { return _mm_sub_epi32(a, b); }
INLINE vi vi_or(vi a, vi b) { return _mm_or_si128(a, b); }
INLINE vi vi_and_bytes(vi a, uint8_t mask) { return _mm_and_si128(a, _mm_set1_epi8((char)mask)); }
#define vi_shl16(a, n) _mm_slli_epi16(a, n)
#define vi_shr16(a, n) _mm_srli_epi16(a, n)
#define vi_shl32(a, n) _mm_slli_epi32(a, n)
INLINE xq xq_load(const Quad *q) { return _mm_set1_epi32(load_i32(q)); }
INLINE vi dot_s8(vi acc, xq x, vi w) { // |w| as u8 (128 fits), its sign moved to x
    vi pairs = _mm_maddubs_epi16(_mm_abs_epi8(w), _mm_sign_epi8(x, w));
    return _mm_add_epi32(acc, _mm_madd_epi16(pairs, _mm_set1_epi16(1)));
}
INLINE Part part_zero(void) { return vi_zero(); }
INLINE Part part_dot(Part p, xq x, vi w) { return _mm_add_epi16(p, _mm_maddubs_epi16(w, x)); }
INLINE vi part_scaled(vi acc, Part p, Scale s) { return _mm_add_epi32(acc, _mm_madd_epi16(p, s)); }
INLINE vi part_sum(vi acc, Part p) { return part_scaled(acc, p, _mm_set1_epi16(1)); }
INLINE vi sub_dot(vi sub, xq x, vi w, Scale s) {
    return part_scaled(sub, _mm_maddubs_epi16(_mm_abs_epi8(w), _mm_sign_epi8(x, w)), s);
}
INLINE vi sub_end(vi acc, vi sub, Scale s) {
    (void)s;
    return vi_add(acc, sub);
}
INLINE vi pairs_u8(const void *p) { return _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p)); }
INLINE vi pairs_i8(const void *p) { return _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)); }
INLINE vi pairs_dot(vi acc, vi pairs, const int16_t *two) {
    return _mm_add_epi32(acc, _mm_madd_epi16(pairs, _mm_set1_epi32(load_i32(two))));
}
INLINE Scale scale_even(vi pairs) {
    return _mm_shuffle_epi8(pairs, _mm_set_epi64x(0x0d0c0d0c09080908, 0x0504050401000100));
}
INLINE Scale scale_odd(vi pairs) {
    return _mm_shuffle_epi8(pairs, _mm_set_epi64x(0x0f0e0f0e0b0a0b0a, 0x0706070603020302));
}
INLINE vf vf_zero(void) { return _mm_setzero_ps(); }
INLINE vf vf_splat(float a) { return _mm_set1_ps(a); }
INLINE vf vf_of_vi(vi a) { return _mm_cvtepi32_ps(a); }
INLINE vf vf_mul(vf a, vf b) { return _mm_mul_ps(a, b); }
INLINE vf vf_add(vf a, vf b) { return _mm_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm_sub_ps(a, b); }
INLINE void vf_store(float *p, vf a) { _mm_storeu_ps(p, a); }
INLINE vf vf_load(const float *p) { return _mm_loadu_ps(p); }
INLINE vf vf_of_f16(const void *p) {
    __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)p));
    __m128i sign = _mm_and_si128(wide, _mm_set1_epi32(0x8000)),
            rest = _mm_and_si128(wide, _mm_set1_epi32(0x7fff));
    __m128i bits = _mm_or_si128(_mm_slli_epi32(sign, 16), _mm_slli_epi32(rest, 13));
    return _mm_mul_ps(_mm_castsi128_ps(bits), _mm_set1_ps(0x1p112f));
}
#define HAS_TINY_F16
INLINE vf vf_of_tiny_f16(const void *p) { // subnormals apart, as in wasm.h
    __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)p));
    __m128i sign = _mm_slli_epi32(_mm_and_si128(wide, _mm_set1_epi32(0x8000)), 16),
            rest = _mm_slli_epi32(_mm_and_si128(wide, _mm_set1_epi32(0x7fff)), 13);
    const __m128i least = _mm_set1_epi32(113 << 23);
    __m128i normal = _mm_add_epi32(rest, _mm_set1_epi32(112 << 23));
    __m128 subnormal =
        _mm_sub_ps(_mm_castsi128_ps(_mm_add_epi32(rest, least)), _mm_castsi128_ps(least));
    __m128i is_normal = _mm_cmpgt_epi32(rest, _mm_set1_epi32((1 << 23) - 1));
    __m128i value = _mm_blendv_epi8(_mm_castps_si128(subnormal), normal, is_normal);
    return _mm_castsi128_ps(_mm_or_si128(value, sign));
}
INLINE vf vf_of_e8m0(const void *p) {
    vi e = _mm_cvtepu8_epi32(_mm_cvtsi32_si128(load_i32(p)));
    vi first = _mm_srli_epi32(e, 1), second = vi_sub(e, first), bias = _mm_set1_epi32(63);
    return vf_mul(_mm_castsi128_ps(_mm_slli_epi32(vi_add(first, bias), 23)),
                  _mm_castsi128_ps(_mm_slli_epi32(vi_add(second, bias), 23)));
}
INLINE vf vf_of_bf16(const void *p) {
    __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)p));
    return _mm_castsi128_ps(_mm_slli_epi32(wide, 16));
}
INLINE f8 f8_zero(void) { return (f8){vf_zero(), vf_zero()}; }
INLINE f8 f8_load(const void *p) {
    return (f8){_mm_loadu_ps((const float *)p), _mm_loadu_ps((const float *)p + 4)};
}
INLINE f8 f8_of_f16(const void *p) { return (f8){vf_of_f16(p), vf_of_f16((const uint8_t *)p + 8)}; }
INLINE f8 f8_of_bf16(const void *p) {
    return (f8){vf_of_bf16(p), vf_of_bf16((const uint8_t *)p + 8)};
}
INLINE f8 f8_mul_add(f8 acc, f8 a, f8 b) {
    return (f8){vf_add(acc.lo, vf_mul(a.lo, b.lo)), vf_add(acc.hi, vf_mul(a.hi, b.hi))};
}
INLINE float f8_sum(f8 a) { // ((0+4)+(2+6)) + ((1+5)+(3+7))
    __m128 s = _mm_add_ps(a.lo, a.hi);
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
