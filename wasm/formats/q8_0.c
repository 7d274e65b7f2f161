// Q8_0 (ggml type 8): blocks of 32 columns, one scale.
//
//   in the GGUF, 34 bytes        | d f16 | q0 i8 | q1 | ... | q31 |
//
//   packed, 34 * LANES bytes     | d f16 [LANES] | q i8 [8 (column/4)][LANES][4 (column%4)] |
//   LANES rows side by side:     | d0 d1 d2 ... | row 0: q0 q1 q2 q3 | row 1: q0 q1 q2 q3 | ...
//                                               | row 0: q4 q5 q6 q7 | row 1: q4 q5 q6 q7 | ...
//
//   weight[c] = d * q[c];      sum += (d * dx) * (f32)(q . x)
#include "format.h"

enum { COLS = 32, BYTES = 34 };

#if defined(EXPERT_SCALAR)
static void rows(const uint8_t *packed, size_t num_rows, size_t cols, const uint8_t *const *x,
                 size_t num_tokens, float *y, size_t stride) {
    for (size_t r = 0; r < num_rows; r++, packed += cols / COLS * BYTES) {
        for (size_t t = 0; t < num_tokens; t++) {
            const Block32 *a = (const Block32 *)(const void *)x[t];
            float sum = 0;
            for (size_t b = 0; b < cols / COLS; b++) {
                const int8_t *q = (const int8_t *)packed + b * BYTES + 2;
                int32_t dot = 0;
                for (int c = 0; c < COLS; c++) dot += q[c] * a[b].quads[c / 4].v[c % 4];
                sum += f16_to_f32(load_u16(packed + b * BYTES)) * a[b].scale * (float)dot;
            }
            y[t * stride + r] = sum;
        }
    }
}
#else
enum { GROUP = BYTES * LANES, Q = 2 * LANES };

INLINE void tile(const uint8_t *w, size_t num_blocks, const uint8_t *const *x, const int T,
                 float *y, size_t stride) {
    vf sum[MAX_TILE];
    const Block32 *a[MAX_TILE];
    EACH (t, T) {
        sum[t] = vf_zero();
        a[t] = (const Block32 *)(const void *)x[t];
    }
    for (size_t b = 0; b < num_blocks; b++, w += GROUP) {
        Signed dot[MAX_TILE];
        PIN(w);
        EACH (t, T) {
            PIN(a[t]);
            dot[t] = signed_zero();
        }
        EACH (v, 8) {
            vi q = vi_load(w + Q + 4 * LANES * v);
            EACH (t, T) {
                dot[t] = signed_dot(dot[t], xq_load(&a[t]->quads[v]), q);
                PIN_SIGNED(dot[t]);
            }
        }
        prefetch_group(w, GROUP);
        vf d = vf_of_f16(w);
        EACH (t, T) {
            vf dx = vf_splat(a[t]->scale);
            sum[t] = vf_add(sum[t], vf_mul(vf_mul(d, dx), vf_of_vi(signed_sum(dot[t]))));
            a[t]++;
        }
    }
    EACH (t, T) vf_store(y + (size_t)t * stride, sum[t]);
}
DEFINE_ROWS(rows, tile, COLS, GROUP)
#endif

// One row (lane) of one block; the scalar build keeps the bytes as they are.
static void pack_block(const uint8_t *block, size_t lane, uint8_t *group) {
    __builtin_memcpy(group + 2 * lane, block, 2);
    for (size_t v = 0; v < 8; v++)
        __builtin_memcpy(group + 2 * LANES + 4 * LANES * v + 4 * lane, block + 2 + 4 * v, 4);
}

static int block_is_finite(const uint8_t *block) { return f16_is_finite(load_u16(block)); }

static uint64_t packed_bytes(uint64_t num_rows, uint64_t cols) {
    return round_up(num_rows, LANES) * (cols / COLS) * BYTES;
}

static int32_t pack(const uint8_t *blocks, size_t num_rows, size_t cols, uint8_t *packed) {
    return pack_groups(blocks, num_rows, cols / COLS, BYTES, BYTES * LANES, block_is_finite,
                       pack_block, packed);
}

const ExpertFormat expert_q8_0 = {8, COLS, BYTES, WANTS_Q8A32, packed_bytes, pack, rows};
