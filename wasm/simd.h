// The primitives of the fast path, one set per instruction set, all with the same meaning.
//
// A vector holds LANES rows: lane r belongs to row r of a group, so no sum ever crosses lanes and
// the float order is the same whatever the width. Integer primitives are exact; float primitives
// are one IEEE operation each, never fused.
//
//   vi     LANES x i32, or 2*LANES x i16, or 4*LANES x i8: rows side by side
//   vf     LANES x f32
//   xq     four int8 activations, given to every row
//   Part   sum of a few columns per row          Scale   integer scale of a sub-block per row
//          (u8 weights); sub_dot, sub_end: the same for i8 weights, x86 scales at every step
//   f8     eight f32 lanes, lane = column mod 8: for F32 and F16 weights
//
// The products differ most. x86 has pmaddubsw (u8 x i8 -> i16 pairs), so a Part stays i16 pairs
// there and the scale is applied while widening; NEON has sdot; plain wasm multiplies i16, so its
// activations are stored widened, even columns first. Relaxed wasm names either of the first two.
#ifndef EXPERT_SIMD_H
#define EXPERT_SIMD_H

#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define NO_UNROLL _Pragma("clang loop unroll(disable)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#define NO_UNROLL _Pragma("GCC unroll 1")
#endif

#define EACH(i, n) UNROLL for (int i = 0; i < (n); i++) // n is a constant once inlined
#define EACH_ROLLED(i, n) NO_UNROLL for (int i = 0; i < (n); i++)

INLINE int32_t load_i32(const void *p) {
    int32_t v;
    __builtin_memcpy(&v, p, 4);
    return v;
}

#if defined(__wasm__)
// ---- wasm SIMD128: plain, or with one of the two relaxed products (-DEXPERT_RELAXED=16 or 32).
//
// A relaxed product may do as it likes where the weight byte is not 0..127 or the activation is -128,
// and gives the one exact answer everywhere else. So part_dot(), whose weights are 0..127, uses it, and
// dot_s8() never does: its weights may be -128. Of the two, 16 is pmaddubsw on x86 and 32 is sdot on arm.
#include <wasm_simd128.h>
#if !defined(EXPERT_RELAXED)
#define BUILD_NAME "wasm-plain"
#elif EXPERT_RELAXED == 16
#define BUILD_NAME "wasm-relaxed16"
#elif EXPERT_RELAXED == 32
#define BUILD_NAME "wasm-relaxed32"
#endif
#if defined(EXPERT_RELAXED) && EXPERT_RELAXED == 16
enum { LANES = 4, PART_STEPS_U6 = 2 }; // Part, Scale: i16 pairs; a scale stands twice
#else
enum { LANES = 4, PART_STEPS_U6 = 4 };
#endif
typedef v128_t vi, vf, Part, Scale;
typedef struct {
    v128_t even, odd; // i16 pairs (x0, x2) and (x1, x3) in every lane
    v128_t bytes;     // relaxed: x0 x1 x2 x3 in every lane
} xq;
typedef struct {
    v128_t lo, hi;
} f8;
typedef struct {
    int16_t v[4]; // x0 x2 x1 x3
#if defined(EXPERT_RELAXED)
    int8_t bytes[4]; // both forms: whichever a format does not read is never loaded
#endif
} Quad;
#if defined(EXPERT_RELAXED)
INLINE Quad quad_of(const int8_t *x) {
    return (Quad){{x[0], x[2], x[1], x[3]}, {x[0], x[1], x[2], x[3]}};
}
#else
INLINE Quad quad_of(const int8_t *x) { return (Quad){{x[0], x[2], x[1], x[3]}}; }
#endif

