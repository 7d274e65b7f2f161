// IQ4_XS (ggml type 23): blocks of 256 columns; 8 sub-blocks of 32 with a 6-bit scale each; 4-bit
// codes into the table of IQ4_NL.
//
//   in the GGUF, 136 bytes       | d f16 | upper u16 | lower 4 bytes | nibbles 128 bytes |
//
//     upper, lower, j < 8        scale j = nibble j of lower (low first) | bits 2j, 2j+1 of upper << 4
//     nibbles, j < 8, c < 16     byte 16j+c: low = column 32j+c, high = column 32j+16+c
//
//   packed, 138 * LANES bytes    | d f16 [LANES] | scale - 32 i8 [4][LANES][2]
//   LANES rows side by side      | nibbles [8 (j)][4 (c/4)][LANES][4 (c%4)] |
//
//   weight[c] = d * (scale - 32) * level[code], all sub-blocks in integers first:
//   sum += (d * dx) * (f32)(Σ (scale_j - 32) (level . x)_j)
#include "unpacked.h"

enum { COLS = 256, BYTES = 136, HAS_MINIMUM = 0 };

static int block_is_finite(const uint8_t *block) { return f16_is_finite(load_u16(block)); }

static int8_t scale_of(const uint8_t *block, size_t j) {
    const int low = block[4 + j / 2] >> 4 * (j % 2) & 15, high = load_u16(block + 2) >> 2 * j & 3;
    return (int8_t)((low | high << 4) - 32);
}

#if defined(EXPERT_SCALAR)
static void unpack(const uint8_t *block, Unpacked *w) {
    *w = (Unpacked){.d = f16_to_f32(load_u16(block))};
    for (size_t j = 0; j < 16; j++) w->scale[j] = scale_of(block, j / 2);
    for (int i = 0; i < COLS; i++)
        w->q[i] = iq4_levels[block[8 + 16 * (i / 32) + i % 16] >> 4 * (i % 32 / 16) & 15];
}
#else
enum { SCALES = 2 * LANES, NIBBLES = 10 * LANES, GROUP = 138 * LANES };

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
        EACH_ROLLED (pair, 4) {
            vi scales = pairs_i8(w + SCALES + 2 * LANES * pair);
            EACH (e, 2) {
                const int j = 2 * pair + e;
                const Scale scale = e ? scale_odd(scales) : scale_even(scales);
                vi sub[MAX_TILE];
                EACH (t, T) sub[t] = vi_zero();
                EACH (v, 4) {
                    vi q = vi_load(w + NIBBLES + 4 * LANES * (4 * j + v)),
                       low = vi_lookup16(iq4_levels, low_nibbles(q)),
                       high = vi_lookup16(iq4_levels, high_nibbles(q));
                    EACH (t, T) {
                        sub[t] = sub_dot(sub[t], xq_load(&a[t]->quads[8 * j + v]), low, scale);
                        sub[t] = sub_dot(sub[t], xq_load(&a[t]->quads[8 * j + 4 + v]), high, scale);
                    }
                }
                EACH (t, T) dot[t] = sub_end(dot[t], sub[t], scale);
            }
        }
        prefetch_group(w, GROUP);
        vf d = vf_of_f16(w);
        EACH (t, T)
            sum[t] = vf_add(sum[t], vf_mul(vf_mul(d, vf_splat(a[t]->scale)), vf_of_vi(dot[t])));
    }
    EACH (t, T) vf_store(y + (size_t)t * stride, sum[t]);
}

static void pack_block(const uint8_t *block, size_t lane, uint8_t *group) {
    __builtin_memcpy(group + 2 * lane, block, 2);
    for (size_t j = 0; j < 8; j++)
        group[SCALES + 2 * LANES * (j / 2) + 2 * lane + j % 2] = (uint8_t)scale_of(block, j);
    for (size_t i = 0; i < 32; i++)
        __builtin_memcpy(group + NIBBLES + 4 * LANES * i + 4 * lane, block + 8 + 4 * i, 4);
}
#endif
#include "block256.h"

const ExpertFormat expert_iq4_xs = {23, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};
