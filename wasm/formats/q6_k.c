// Q6_K (ggml type 14): blocks of 256 columns; 16 sub-blocks of 16 with an 8-bit scale each.
//
//   in the GGUF, 210 bytes       | ql 128 bytes | qh 64 bytes | scales i8 [16] | d f16 |
//
//     half h (columns 128h ...) has 64 bytes of ql and 32 of qh; for c < 32:
//       column 128h      + c     ql[c]    low nibble     qh[c] bits 0..1 on top
//       column 128h + 32 + c     ql[32+c] low nibble     qh[c] bits 2..3
//       column 128h + 64 + c     ql[c]    high nibble    qh[c] bits 4..5
//       column 128h + 96 + c     ql[32+c] high nibble    qh[c] bits 6..7
//
//   packed, 210 * LANES bytes    | d f16 [LANES] | scales i8 [8][LANES][2]
//   LANES rows side by side      | [2 (h)][8 (c/4)] of { ql[c], ql[32+c], qh[c]: [LANES][4 (c%4)] } |
//
//   weight[c] = d * scale * (q[c] - 32), all sub-blocks in integers first:
//   sum += (d * dx) * (f32)(Σ scale_j ((q - 32) . x)_j);   the 32 goes off through the sums of x
#include "format.h"

enum { COLS = 256, BYTES = 210 };

static int block_is_finite(const uint8_t *block) { return f16_is_finite(load_u16(block + 208)); }

#if defined(EXPERT_SCALAR)
enum { GROUP = BYTES };

