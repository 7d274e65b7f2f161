// NEON
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
