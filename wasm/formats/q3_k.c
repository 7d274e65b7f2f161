// Q3_K (ggml type 11): blocks of 256 columns; 16 sub-blocks of 16 with a 6-bit scale each.
//
//   in the GGUF, 110 bytes       | top 32 bytes | q 64 bytes | scales 12 bytes | d f16 |
//
//     q, half h, c < 32          byte 32h+c: bits 2s, 2s+1 are the lower bits of column 128h+32s+c
//     top, c < 32                byte c: bit 4h+s is the third bit of column 128h + 32s + c
//     scales, j < 8              byte j: low nibble = lower bits of scale j, high nibble = of 8+j
//             j < 4              byte 8+j: bits 2k, 2k+1 are the upper bits of scale 4k+j
//
//   packed, 114 * LANES bytes    | d f16 [LANES] | scale - 32 i8 [8][LANES][2]
//   LANES rows side by side      | q [2 (h)][8 (v)][LANES][4] | top [2 (h)][4 (v/2)][LANES][4] |
//     top, byte i                bit s: third bit of column 128h + 32s + 4v + i, v even; bit 4+s: v+1
//
//   weight[c] = d * (scale - 32) * (q[c] - 4), all sub-blocks in integers first:
//   sum += (d * dx) * (f32)(Σ (scale_j - 32) ((q - 4) . x)_j);   the 4 goes off through the sums of x
#include "unpacked.h"

enum { COLS = 256, BYTES = 110, HAS_MINIMUM = 0 };

static int block_is_finite(const uint8_t *block) { return f16_is_finite(load_u16(block + 108)); }

static int8_t scale_of(const uint8_t *block, size_t j) {
    const int low = block[96 + j % 8] >> 4 * (j / 8) & 15,
              high = block[104 + j % 4] >> 2 * (j / 4) & 3;
    return (int8_t)((low | high << 4) - 32);
}

#if defined(EXPERT_SCALAR)
static void unpack(const uint8_t *block, Unpacked *w) {
    *w = (Unpacked){.d = f16_to_f32(load_u16(block + 108))};
    for (size_t j = 0; j < 16; j++) w->scale[j] = scale_of(block, j);
    for (int i = 0; i < COLS; i++) {
        const int low = block[32 + 32 * (i / 128) + i % 32] >> 2 * (i % 128 / 32) & 3;
        w->q[i] = (int8_t)((low | (block[i % 32] >> i / 32 & 1) << 2) - 4);
    }
}
#else
enum { SCALES = 2 * LANES, BITS = 18 * LANES, TOP = 82 * LANES, GROUP = 114 * LANES };

INLINE void tile(const uint8_t *w, size_t num_blocks, const uint8_t *const *x, const int T,
                 float *y, size_t stride) {
    vf sum[MAX_TILE];
    EACH (t, T) sum[t] = vf_zero();
    for (size_t b = 0; b < num_blocks; b++, w += GROUP) {
        const Block256 *a[MAX_TILE];
        vi dot[MAX_TILE], offset[MAX_TILE];
        EACH (t, T) {
            a[t] = (const Block256 *)(const void *)x[t] + b;
            dot[t] = offset[t] = vi_zero();
        }
        EACH_ROLLED (h, 2) {
            vi scales[4];
            EACH (s, 4) {
                scales[s] = pairs_i8(w + SCALES + 2 * LANES * (4 * h + s));
                EACH (t, T)
                    offset[t] = pairs_dot(offset[t], scales[s], &a[t]->sums16[8 * h + 2 * s]);
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
                    const int v = 4 * half + i, e = 4 * (i % 2);
                    vi four = vi_load(bits + 4 * LANES * i),
                       top = vi_load(w + TOP + 4 * LANES * (4 * h + v / 2));
                    if (e) top = vi_shr16(top, 4);
                    vi q[4] = {
                        vi_or(vi_and_bytes(four, 3), vi_and_bytes(vi_shl16(top, 2), 4)),
                        vi_or(vi_and_bytes(vi_shr16(four, 2), 3),
                              vi_and_bytes(vi_shl16(top, 1), 4)),
                        vi_or(vi_and_bytes(vi_shr16(four, 4), 3), vi_and_bytes(top, 4)),
                        vi_or(vi_and_bytes(vi_shr16(four, 6), 3),
                              vi_and_bytes(vi_shr16(top, 1), 4)),
                    };
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
        vf d = vf_of_f16(w);
        EACH (t, T) {
            vi exact = vi_sub(dot[t], vi_shl32(offset[t], 2));
            sum[t] = vf_add(sum[t], vf_mul(vf_mul(d, vf_splat(a[t]->scale)), vf_of_vi(exact)));
        }
    }
    EACH (t, T) vf_store(y + (size_t)t * stride, sum[t]);
}

static void pack_block(const uint8_t *block, size_t lane, uint8_t *group) {
    __builtin_memcpy(group + 2 * lane, block + 108, 2);
    for (size_t j = 0; j < 16; j++)
        group[SCALES + 2 * LANES * (j / 2) + 2 * lane + j % 2] = (uint8_t)scale_of(block, j);
    for (size_t i = 0; i < 16; i++)
        __builtin_memcpy(group + BITS + 4 * LANES * i + 4 * lane, block + 32 + 4 * i, 4);
    for (size_t pair = 0; pair < 4; pair++) {
        uint32_t even, odd; // the third bits of four columns each, both halves
        __builtin_memcpy(&even, block + 8 * pair, 4);
        __builtin_memcpy(&odd, block + 8 * pair + 4, 4);
        const uint32_t first = (even & 0x0f0f0f0fu) | (odd & 0x0f0f0f0fu) << 4,
                       second = (even >> 4 & 0x0f0f0f0fu) | (odd & 0xf0f0f0f0u);
        __builtin_memcpy(group + TOP + 4 * LANES * pair + 4 * lane, &first, 4);
        __builtin_memcpy(group + TOP + 4 * LANES * (4 + pair) + 4 * lane, &second, 4);
    }
}
#endif
#include "block256.h"

const ExpertFormat expert_q3_k = {11, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};