static void rows(const uint8_t *packed, size_t num_rows, size_t cols, const uint8_t *const *x,
                 size_t num_tokens, float *y, size_t stride) {
    for (size_t r = 0; r < num_rows; r++, packed += cols / COLS * BYTES) {
        for (size_t t = 0; t < num_tokens; t++) {
            const Block256 *a = (const Block256 *)(const void *)x[t];
            float sum = 0;
            for (size_t b = 0; b < cols / COLS; b++) {
                const uint8_t *block = packed + b * BYTES;
                const int8_t *scale = (const int8_t *)block + 192;
                int32_t dot = 0;
                for (int i = 0; i < COLS; i++) {
                    const int h = i / 128, g = i % 128 / 32,
                              c = i % 32; // half, quarter of the half, column in it
                    const int low = block[64 * h + 32 * (g % 2) + c] >> 4 * (g / 2) & 15;
                    const int high = block[128 + 32 * h + c] >> 2 * g & 3;
                    dot += scale[i / 16] * ((low | high << 4) - 32) * a[b].quads[i / 4].v[i % 4];
                }
                sum += f16_to_f32(load_u16(block + 208)) * a[b].scale * (float)dot;
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
enum { SCALES = 2 * LANES, BITS = 18 * LANES, GROUP = 210 * LANES };

// Adds scale * (q . x) of 4 * PART_STEPS_U6 columns of quarters g and g + 2: they share a byte, and
// four quarters of four tokens would need more registers than there are. `odd`: of the second 16
// columns of each. 2 steps of 2 * 63 * 127 stay within i16.
INLINE void two_quarters(const uint8_t *w, int h, int step, const int odd, const int g,
                         const Block256 *const *a, const int T, vi *dot) {
    const int first = 4 * odd + step;
    const uint8_t *bits = w + BITS + 12 * LANES * (8 * h + first);
    const Quad *quads[MAX_TILE];
    Part low[MAX_TILE], high[MAX_TILE];
    PIN(bits);
    EACH (t, T) {
        quads[t] = a[t]->quads + (32 * h + 8 * g + first);
        PIN(quads[t]);
        low[t] = high[t] = part_zero();
    }
    EACH (i, PART_STEPS_U6) {
        const uint8_t *p = bits + 12 * LANES * i;
        vi both = vi_load(p + 4 * LANES * g), top = vi_load(p + 8 * LANES);
        vi top_low = g ? vi_shl16(top, 2) : vi_shl16(top, 4), top_high = g ? vi_shr16(top, 2) : top;
        vi q_low = vi_or(low_nibbles(both), vi_and_bytes(top_low, 0x30)),
           q_high = vi_or(high_nibbles(both), vi_and_bytes(top_high, 0x30));
        EACH (t, T) {
            low[t] = part_dot(low[t], xq_load(quads[t] + i), q_low);
            high[t] = part_dot(high[t], xq_load(quads[t] + 16 + i), q_high);
            PIN(low[t]);
            PIN(high[t]);
        }
    }
    vi pairs = pairs_i8(w + SCALES + 2 * LANES * (4 * h + g)),
       pairs2 = pairs_i8(w + SCALES + 2 * LANES * (4 * h + g + 2));
    Scale scale = odd ? scale_odd(pairs) : scale_even(pairs),
          scale2 = odd ? scale_odd(pairs2) : scale_even(pairs2);
    EACH (t, T) {
        dot[t] = part_scaled(dot[t], low[t], scale);
        dot[t] = part_scaled(dot[t], high[t], scale2);
        PIN(dot[t]);
    }
}

INLINE void tile(const uint8_t *w, size_t num_blocks, const uint8_t *const *x, const int T,
                 float *y, size_t stride) {
    vf sum[MAX_TILE];
    EACH (t, T) sum[t] = vf_zero();
    for (size_t b = 0; b < num_blocks; b++, w += GROUP) {
        const Block256 *a[MAX_TILE];
        vi dot[MAX_TILE], offset[MAX_TILE];
        EACH (t, T) {
            a[t] = (const Block256 *)(const void *)x[t] + b;
            dot[t] = vi_zero();
        }
        EACH_ROLLED (h, 2) {
            EACH (g, 2)
                EACH (odd, 2)
                    EACH_ROLLED (i, 4 / PART_STEPS_U6)
                        two_quarters(w, h, PART_STEPS_U6 * i, odd, g, a, T, dot);
        }
        prefetch_group(w, GROUP);
        const int16_t *sums[MAX_TILE];
        EACH (t, T) sums[t] = a[t]->sums16;
        numbers_dot(w + SCALES, 1, 8, sums, T, offset);
        vf d = vf_of_tiny_f16(w); // the scales of weights below 0.25 are subnormal
        EACH (t, T) {
            vi exact = vi_sub(dot[t], vi_shl32(offset[t], 5));
            sum[t] = vf_add(sum[t], vf_mul(vf_mul(d, vf_splat(a[t]->scale)), vf_of_vi(exact)));
        }
    }
    EACH (t, T) vf_store(y + (size_t)t * stride, sum[t]);
}
DEFINE_ROWS(rows, tile, COLS, GROUP)

static void pack_block(const uint8_t *block, size_t lane, uint8_t *group) {
    __builtin_memcpy(group + 2 * lane, block + 208, 2);
    for (size_t j = 0; j < 16; j++)
        group[SCALES + 2 * LANES * (j / 2) + 2 * lane + j % 2] = block[192 + j];
    for (size_t h = 0; h < 2; h++) {
        for (size_t v = 0; v < 8; v++) {
            uint8_t *p = group + BITS + 12 * LANES * (8 * h + v) + 4 * lane;
            __builtin_memcpy(p, block + 64 * h + 4 * v, 4);
            __builtin_memcpy(p + 4 * LANES, block + 64 * h + 32 + 4 * v, 4);
            __builtin_memcpy(p + 8 * LANES, block + 128 + 32 * h + 4 * v, 4);
        }
    }
}
#endif

static uint64_t packed_bytes(uint64_t num_rows, uint64_t cols) {
    return round_up(num_rows, LANES) / LANES * (cols / COLS) * GROUP;
}

static int32_t pack(const uint8_t *blocks, size_t num_rows, size_t cols, uint8_t *packed) {
    return pack_groups(blocks, num_rows, cols / COLS, BYTES, GROUP, block_is_finite, pack_block,
                       packed);
}

const ExpertFormat expert_q6_k = {14, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};
