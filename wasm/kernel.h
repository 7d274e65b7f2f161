// What the kernel's own files share: activations, sizes and the float environment. Not for callers;
// they use expert.h.
#ifndef EXPERT_KERNEL_H
#define EXPERT_KERNEL_H

#include "formats/format.h"

// Rows of activations in the form in which a format multiplies them (formats/format.h), 16-byte
// multiples.
uint64_t activation_bytes(ActivationKind kind, uint64_t cols);

// Round one row to int8 blocks (CONTRACT.md "Activations") and arrange it; EXPERT_NON_FINITE. For
// WANTS_F32: copy.
int32_t arrange_f32(const float *x, size_t cols, ActivationKind kind, uint8_t *out);

// Arrange ints that travelled; scales and ints unaligned. EXPERT_NON_FINITE, or EXPERT_BAD_VALUE
// for an int of -128.
int32_t arrange_q8(const uint8_t *scales, const int8_t *ints, size_t cols, ActivationKind kind,
                   uint8_t *out);

// One block: returns the scale, or NaN when a value is not finite.
float quantise_block(const float *x, size_t count, int8_t *ints);

// Bytes of one row in a wire encoding, 0 when hidden_dim is no multiple of its block or the
// encoding is unknown.
size_t encoded_row_bytes(size_t encoding, size_t hidden_dim);

// Bits of the largest magnitude; above 0x7f7fffff when something is not finite.
INLINE uint32_t max_magnitude(const float *x, size_t count) {
    uint32_t most = 0;
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = f32_to_bits(x[i]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return most;
}

// hidden.c: EXPERT_UNSUPPORTED_FORMULA unless every part of the formula but its weight formats is
// known.
int32_t check_formula(const ExpertFormula *formula);

// One product of a matrix: times the router weight, times the scale, plus the bias; each may be
// null. EXPERT_NON_FINITE when a value is not finite.
int32_t finish_product(float *y, size_t count, const float *weight, const float *scale,
                       const float *bias);

// g = the formula's h from the finished products; u is null without a gate, then g is the product
// of up.
void activate(const ExpertFormula *formula, float *g, const float *u, size_t count);

uint16_t f32_to_f16(float value); // round to nearest even; overflow becomes an infinity

// 2^exponent as a double, -1022 <= exponent <= 1023.
INLINE double power_of_two(int exponent) {
    union {
        uint64_t u;
        double d;
    } both = {(uint64_t)(exponent + 1023) << 52};
    return both.d;
}

// CONTRACT.md "Grid": the exponents that may be asked for.
enum {
    MIN_ROW_EXPONENT = -100,
    MAX_ROW_EXPONENT = 127,
    MAX_LAYER_EXPONENT = 256,
    GRID_BITS_X32 = 31,
    GRID_BITS_X16 = 15
};
// scale[c] = 2^-(L_c - bits), so that a step of row t is 2^R_t / scale[c].
int32_t grid_scales(size_t grid, const int32_t *layer_exponents, size_t hidden_dim, double *scale);

// Put p on the grid and add it to the sums of its row; scale: f64 [count], of these channels.
// EXPERT_NON_FINITE, EXPERT_GRID_OVERFLOW.
int32_t add_to_grid(const float *p, size_t count, const double *scale, int row_exponent,
                    int64_t *sums);

// The contract needs round-to-nearest and subnormals; a host library may have switched them off in
// this thread. The work between must sit in a function that is not inlined, so that nothing moves
// across.
#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned FloatMode;
INLINE FloatMode plain_floats(void) {
    const FloatMode old = _mm_getcsr();
    _mm_setcsr(0x1f80); // all exceptions masked, nearest, no FTZ, no DAZ
    return old;
}
INLINE void restore_floats(FloatMode old) { _mm_setcsr(old); }
#elif defined(__aarch64__)
typedef uint64_t FloatMode;
INLINE FloatMode plain_floats(void) {
    FloatMode old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" : : "r"((FloatMode)0) : "memory");
    return old;
}
INLINE void restore_floats(FloatMode old) {
    __asm__ volatile("msr fpcr, %0" : : "r"(old) : "memory");
}
#else // wasm has one mode, the right one
typedef int FloatMode;
INLINE FloatMode plain_floats(void) { return 0; }
INLINE void restore_floats(FloatMode old) { (void)old; }
#endif

#endif