INLINE vi vi_zero(void) { return wasm_i32x4_const_splat(0); }
INLINE vi vi_load(const void *p) { return wasm_v128_load(p); }
INLINE vi vi_splat(int32_t a) { return wasm_i32x4_splat(a); }
INLINE vi vi_lookup16(const int8_t *table, vi index) {
#if defined(EXPERT_RELAXED) // an index of 0..15 gives the same bytes in both
    return wasm_i8x16_relaxed_swizzle(wasm_v128_load(table), index);
#else
    return wasm_i8x16_swizzle(wasm_v128_load(table), index);
#endif
}
INLINE vi vi_add(vi a, vi b) { return wasm_i32x4_add(a, b); }
INLINE vi vi_sub(vi a, vi b) { return wasm_i32x4_sub(a, b); }
INLINE vi vi_or(vi a, vi b) { return wasm_v128_or(a, b); }
INLINE vi vi_and_bytes(vi a, uint8_t mask) {
    return wasm_v128_and(a, wasm_i8x16_splat((int8_t)mask));
}
#define vi_shl16(a, n) wasm_i16x8_shl(a, n)
#define vi_shr16(a, n) wasm_u16x8_shr(a, n)
#define vi_shl32(a, n) wasm_i32x4_shl(a, n)
INLINE xq xq_load(const Quad *q) {
#if defined(EXPERT_RELAXED)
    const v128_t bytes = wasm_v128_load32_splat(q->bytes);
#else
    const v128_t bytes = wasm_i32x4_const_splat(0);
#endif
    return (xq){wasm_v128_load32_splat(q), wasm_v128_load32_splat(q->v + 2), bytes};
}
INLINE vi dot_s8(vi acc, xq x, vi w) {
    vi even = wasm_i16x8_shr(wasm_i16x8_shl(w, 8), 8), odd = wasm_i16x8_shr(w, 8);
    return vi_add(acc,
                  vi_add(wasm_i32x4_dot_i16x8(even, x.even), wasm_i32x4_dot_i16x8(odd, x.odd)));
}
INLINE vi sub_dot(vi sub, xq x, vi w, Scale s) {
    (void)s;
    return dot_s8(sub, x, w);
}
INLINE Part part_zero(void) { return vi_zero(); }
INLINE vi pairs_u8(const void *p) { return wasm_u16x8_load8x8(p); }
INLINE vi pairs_i8(const void *p) { return wasm_i16x8_load8x8(p); }
INLINE vi pairs_dot(vi acc, vi pairs, const int16_t *two) {
    return vi_add(acc, wasm_i32x4_dot_i16x8(pairs, wasm_v128_load32_splat(two)));
}
#if defined(EXPERT_RELAXED) && EXPERT_RELAXED == 16
INLINE Part part_dot(Part p, xq x, vi w) {
    return wasm_i16x8_add(p, wasm_i16x8_relaxed_dot_i8x16_i7x16(x.bytes, w));
}
INLINE vi part_scaled(vi acc, Part p, Scale s) { return vi_add(acc, wasm_i32x4_dot_i16x8(p, s)); }
INLINE Scale scale_even(vi pairs) {
    return wasm_i16x8_shuffle(pairs, pairs, 0, 0, 2, 2, 4, 4, 6, 6);
}
INLINE Scale scale_odd(vi pairs) {
    return wasm_i16x8_shuffle(pairs, pairs, 1, 1, 3, 3, 5, 5, 7, 7);
}
INLINE vi part_sum(vi acc, Part p) { return part_scaled(acc, p, wasm_i16x8_const_splat(1)); }
INLINE vi sub_end(vi acc, vi sub, Scale s) {
    return vi_add(acc, wasm_i32x4_mul(sub, wasm_i32x4_shr(s, 16)));
}
#else
#if defined(EXPERT_RELAXED)
INLINE Part part_dot(Part p, xq x, vi w) {
    return wasm_i32x4_relaxed_dot_i8x16_i7x16_add(x.bytes, w, p);
}
#else
INLINE Part part_dot(Part p, xq x, vi w) {
    vi even = wasm_v128_and(w, wasm_i16x8_const_splat(0xff)), odd = wasm_u16x8_shr(w, 8);
    return vi_add(p, vi_add(wasm_i32x4_dot_i16x8(even, x.even), wasm_i32x4_dot_i16x8(odd, x.odd)));
}
#endif
INLINE vi part_scaled(vi acc, Part p, Scale s) { return vi_add(acc, wasm_i32x4_mul(p, s)); }
INLINE vi part_sum(vi acc, Part p) { return vi_add(acc, p); }
INLINE vi sub_end(vi acc, vi sub, Scale s) { return vi_add(acc, wasm_i32x4_mul(sub, s)); }
INLINE Scale scale_even(vi pairs) { return wasm_i32x4_shr(wasm_i32x4_shl(pairs, 16), 16); }
INLINE Scale scale_odd(vi pairs) { return wasm_i32x4_shr(pairs, 16); }
#endif
INLINE vf vf_zero(void) { return wasm_f32x4_const_splat(0); }
INLINE vf vf_splat(float a) { return wasm_f32x4_splat(a); }
INLINE vf vf_of_vi(vi a) { return wasm_f32x4_convert_i32x4(a); }
INLINE vf vf_mul(vf a, vf b) { return wasm_f32x4_mul(a, b); }
INLINE vf vf_add(vf a, vf b) { return wasm_f32x4_add(a, b); }
INLINE vf vf_sub(vf a, vf b) { return wasm_f32x4_sub(a, b); }
INLINE void vf_store(float *p, vf a) { wasm_v128_store(p, a); }
INLINE vf vf_load(const float *p) { return wasm_v128_load(p); }
INLINE vf f16_lanes(v128_t wide) { // four f16 in the low halves of i32 lanes
    v128_t sign = wasm_v128_and(wide, wasm_i32x4_const_splat(0x8000));
    v128_t rest = wasm_v128_and(wide, wasm_i32x4_const_splat(0x7fff));
    v128_t bits = wasm_v128_or(wasm_i32x4_shl(sign, 16), wasm_i32x4_shl(rest, 13));
    return wasm_f32x4_mul(bits, wasm_f32x4_const_splat(0x1p112f));
}
INLINE vf vf_of_f16(const void *p) { return f16_lanes(wasm_u32x4_load16x4(p)); }
INLINE vf vf_of_e8m0(const void *p) {
    vi e = wasm_u32x4_extend_low_u16x8(wasm_u16x8_extend_low_u8x16(wasm_v128_load32_zero(p)));
    vi first = wasm_u32x4_shr(e, 1), second = vi_sub(e, first), bias = wasm_i32x4_const_splat(63);
    return vf_mul(wasm_i32x4_shl(vi_add(first, bias), 23),
                  wasm_i32x4_shl(vi_add(second, bias), 23));
}
INLINE f8 f8_zero(void) { return (f8){vf_zero(), vf_zero()}; }
INLINE f8 f8_load(const void *p) {
    return (f8){wasm_v128_load(p), wasm_v128_load((const uint8_t *)p + 16)};
}
INLINE f8 f8_of_f16(const void *p) {
    return (f8){f16_lanes(wasm_u32x4_load16x4(p)),
                f16_lanes(wasm_u32x4_load16x4((const uint8_t *)p + 8))};
}
INLINE f8 f8_of_bf16(const void *p) {
    return (f8){wasm_i32x4_shl(wasm_u32x4_load16x4(p), 16),
                wasm_i32x4_shl(wasm_u32x4_load16x4((const uint8_t *)p + 8), 16)};
}
INLINE f8 f8_mul_add(f8 acc, f8 a, f8 b) {
    return (f8){vf_add(acc.lo, vf_mul(a.lo, b.lo)), vf_add(acc.hi, vf_mul(a.hi, b.hi))};
}
INLINE float f8_sum(f8 a) { // ((0+4)+(2+6)) + ((1+5)+(3+7))
    vf s = vf_add(a.lo, a.hi);
    return (wasm_f32x4_extract_lane(s, 0) + wasm_f32x4_extract_lane(s, 2)) +
           (wasm_f32x4_extract_lane(s, 1) + wasm_f32x4_extract_lane(s, 3));
}

