// wasm SIMD128: plain, or with one of the two relaxed products (-DEXPERT_RELAXED=16 or 32).
//
// A relaxed product takes i8 by 0..127, and gives the one exact answer there: two products of i16 or
// four of i32 cannot overflow. Where the second byte is not 0..127 it may do as it likes. Weights of
// part_dot() are 0..127. Those of dot_s8() may be -128, so there x is the second byte: its positive
// part and its negative part, one product each (build 32; in build 16 plain products are as fast).
// Of the two, 16 is pmaddubsw on x86 and 32 is sdot on arm, vpdpbusd on x86 that has it.
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
#if defined(EXPERT_RELAXED) && EXPERT_RELAXED == 32
typedef struct {
    v128_t bytes, above, below; // x0 x1 x2 x3 in every lane: x, max(x, 0), max(-x, 0)
} xq;
#else
typedef struct {
    v128_t even, odd; // i16 pairs (x0, x2) and (x1, x3) in every lane
    v128_t bytes;     // relaxed: x0 x1 x2 x3 in every lane
} xq;
#endif
typedef struct {
    v128_t lo, hi;
} f8;
#if defined(EXPERT_RELAXED) && EXPERT_RELAXED == 32
typedef struct {
    int8_t bytes[4], above[4], below[4];
} Quad;
INLINE Quad quad_of(const int8_t *x) {
    Quad quad;
    for (int i = 0; i < 4; i++) {
        quad.bytes[i] = x[i];
        quad.above[i] = x[i] > 0 ? x[i] : 0;
        quad.below[i] = x[i] < 0 ? (int8_t)-x[i] : 0;
    }
    return quad;
}
INLINE xq xq_load(const Quad *q) {
    return (xq){wasm_v128_load32_splat(q->bytes), wasm_v128_load32_splat(q->above),
                wasm_v128_load32_splat(q->below)};
}
#else
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
INLINE xq xq_load(const Quad *q) {
#if defined(EXPERT_RELAXED)
    const v128_t bytes = wasm_v128_load32_splat(q->bytes);
#else
    const v128_t bytes = wasm_i32x4_const_splat(0);
#endif
    return (xq){wasm_v128_load32_splat(q), wasm_v128_load32_splat(q->v + 2), bytes};
}
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
#if defined(EXPERT_RELAXED) && EXPERT_RELAXED == 32
#define SIGNED_IS_TWO_SUMS
typedef struct {
    v128_t above, below; // w . max(x, 0) and w . max(-x, 0)
} Signed;
INLINE Signed signed_zero(void) { return (Signed){vi_zero(), vi_zero()}; }
INLINE Signed signed_dot(Signed sum, xq x, vi w) {
    return (Signed){wasm_i32x4_relaxed_dot_i8x16_i7x16_add(w, x.above, sum.above),
                    wasm_i32x4_relaxed_dot_i8x16_i7x16_add(w, x.below, sum.below)};
}
INLINE vi signed_sum(Signed sum) { return vi_sub(sum.above, sum.below); }
#define PIN_SIGNED(sum)                                                                            \
    PIN((sum).above);                                                                              \
    PIN((sum).below)
INLINE vi dot_s8(vi acc, xq x, vi w) {
    return vi_add(acc, signed_sum(signed_dot(signed_zero(), x, w)));
}
#else
INLINE vi dot_s8(vi acc, xq x, vi w) {
    vi even = wasm_i16x8_shr(wasm_i16x8_shl(w, 8), 8), odd = wasm_i16x8_shr(w, 8);
    return vi_add(acc,
                  vi_add(wasm_i32x4_dot_i16x8(even, x.even), wasm_i32x4_dot_i16x8(odd, x.odd)));
}
#endif
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
#define HAS_TINY_F16
INLINE vf vf_of_tiny_f16(const void *p) {
    const v128_t wide = wasm_u32x4_load16x4(p), least = wasm_i32x4_const_splat(113 << 23);
    v128_t sign = wasm_i32x4_shl(wasm_v128_and(wide, wasm_i32x4_const_splat(0x8000)), 16);
    v128_t rest = wasm_i32x4_shl(wasm_v128_and(wide, wasm_i32x4_const_splat(0x7fff)), 13);
    // The bits of a subnormal behind 2^-14, less 2^-14: to multiply a subnormal f32, as
    // f16_lanes() does, takes an x86 processor a hundred times longer.
    v128_t normal = wasm_i32x4_add(rest, wasm_i32x4_const_splat(112 << 23));
    v128_t subnormal = wasm_f32x4_sub(wasm_i32x4_add(rest, least), least);
    v128_t is_normal = wasm_i32x4_gt(rest, wasm_i32x4_const_splat((1 << 23) - 1));
    return wasm_v128_or(wasm_v128_bitselect(normal, subnormal, is_normal), sign);
}
INLINE vf vf_of_e8m0(const void *p) {
    vi e = wasm_u32x4_extend_low_u16x8(wasm_u16x8_extend_low_u8x16(wasm_v128_load32_zero(p)));
    const vi minus_one = wasm_i32x4_const_splat(-1);
    // the exponent's bits for e > 1; below, where that is 0 or less, the bit of a subnormal
    return wasm_i32x4_max(wasm_i32x4_shl(vi_add(e, minus_one), 23),
                          wasm_i32x4_shl(vi_sub(e, minus_one), 21));
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
