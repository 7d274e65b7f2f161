// The plain path: formats whose weights come out of a grid keep their bytes when they are packed,
// and a group of blocks is taken apart just before it is multiplied, once for up to four tokens.
//
//   packed, BYTES * LANES bytes  | block of row 0 | block of row 1 | ... |
//
//   sum += (d * dx) * (f32)(Σ scale_j (q . x)_j), j by 16 columns
//
// The including file says: COLS, BYTES, HAS_MINIMUM 0, block_is_finite(block), unpack(block, w).
// What follows here first are the helpers of unpack(): eight bytes of a u64 are eight columns.
#ifndef EXPERT_LOOKED_UP_H
#define EXPERT_LOOKED_UP_H

#include "grids.h"
#include "unpacked.h"

#define BYTES_OF(n) (0x0101010101010101u * (n)) // n in each byte

// Eight 2-bit codes to eight bytes, four 3-bit codes to four.
static inline uint64_t spread2(uint64_t codes) {
    codes = (codes | codes << 24) & 0x000000ff000000ffu;
    codes = (codes | codes << 12) & 0x000f000f000f000fu;
    return (codes | codes << 6) & BYTES_OF(3);
}
static inline uint64_t spread3(uint64_t codes) {
    codes = (codes | codes << 10) & 0x003f003fu;
    return (codes | codes << 5) & 0x07070707u;
}

// The levels of the grids, by code. IQ2: 8 25 43. IQ3_XXS: 4 12 20 28 36 44 52 62. IQ3_S: 1 3 ... 15.
// IQ1: (code - 1) * 8 +- 1, the levels -1 0 1 and the delta of an eighth in eighths.
static inline uint64_t iq2_levels(uint16_t codes) {
    const uint64_t c = spread2(codes);
    return c * 17 + (c >> 1 & BYTES_OF(1)) + BYTES_OF(8);
}
static inline uint64_t iq3_xxs_levels(uint16_t first, uint16_t second) {
    const uint64_t c = spread3(first) | spread3(second) << 32;
    return c * 8 + BYTES_OF(4) + ((c & c >> 1 & c >> 2) & BYTES_OF(1)) * 2;
}
static inline uint64_t iq3_s_levels(uint16_t first, uint16_t second) {
    return (spread3(first) | spread3(second) << 32) * 2 + BYTES_OF(1);
}
static inline uint64_t iq1_levels(uint16_t codes, int minus) {
    return (spread2(codes) * 8 + (minus ? BYTES_OF(0x77) : BYTES_OF(0x79))) ^ BYTES_OF(0x80);
}

// Negate byte i where bit i is set; no byte is 0. Of seven sign bits the eighth is their parity.
static inline uint64_t with_signs(uint64_t levels, unsigned signs) {
    const uint64_t bit = (signs & 255u) * BYTES_OF(1) & 0x8040201008040201u;
    const uint64_t ones = (bit + BYTES_OF(0x7f)) >> 7 & BYTES_OF(1);
    return (levels ^ ones * 255) + ones;
}
static inline unsigned eight_signs(unsigned seven) {
    return seven | (unsigned)__builtin_parity(seven) << 7;
}

static inline void put8(Unpacked *w, int k, uint64_t levels) {
    __builtin_memcpy(w->q + 8 * k, &levels, 8);
}
static inline uint32_t load_u32(const uint8_t *p) {
    return load_u16(p) | (uint32_t)load_u16(p + 2) << 16;
}

#if !defined(EXPERT_SCALAR)
typedef struct {
    int8_t scales[8][LANES][2], q[64][LANES][4];
    float d[LANES];
} Group;

static inline void interleave(const Unpacked *w, size_t lane, Group *group) {
    group->d[lane] = w->d;
    for (int j = 0; j < 8; j++) __builtin_memcpy(group->scales[j][lane], w->scale + 2 * j, 2);
    for (int i = 0; i < 64; i++) __builtin_memcpy(group->q[i][lane], w->q + 4 * i, 4);
}

INLINE void add_group(const Group *group, size_t b, const uint8_t *const *x, const int T, vf *sum) {
    const Block256 *a[MAX_TILE];
    vi dot[MAX_TILE];
    EACH (t, T) {
        a[t] = (const Block256 *)(const void *)x[t] + b;
        dot[t] = vi_zero();
    }
    EACH_ROLLED (pair, 8) {
        vi scales = pairs_i8(group->scales[pair]);
        EACH (e, 2) {
            const Scale scale = e ? scale_odd(scales) : scale_even(scales);
            vi sub[MAX_TILE];
            EACH (t, T) sub[t] = vi_zero();
            EACH (v, 4) {
                const int i = 8 * pair + 4 * e + v;
                vi q = vi_load(group->q[i]);
                EACH (t, T) sub[t] = sub_dot(sub[t], xq_load(&a[t]->quads[i]), q, scale);
            }
            EACH (t, T) dot[t] = sub_end(dot[t], sub[t], scale);
        }
    }
    vf d = vf_load(group->d);
    EACH (t, T) sum[t] = vf_add(sum[t], vf_mul(vf_mul(d, vf_splat(a[t]->scale)), vf_of_vi(dot[t])));
}

#define DEFINE_LOOKED_UP                                                                           \
    enum { GROUP = BYTES * LANES };                                                                \
    __attribute__((noinline)) static void fill(const uint8_t *w, Group *group) {                   \
        NO_UNROLL for (size_t lane = 0; lane < LANES; lane++, w += BYTES) {                        \
            Unpacked one;                                                                          \
            unpack(w, &one);                                                                       \
            interleave(&one, lane, group);                                                         \
        }                                                                                          \
    }                                                                                              \
    INLINE void tile(const uint8_t *w, size_t num_blocks, const uint8_t *const *x, const int T,    \
                     float *y, size_t stride) {                                                    \
        vf sum[MAX_TILE];                                                                          \
        EACH (t, T) sum[t] = vf_zero();                                                            \
        for (size_t b = 0; b < num_blocks; b++) {                                                  \
            Group group;                                                                           \
            fill(w, &group);                                                                       \
            w += GROUP;                                                                            \
            add_group(&group, b, x, T, sum);                                                       \
        }                                                                                          \
        EACH (t, T) vf_store(y + (size_t)t * stride, sum[t]);                                      \
    }                                                                                              \
    static void pack_block(const uint8_t *block, size_t lane, uint8_t *group) {                    \
        __builtin_memcpy(group + BYTES * lane, block, BYTES);                                      \
    }
#else
#define DEFINE_LOOKED_UP
#endif

#endif