#elif defined(__AVX2__)
// ---- x86, 256 bits
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
INLINE f8 f8_zero(void) { return _mm256_setzero_ps(); }
INLINE f8 f8_load(const void *p) { return _mm256_loadu_ps((const float *)p); }
INLINE f8 f8_of_f16(const void *p) { return vf_of_f16(p); }
INLINE f8 f8_of_bf16(const void *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE f8 f8_mul_add(f8 acc, f8 a, f8 b) { return _mm256_add_ps(acc, _mm256_mul_ps(a, b)); }
INLINE float f8_sum(f8 a) { // ((0+4)+(2+6)) + ((1+5)+(3+7))
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

#elif defined(__SSE4_1__)
// ---- x86, 128 bits
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

#elif defined(__ARM_NEON)
// ---- NEON
#include <arm_neon.h>
#define BUILD_NAME "neon"
enum { LANES = 4, PART_STEPS_U6 = 4 };
typedef int8x16_t vi, xq;
typedef int32x4_t Part, Scale;
typedef float32x4_t vf;
typedef struct {
    float32x4_t lo, hi;
} f8;
typedef struct {
    int8_t v[4];
} Quad;
INLINE Quad quad_of(const int8_t *x) { return (Quad){{x[0], x[1], x[2], x[3]}}; }

INLINE int32x4_t as_i32(vi a) { return vreinterpretq_s32_s8(a); }
INLINE vi of_i32(int32x4_t a) { return vreinterpretq_s8_s32(a); }
INLINE vi vi_zero(void) { return vdupq_n_s8(0); }
INLINE vi vi_load(const void *p) { return vld1q_s8((const int8_t *)p); }
INLINE vi vi_splat(int32_t a) { return of_i32(vdupq_n_s32(a)); }
INLINE vi vi_lookup16(const int8_t *table, vi index) {
    return vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s8(index));
}
INLINE vi vi_add(vi a, vi b) { return of_i32(vaddq_s32(as_i32(a), as_i32(b))); }
INLINE vi vi_sub(vi a, vi b) { return of_i32(vsubq_s32(as_i32(a), as_i32(b))); }
INLINE vi vi_or(vi a, vi b) { return vorrq_s8(a, b); }
INLINE vi vi_and_bytes(vi a, uint8_t mask) { return vandq_s8(a, vdupq_n_s8((int8_t)mask)); }
#define vi_shl16(a, n) vreinterpretq_s8_u16(vshlq_u16(vreinterpretq_u16_s8(a), vdupq_n_s16(n)))
#define vi_shr16(a, n) vi_shl16(a, -(n))
#define vi_shl32(a, n) of_i32(vshlq_n_s32(as_i32(a), n))
INLINE xq xq_load(const Quad *q) { return of_i32(vdupq_n_s32(load_i32(q))); }
INLINE int32x4_t dot_i32(int32x4_t acc, int8x16_t x, int8x16_t w) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(acc, x, w);
#else // pairs stay within i16: 2 * 128 * 127
    int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(w)),
              high = vmull_s8(vget_high_s8(x), vget_high_s8(w));
    return vpadalq_s16(acc, vpaddq_s16(low, high));
