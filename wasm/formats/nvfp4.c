// NVFP4 (ggml type 40): blocks of 64 columns; 4 sub-blocks of 16, each with a float8 (e4m3) as
// scale; 4-bit floats (e2m1). Multiplied with int8 blocks of 32.
//
//   in the GGUF, 36 bytes        | scales u8 [4] | nibbles 32 bytes |
//     scale e = bits 3..6, m = bits 0..2; bit 7 does not count; 0x00 and 0x7f are 0
//                                d = m * 2^-10 where e is 0, else (8 + m) * 2^(e - 11)
//     nibbles, j < 4, c < 8      byte 8j+c: low = column 16j+c, high = column 16j+8+c
//
//   packed, 40 * LANES bytes     | d f16 [4 (j)][LANES] | nibbles [4 (j)][2 (c/4)][LANES][4 (c%4)] |
//
//   weight[c] = d_j * level[code], levels 0 1 2 3 4 6 8 12 and their negatives
//   sum += (d_j * dx) * (f32)(level . x)_j for j = 0, 1, 2, 3; dx of the block of 32 that holds j
#include "format.h"

enum { COLS = 64, BYTES = 36 };

static float scale_of(uint8_t byte) {
    const int e = byte >> 3 & 15, m = byte & 7;
    if (byte == 0x7f) return 0;
    if (e == 0) return (float)m * 0x1p-10f;
    return (float)(8 + m) * bits_to_f32((uint32_t)(e - 11 + 127) << 23);
}

static int block_is_finite(const uint8_t *block) {
    (void)block; // every byte is a number
    return 1;
}

#if defined(EXPERT_SCALAR)
enum { GROUP = BYTES };

static void rows(const uint8_t *packed, size_t num_rows, size_t cols, const uint8_t *const *x,
                 size_t num_tokens, float *y, size_t stride) {
    for (size_t r = 0; r < num_rows; r++, packed += cols / COLS * BYTES) {
        for (size_t t = 0; t < num_tokens; t++) {
            const Block32 *a = (const Block32 *)(const void *)x[t];
            float sum = 0;
            for (size_t j = 0; j < cols / 16; j++) { // sub-blocks of the whole row
                const uint8_t *block = packed + j / 4 * BYTES, *nibbles = block + 4 + 8 * (j % 4);
                int32_t dot = 0;
                for (size_t c = 0; c < 16; c++) {
                    const int level = fp4_levels[nibbles[c % 8] >> 4 * (c / 8) & 15];
                    dot += level * a[j / 2].quads[4 * (j % 2) + c / 4].v[c % 4];
                }
                sum += scale_of(block[j % 4]) * a[j / 2].scale * (float)dot;
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
enum { NIBBLES = 8 * LANES, GROUP = 40 * LANES };

INLINE void tile(const uint8_t *w, size_t num_blocks, const uint8_t *const *x, const int T,
                 float *y, size_t stride) {
    vf sum[MAX_TILE];
    EACH (t, T) sum[t] = vf_zero();
    for (size_t b = 0; b < num_blocks; b++, w += GROUP) {
        EACH (j, 4) {
            vi dot[MAX_TILE];
            EACH (t, T) dot[t] = vi_zero();
            EACH (v, 2) {
                vi q = vi_load(w + NIBBLES + 4 * LANES * (2 * j + v)),
                   low = vi_lookup16(fp4_levels, low_nibbles(q)),
                   high = vi_lookup16(fp4_levels, high_nibbles(q));
                EACH (t, T) {
                    const Block32 *a =
                        (const Block32 *)(const void *)x[t] + 2 * b + (size_t)(j / 2);
                    const Quad *quads = a->quads + 4 * (j % 2);
                    dot[t] = dot_s8(dot[t], xq_load(quads + v), low);
                    dot[t] = dot_s8(dot[t], xq_load(quads + 2 + v), high);
                }
            }
            vf d = vf_of_f16(w + 2 * LANES * j);
            EACH (t, T) {
                const Block32 *a = (const Block32 *)(const void *)x[t] + 2 * b + (size_t)(j / 2);
                sum[t] = vf_add(sum[t], vf_mul(vf_mul(d, vf_splat(a->scale)), vf_of_vi(dot[t])));
            }
        }
        prefetch_group(w, GROUP);
    }
    EACH (t, T) vf_store(y + (size_t)t * stride, sum[t]);
}

static void pack_block(const uint8_t *block, size_t lane, uint8_t *group) {
    for (size_t j = 0; j < 4; j++) { // every scale is a normal f16: the exponent changes its bias
        const float d = scale_of(block[j]);
        const uint16_t half = d == 0 ? 0 : (uint16_t)((f32_to_bits(d) >> 13) - (112u << 10));
        __builtin_memcpy(group + 2 * LANES * j + 2 * lane, &half, 2);
    }
    for (size_t i = 0; i < 8; i++)
        __builtin_memcpy(group + NIBBLES + 4 * LANES * i + 4 * lane, block + 4 + 4 * i, 4);
}
#endif

#if !defined(EXPERT_SCALAR)
DEFINE_ROWS(rows, tile, COLS, GROUP)
#endif

static uint64_t packed_bytes(uint64_t num_rows, uint64_t cols) {
    return round_up(num_rows, LANES) / LANES * (cols / COLS) * GROUP;
}

static int32_t pack(const uint8_t *blocks, size_t num_rows, size_t cols, uint8_t *packed) {
    return pack_groups(blocks, num_rows, cols / COLS, BYTES, GROUP, block_is_finite, pack_block,
                       packed);
}

const ExpertFormat expert_nvfp4 = {40, COLS, BYTES, WANTS_Q8A32, packed_bytes, pack, rows};
