// Q5_K (ggml type 13): blocks of 256 columns; 8 sub-blocks of 32 with a 6-bit scale and a 6-bit
// minimum each.
//
//   in the GGUF, 176 bytes       | d f16 | dmin f16 | scales 12 bytes | top 32 | nibbles 128 bytes |
//
//     scales                     as in Q4_K
//     nibbles, j < 4, c < 32     byte 32j+c: low = column 64j+c, high = column 64j+32+c
//     top, c < 32                byte c: bit s is the fifth bit of column 32s+c
//
//   packed, 180 * LANES bytes    | d f16 [LANES] | dmin f16 [LANES]
//   LANES rows side by side      | scales u8 [4][LANES][2] | minimums u8 [4][LANES][2]
//                                | top [4 (j)][2 (g)][LANES][4 (c%4)]
//                                | nibbles [4 (j)][8 (c/4)][LANES][4 (c%4)] |
//     top, byte i, k < 4         bit k: the fifth bit of column 64j + 16g+4k+i, bit 4+k: of 32 more
//
//   weight[c] = (d * scale) * q[c] - dmin * minimum, all sub-blocks in integers first:
//   sum += (d * dx) * (f32)(Σ scale_j (q . x)_j)  -  (dmin * dx) * (f32)(Σ minimum_j (Σ x)_j)
#include "unpacked.h"

enum { COLS = 256, BYTES = 176, HAS_MINIMUM = 1 };

static int block_is_finite(const uint8_t *block) {
    return f16_is_finite(load_u16(block)) && f16_is_finite(load_u16(block + 2));
}

#if defined(EXPERT_SCALAR)
static void unpack(const uint8_t *block, Unpacked *w) {
    uint8_t scale[8], minimum[8];
    unpack_k_scales(block + 4, scale, minimum);
    w->d = f16_to_f32(load_u16(block));
    w->dmin = f16_to_f32(load_u16(block + 2));
    for (int j = 0; j < 16; j++) {
        w->scale[j] = (int8_t)scale[j / 2];
        w->minimum[j] = (int8_t)minimum[j / 2];
    }
    for (int i = 0; i < COLS; i++) {
        const int s = i / 32, c = i % 32, low = block[48 + 32 * (s / 2) + c] >> 4 * (s % 2) & 15;
        w->q[i] = (int8_t)(low | (block[16 + c] >> s & 1) << 4);
    }
}
#else
enum { SCALES = 4 * LANES, MINIMUMS = 12 * LANES, TOP = 20 * LANES, NIBBLES = 52 * LANES };
enum { GROUP = 180 * LANES };

INLINE void tile(const uint8_t *w, size_t num_blocks, const uint8_t *const *x, const int T,
                 float *y, size_t stride) {
    vf sum[MAX_TILE];
    EACH (t, T) sum[t] = vf_zero();
    for (size_t b = 0; b < num_blocks; b++, w += GROUP) {
        const Block256 *a[MAX_TILE];
        vi dot[MAX_TILE];
        EACH (t, T) {
            a[t] = (const Block256 *)(const void *)x[t] + b;
            dot[t] = vi_zero();
        }
        EACH_ROLLED (j, 4) {
            vi scales = pairs_u8(w + SCALES + 2 * LANES * j);
            EACH_ROLLED (g, 2) { // 4 steps of 2 * 31 * 127 stay within i16
                Part low[MAX_TILE], high[MAX_TILE];
                const uint8_t *nibbles = w + NIBBLES + 4 * LANES * (8 * j + 4 * g);
                const Quad *quads[MAX_TILE];
                PIN(nibbles);
                EACH (t, T) {
                    low[t] = high[t] = part_zero();
                    quads[t] = a[t]->quads + (16 * j + 4 * g);
                    PIN(quads[t]);
                }
                vi top = vi_load(w + TOP + 4 * LANES * (2 * j + g));
                EACH (k, 4) {
                    vi ql, qh;
                    fifth_bits(vi_load(nibbles + 4 * LANES * k), top, k, &ql, &qh);
                    EACH (t, T) {
                        low[t] = part_dot(low[t], xq_load(quads[t] + k), ql);
                        high[t] = part_dot(high[t], xq_load(quads[t] + 8 + k), qh);
                        PIN(low[t]);
                        PIN(high[t]);
                    }
                }
                EACH (t, T) {
                    dot[t] = part_scaled(dot[t], low[t], scale_even(scales));
                    dot[t] = part_scaled(dot[t], high[t], scale_odd(scales));
                    PIN(dot[t]);
                }
            }
        }
        prefetch_group(w, GROUP);
        vi mins[MAX_TILE];
        const int16_t *sums[MAX_TILE];
        EACH (t, T) sums[t] = a[t]->sums32;
        numbers_dot(w + MINIMUMS, 0, 4, sums, T, mins);
        vf d = vf_of_f16(w), dmin = vf_of_f16(w + 2 * LANES);
        EACH (t, T) {
            vf dx = vf_splat(a[t]->scale);
            vf plus = vf_mul(vf_mul(d, dx), vf_of_vi(dot[t])),
               minus = vf_mul(vf_mul(dmin, dx), vf_of_vi(mins[t]));
            sum[t] = vf_add(sum[t], vf_sub(plus, minus));
        }
    }
    EACH (t, T) vf_store(y + (size_t)t * stride, sum[t]);
}

static void pack_block(const uint8_t *block, size_t lane, uint8_t *group) {
    uint8_t scale[8], minimum[8];
    unpack_k_scales(block + 4, scale, minimum);
    __builtin_memcpy(group + 2 * lane, block, 2);
    __builtin_memcpy(group + 2 * LANES + 2 * lane, block + 2, 2);
    for (size_t j = 0; j < 8; j++) {
        group[SCALES + 2 * LANES * (j / 2) + 2 * lane + j % 2] = scale[j];
        group[MINIMUMS + 2 * LANES * (j / 2) + 2 * lane + j % 2] = minimum[j];
    }
    for (size_t i = 0; i < 32; i++)
        __builtin_memcpy(group + NIBBLES + 4 * LANES * i + 4 * lane, block + 48 + 4 * i, 4);
    for (size_t j = 0; j < 4; j++) {
        for (size_t g = 0; g < 2; g++) {
            uint32_t word = 0; // four bytes at once: bits 2j and 2j+1 of top, one byte per column
            for (size_t k = 0; k < 4; k++) {
                uint32_t four;
                __builtin_memcpy(&four, block + 16 + 16 * g + 4 * k, 4);
                word |= (four >> 2 * j & 0x01010101u) << k;
                word |= (four >> (2 * j + 1) & 0x01010101u) << (4 + k);
            }
            __builtin_memcpy(group + TOP + 4 * LANES * (2 * j + g) + 4 * lane, &word, 4);
        }
    }
}
#endif
#include "block256.h"

const ExpertFormat expert_q5_k = {13, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};