#endif
}
INLINE vi dot_s8(vi acc, xq x, vi w) { return of_i32(dot_i32(as_i32(acc), x, w)); }
INLINE Part part_zero(void) { return vdupq_n_s32(0); }
INLINE Part part_dot(Part p, xq x, vi w) { return dot_i32(p, x, w); }
INLINE vi part_scaled(vi acc, Part p, Scale s) { return of_i32(vmlaq_s32(as_i32(acc), p, s)); }
INLINE vi part_sum(vi acc, Part p) { return of_i32(vaddq_s32(as_i32(acc), p)); }
INLINE vi sub_dot(vi sub, xq x, vi w, Scale s) {
    (void)s;
    return dot_s8(sub, x, w);
}
INLINE vi sub_end(vi acc, vi sub, Scale s) { return part_scaled(acc, as_i32(sub), s); }
INLINE vi pairs_u8(const void *p) {
    return vreinterpretq_s8_u16(vmovl_u8(vld1_u8((const uint8_t *)p)));
}
INLINE vi pairs_i8(const void *p) {
    return vreinterpretq_s8_s16(vmovl_s8(vld1_s8((const int8_t *)p)));
}
INLINE vi pairs_dot(vi acc, vi pairs, const int16_t *two) {
    int16x8_t a = vreinterpretq_s16_s8(pairs),
              b = vreinterpretq_s16_s32(vdupq_n_s32(load_i32(two)));
    int32x4_t low = vmull_s16(vget_low_s16(a), vget_low_s16(b)),
              high = vmull_s16(vget_high_s16(a), vget_high_s16(b));
    return of_i32(vaddq_s32(as_i32(acc), vpaddq_s32(low, high)));
}
INLINE Scale scale_even(vi pairs) { return vshrq_n_s32(vshlq_n_s32(as_i32(pairs), 16), 16); }
INLINE Scale scale_odd(vi pairs) { return vshrq_n_s32(as_i32(pairs), 16); }
INLINE vf vf_zero(void) { return vdupq_n_f32(0); }
INLINE vf vf_splat(float a) { return vdupq_n_f32(a); }
INLINE vf vf_of_vi(vi a) { return vcvtq_f32_s32(as_i32(a)); }
INLINE vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
INLINE vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
INLINE vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
INLINE void vf_store(float *p, vf a) { vst1q_f32(p, a); }
INLINE vf vf_load(const float *p) { return vld1q_f32(p); }
INLINE vf vf_of_f16(const void *p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(
        vld1_u8((const uint8_t *)p))); // exact; subnormals too (FPCR.FZ16 is clear)
}
INLINE vf vf_of_e8m0(const void *p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    uint32x4_t e = vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
    uint32x4_t first = vshrq_n_u32(e, 1), second = vsubq_u32(e, first), bias = vdupq_n_u32(63);
    return vf_mul(vreinterpretq_f32_u32(vshlq_n_u32(vaddq_u32(first, bias), 23)),
                  vreinterpretq_f32_u32(vshlq_n_u32(vaddq_u32(second, bias), 23)));
}
INLINE vf vf_of_bf16(const void *p) {
    uint16x4_t half = vreinterpret_u16_u8(vld1_u8((const uint8_t *)p));
    return vreinterpretq_f32_u32(vshll_n_u16(half, 16));
}
INLINE f8 f8_zero(void) { return (f8){vf_zero(), vf_zero()}; }
INLINE f8 f8_load(const void *p) {
    return (f8){vld1q_f32((const float *)p), vld1q_f32((const float *)p + 4)};
}
INLINE f8 f8_of_f16(const void *p) { return (f8){vf_of_f16(p), vf_of_f16((const uint8_t *)p + 8)}; }
INLINE f8 f8_of_bf16(const void *p) {
    return (f8){vf_of_bf16(p), vf_of_bf16((const uint8_t *)p + 8)};
}
INLINE f8 f8_mul_add(f8 acc, f8 a, f8 b) {
    return (f8){vf_add(acc.lo, vf_mul(a.lo, b.lo)), vf_add(acc.hi, vf_mul(a.hi, b.hi))};
}
INLINE float f8_sum(f8 a) { // ((0+4)+(2+6)) + ((1+5)+(3+7))
    float32x4_t s = vaddq_f32(a.lo, a.hi);
    return (vgetq_lane_f32(s, 0) + vgetq_lane_f32(s, 2)) +
           (vgetq_lane_f32(s, 1) + vgetq_lane_f32(s, 3));
}
#else
#error "no instruction set chosen: define EXPERT_SCALAR for the reference"
#endif

INLINE vi low_nibbles(vi w) { return vi_and_bytes(w, 0x0f); }
INLINE vi high_nibbles(vi w) { return vi_and_bytes(vi_shr16(w, 4), 0x0f); }

#endif
