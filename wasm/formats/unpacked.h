// A block taken apart, column by column: what the scalar reference multiplies, and the way of the
// formats whose weights are looked up in a grid.
//
//   weight[c] = d * scale[c / 16] * q[c] - dmin * minimum[c / 16]
//   sum += (d * dx) * (f32)(Σ scale_j (q . x)_j)  -  (dmin * dx) * (f32)(Σ minimum_j (Σ x)_j)
//
// The second half only where HAS_MINIMUM is 1. The including file says: COLS, BYTES, HAS_MINIMUM,
// block_is_finite(block), unpack(block, Unpacked *).
#ifndef EXPERT_UNPACKED_H
#define EXPERT_UNPACKED_H

#include "format.h"

typedef struct {
    float d, dmin;
    int8_t scale[16], minimum[16]; // by 16 columns
    int8_t q[256];
} Unpacked;

// The scales of Q4_K and Q5_K.
static inline void unpack_k_scales(const uint8_t *s, uint8_t scale[8], uint8_t minimum[8]) {
    for (int j = 0; j < 4; j++) {
        scale[j] = s[j] & 63;
        minimum[j] = s[j + 4] & 63;
        scale[j + 4] = (uint8_t)((s[j + 8] & 15) | s[j] >> 6 << 4);
        minimum[j + 4] = (uint8_t)(s[j + 8] >> 4 | s[j + 4] >> 6 << 4);
    }
}

#if defined(EXPERT_SCALAR)
#define PACK_AS_IS                                                                                 \
    enum { GROUP = BYTES };                                                                        \
    static void pack_block(const uint8_t *block, size_t lane, uint8_t *group) {                    \
        (void)lane;                                                                                \
        __builtin_memcpy(group, block, BYTES);                                                     \
    }

// One block times the block of activations `x` with the scale dx.
static inline float unpacked_dot(const Unpacked *w, int cols, int has_minimum, const int8_t *x,
                                 float dx) {
    int32_t dot = 0, mins = 0;
    for (int j = 0; j < cols / 16; j++) {
        int32_t part = 0, sum = 0;
        for (int c = 16 * j; c < 16 * j + 16; c++) {
            part += w->q[c] * x[c];
            sum += x[c];
        }
        dot += w->scale[j] * part;
        if (has_minimum) mins += w->minimum[j] * sum;
    }
    if (!has_minimum) return w->d * dx * (float)dot;
    return w->d * dx * (float)dot - w->dmin * dx * (float)mins;
}

#define DEFINE_ROWS_UNPACKED(NAME)                                                                 \
    PACK_AS_IS                                                                                     \
    static void NAME(const uint8_t *packed, size_t num_rows, size_t cols, const uint8_t *const *x, \
                     size_t num_tokens, float *y, size_t stride) {                                 \
        for (size_t r = 0; r < num_rows; r++) {                                                    \
            for (size_t t = 0; t < num_tokens; t++) y[t * stride + r] = 0;                         \
            for (size_t b = 0; b < cols / COLS; b++, packed += BYTES) {                            \
                Unpacked w;                                                                        \
                unpack(packed, &w);                                                                \
                for (size_t t = 0; t < num_tokens; t++) {                                          \
                    float dx;                                                                      \
                    const int8_t *ints = block_of(x[t], b, COLS, &dx);                             \
                    y[t * stride + r] += unpacked_dot(&w, COLS, HAS_MINIMUM, ints, dx);            \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

// The ints of a block of activations, in the order of the columns in this build.
static inline const int8_t *block_of(const uint8_t *x, size_t b, int cols, float *dx) {
    if (cols == 32) {
        const Block32 *a = (const Block32 *)(const void *)x + b;
        *dx = a->scale;
        return a->quads[0].v;
    }
    const Block256 *a = (const Block256 *)(const void *)x + b;
    *dx = a->scale;
    return a->quads[0].v;
}
#endif

#endif
