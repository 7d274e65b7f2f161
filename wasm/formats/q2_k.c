// Q2_K (ggml type 10): blocks of 256 columns; 16 sub-blocks of 16 with a 4-bit scale and a 4-bit
// minimum each.
//
//   in the GGUF, 84 bytes        | scales 16 bytes | q 64 bytes | d f16 | dmin f16 |
//
//     scales, j < 16             byte j: low nibble = scale j, high nibble = minimum j
//     q, half h, c < 32          byte 32h+c: bits 2s, 2s+1 are column 128h + 32s + c
//
//   packed, 84 * LANES bytes     | d f16 [LANES] | dmin f16 [LANES] | scales [8][LANES][2]
//   LANES rows side by side      | q [2 (h)][8 (c/4)][LANES][4 (c%4)] |
//
//   weight[c] = (d * scale) * q[c] - dmin * minimum, all sub-blocks in integers first:
//   sum += (d * dx) * (f32)(Σ scale_j (q . x)_j)  -  (dmin * dx) * (f32)(Σ minimum_j (Σ x)_j)
#include "unpacked.h"

enum { COLS = 256, BYTES = 84, HAS_MINIMUM = 1 };

static int block_is_finite(const uint8_t *block) {
    return f16_is_finite(load_u16(block + 80)) && f16_is_finite(load_u16(block + 82));
}

#if defined(EXPERT_SCALAR)
static void unpack(const uint8_t *block, Unpacked *w) {
    w->d = f16_to_f32(load_u16(block + 80));
    w->dmin = f16_to_f32(load_u16(block + 82));
    for (int j = 0; j < 16; j++) {
        w->scale[j] = block[j] & 15;
        w->minimum[j] = block[j] >> 4;
    }
    for (int i = 0; i < COLS; i++)
        w->q[i] = block[16 + 32 * (i / 128) + i % 32] >> 2 * (i % 128 / 32) & 3;
}
#else
enum { SCALES = 4 * LANES, BITS = 20 * LANES, GROUP = 84 * LANES };

INLINE void tile(const uint8_t *w, size_t num_blocks, const uint8_t *const *x, const int T,
                 float *y, size_t stride) {
    vf sum[MAX_TILE];
    EACH (t, T) sum[t] = vf_zero();
    for (size_t b = 0; b < num_blocks; b++, w += GROUP) {
        const Block256 *a[MAX_TILE];
        vi dot[MAX_TILE], mins[MAX_TILE];
        EACH (t, T) {
            a[t] = (const Block256 *)(const void *)x[t] + b;
            dot[t] = mins[t] = vi_zero();
        }
        EACH_ROLLED (h, 2) {
            vi scales[4];
            EACH (s, 4) {
                vi both = pairs_u8(w + SCALES + 2 * LANES * (4 * h + s));
                scales[s] = low_nibbles(both);
                EACH (t, T)
                    mins[t] = pairs_dot(mins[t], high_nibbles(both), &a[t]->sums16[8 * h + 2 * s]);
            }
            EACH (half, 2) {
                Part part[4][MAX_TILE];
                const uint8_t *bits = w + BITS + 4 * LANES * (8 * h + 4 * half);
                const Quad *quads[MAX_TILE];
                PIN(bits);
                EACH (t, T) {
                    quads[t] = a[t]->quads + (32 * h + 4 * half);
                    PIN(quads[t]);
                }
                EACH (s, 4)
                    EACH (t, T) part[s][t] = part_zero();
                EACH (i, 4) {
                    vi four = vi_load(bits + 4 * LANES * i);
                    vi q[4] = {vi_and_bytes(four, 3), vi_and_bytes(vi_shr16(four, 2), 3),
                               vi_and_bytes(vi_shr16(four, 4), 3),
                               vi_and_bytes(vi_shr16(four, 6), 3)};
                    EACH (s, 4)
                        EACH (t, T) {
                            part[s][t] = part_dot(part[s][t], xq_load(quads[t] + 8 * s + i), q[s]);
                            PIN(part[s][t]);
                        }
                }
                EACH (s, 4) {
                    Scale scale = half ? scale_odd(scales[s]) : scale_even(scales[s]);
                    EACH (t, T) dot[t] = part_scaled(dot[t], part[s][t], scale);
                }
            }
        }
        prefetch_group(w, GROUP);
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
    __builtin_memcpy(group + 2 * lane, block + 80, 2);
    __builtin_memcpy(group + 2 * LANES + 2 * lane, block + 82, 2);
    for (size_t j = 0; j < 8; j++)
        __builtin_memcpy(group + SCALES + 2 * LANES * j + 2 * lane, block + 2 * j, 2);
    for (size_t i = 0; i < 16; i++)
        __builtin_memcpy(group + BITS + 4 * LANES * i + 4 * lane, block + 16 + 4 * i, 4);
}
#endif
#include "block256.h"

const ExpertFormat expert_q2_k = {10, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};
