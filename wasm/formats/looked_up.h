// Formats whose weights come out of a grid. Where vectors cannot be gathered they keep their bytes
// when they are packed, and a group of blocks is taken apart just before it is multiplied, once for
// up to four tokens.
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

// A point of IQ1 in eighths: 8 * level + 1, or - 1 with a negative delta.
static inline uint64_t iq1_levels(uint64_t point, int minus) {
    return (point - (minus ? BYTES_OF(2) : 0)) ^ BYTES_OF(0x80);
}
static inline uint64_t two_points(uint32_t first, uint32_t second) {
    return first | (uint64_t)second << 32;
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

#if !defined(EXPERT_SCALAR) && defined(HAS_GATHER)
// Where a vector can be gathered, a lane looks up the points of its row: no buffer, no scalar code.
// The bytes of a block after its first D_SIZE are words of 32 bits; packed, each word of a row
// stands beside those of the other rows.
//
//   packed, BYTES * LANES bytes  | d f16 [LANES] unless D_SIZE is 0 | word 0 [LANES] | word 1 ...
//
// The including file says: D_SIZE, D_UNIT and look_up(w, j, q, scale), which gives the 32 columns
// of sub-block j, four to a vector, and the scales of its two halves.
INLINE vi word_of(const uint8_t *w, int i) { return vi_load(w + 4 * LANES * i); }
INLINE vi bits_of(vi a, int from, int32_t mask) {
    return vi_and(vi_shr32(a, from), vi_splat(mask));
}
INLINE vi odd_bits(vi a, int from, int32_t mask) { // 2 n + 1, n the bits of the mask: from > 0
    return vi_or(bits_of(a, from - 1, 2 * mask), vi_splat(1));
}
INLINE vi signs_parity(vi a) { // bit i: parity of bits i..i+6
    vi two = vi_xor(a, vi_shr32(a, 1)), four = vi_xor(two, vi_shr32(two, 2));
    return vi_xor(vi_xor(four, vi_shr32(two, 4)), vi_shr32(a, 6));
}
INLINE vi eight_signs_of(vi a, vi parity, int from) { // seven of them, and the eighth
    return vi_or(bits_of(a, from, 127), vi_and(vi_shl32(vi_shr32(parity, from), 7), vi_splat(128)));
}
// Two of q: eight columns that are the point `index` of a grid, with the signs of a byte.
INLINE void signed_points8(const uint64_t *grid, vi index, vi signs, const int byte, vi *q) {
    gather8(grid, index, q, q + 1);
    q[0] = negated(q[0], signs, byte, 0);
    q[1] = negated(q[1], signs, byte, 4);
}
INLINE void iq1_points(const uint64_t *grid, vi index, vi minus, vi *q) { // minus: 0 or 1
    vi twos = vi_shl32(vi_or(minus, vi_shl32(minus, 8)), 1);
    twos = vi_or(twos, vi_shl32(twos, 16));
    gather8(grid, index, q, q + 1);
    EACH (e, 2) q[e] = vi_xor(vi_sub(q[e], twos), vi_splat((int32_t)0x80808080u));
}

#define DEFINE_LOOKED_UP                                                                           \
    enum { GROUP = BYTES * LANES };                                                                \
    INLINE void tile(const uint8_t *w, size_t num_blocks, const uint8_t *const *x, const int T,    \
                     float *y, size_t stride) {                                                    \
        vf sum[MAX_TILE];                                                                          \
        EACH (t, T) sum[t] = vf_zero();                                                            \
        for (size_t b = 0; b < num_blocks; b++, w += GROUP) {                                      \
            const Block256 *a[MAX_TILE];                                                           \
            vi dot[MAX_TILE];                                                                      \
            EACH (t, T) {                                                                          \
                a[t] = (const Block256 *)(const void *)x[t] + b;                                   \
                dot[t] = vi_zero();                                                                \
            }                                                                                      \
            prefetch_group(w, GROUP);                                                              \
            EACH_ROLLED (j, 8) {                                                                   \
                vi q[8], scale[2];                                                                 \
                look_up(w + D_SIZE * LANES, j, q, scale);                                          \
                EACH (e, 2) {                                                                      \
                    const Scale by = scale_lanes(scale[e]);                                        \
                    vi sub[MAX_TILE];                                                              \
                    EACH (t, T) sub[t] = vi_zero();                                                \
                    EACH (v, 4)                                                                    \
                    EACH (t, T)                                                                    \
                    sub[t] = sub_dot(sub[t], xq_load(&a[t]->quads[8 * j + 4 * e + v]),             \
                                     q[4 * e + v], by);                                            \
                    EACH (t, T) dot[t] = sub_end(dot[t], sub[t], by);                              \
                }                                                                                  \
            }                                                                                      \
            const vf d = vf_mul(d_of_group(w), vf_splat(D_UNIT));                                  \
            EACH (t, T)                                                                            \
            sum[t] = vf_add(sum[t], vf_mul(vf_mul(d, vf_splat(a[t]->scale)), vf_of_vi(dot[t])));   \
        }                                                                                          \
        EACH (t, T) vf_store(y + (size_t)t * stride, sum[t]);                                      \
    }                                                                                              \
    static void pack_block(const uint8_t *block, size_t lane, uint8_t *group) {                    \
        __builtin_memcpy(group + D_SIZE * lane, block, D_SIZE);                                    \
        for (size_t i = 0; i < (BYTES - D_SIZE) / 4; i++)                                          \
            __builtin_memcpy(group + D_SIZE * LANES + 4 * (LANES * i + lane),                      \
                             block + D_SIZE + 4 * i, 4);                                           \
    }
#elif !defined(EXPERT_SCALAR)
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
