// Q4_K (ggml type 12): blocks of 256 columns; 8 sub-blocks of 32 with a 6-bit scale and a 6-bit
// minimum each.
//
//   in the GGUF, 144 bytes       | d f16 | dmin f16 | scales 12 bytes | nibbles 128 bytes |
//
//     scales, j < 4              byte j      EEAAAAAA   scale j = A
//                                byte 4+j    FFBBBBBB   minimum j = B
//                                byte 8+j    ffffeeee   scale 4+j = EEeeee, minimum 4+j = FFffff
//     nibbles, j < 4, c < 32     byte 32j+c: low = column 64j+c, high = column 64j+32+c
//
//   packed, 148 * LANES bytes    | d f16 [LANES] | dmin f16 [LANES]
//   LANES rows side by side      | scales u8 [4][LANES][2] | minimums u8 [4][LANES][2]
//                                | nibbles [4 (j)][8 (c/4)][LANES][4 (c%4)] |
//
//   weight[c] = (d * scale) * q[c] - dmin * minimum, all sub-blocks in integers first:
//   sum += (d * dx) * (f32)(Σ scale_j (q . x)_j)  -  (dmin * dx) * (f32)(Σ minimum_j (Σ x)_j)
#include "unpacked.h"

enum { COLS = 256, BYTES = 144 };

static int block_is_finite(const uint8_t *block) {
    return f16_is_finite(load_u16(block)) && f16_is_finite(load_u16(block + 2));
}

#if defined(EXPERT_SCALAR)
enum { GROUP = BYTES };

static void rows(const uint8_t *packed, size_t num_rows, size_t cols, const uint8_t *const *x,
                 size_t num_tokens, float *y, size_t stride) {
    for (size_t r = 0; r < num_rows; r++, packed += cols / COLS * BYTES) {
        for (size_t t = 0; t < num_tokens; t++) {
            const Block256 *a = (const Block256 *)(const void *)x[t];
            float sum = 0;
            for (size_t b = 0; b < cols / COLS; b++) {
                const uint8_t *block = packed + b * BYTES, *nibbles = block + 16;
                uint8_t scale[8], minimum[8];
                unpack_k_scales(block + 4, scale, minimum);
                int32_t dot = 0, mins = 0;
                for (int j = 0; j < 8; j++) {
                    int32_t part = 0;
                    for (int c = 0; c < 32; c++) {
                        const int q = nibbles[32 * (j / 2) + c] >> 4 * (j % 2) & 15;
                        part += q * a[b].quads[8 * j + c / 4].v[c % 4];
                    }
                    dot += scale[j] * part;
                    mins += minimum[j] * a[b].sums32[j];
                }
                const float d = f16_to_f32(load_u16(block)), dmin = f16_to_f32(load_u16(block + 2)),
                            dx = a[b].scale;
                sum += d * dx * (float)dot - dmin * dx * (float)mins;
            }
            y[t * stride + r] = sum;
        }
    }
}

static void pack_block(const uint8_t *block, size_t lane, uint8_t *group) {
    (void)lane;
    __builtin_memcpy(group, block, BYTES);
}
#else
enum { SCALES = 4 * LANES, MINIMUMS = 12 * LANES, NIBBLES = 20 * LANES, GROUP = 148 * LANES };

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
            Part low[MAX_TILE], high[MAX_TILE]; // 8 steps of 2 * 15 * 127 stay within i16
            const uint8_t *nibbles = w + NIBBLES + 32 * LANES * j;
            const Quad *quads[MAX_TILE];
            PIN(nibbles);
            EACH (t, T) {
                low[t] = high[t] = part_zero();
                quads[t] = a[t]->quads + 16 * j;
                PIN(quads[t]);
            }
            EACH (v, 8) {
                vi q = vi_load(nibbles + 4 * LANES * v), ql = low_nibbles(q), qh = high_nibbles(q);
                EACH (t, T) {
                    low[t] = part_dot(low[t], xq_load(quads[t] + v), ql);
                    high[t] = part_dot(high[t], xq_load(quads[t] + 8 + v), qh);
                    PIN(low[t]);
                    PIN(high[t]);
                }
            }
            vi scales = pairs_u8(w + SCALES + 2 * LANES * j);
            EACH (t, T) {
                dot[t] = part_scaled(dot[t], low[t], scale_even(scales));
                dot[t] = part_scaled(dot[t], high[t], scale_odd(scales));
                PIN(dot[t]);
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
DEFINE_ROWS(rows, tile, COLS, GROUP)

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
        __builtin_memcpy(group + NIBBLES + 4 * LANES * i + 4 * lane, block + 16 + 4 * i, 4);
}
#endif

static uint64_t packed_bytes(uint64_t num_rows, uint64_t cols) {
    return round_up(num_rows, LANES) / LANES * (cols / COLS) * GROUP;
}

static int32_t pack(const uint8_t *blocks, size_t num_rows, size_t cols, uint8_t *packed) {
    return pack_groups(blocks, num_rows, cols / COLS, BYTES, GROUP, block_is_finite, pack_block,
                       packed);
}

const ExpertFormat expert_q4_k = {12, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};
