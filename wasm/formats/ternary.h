// What TQ1_0 and TQ2_0 share: both are multiplied as 2-bit codes, q = code - 1.
//
//   packed, 66 * LANES bytes     | d f16 [LANES] | codes [2 (h)][8 (v)][LANES][4] |
//   LANES rows side by side      byte i: bits 2s, 2s+1 are column 128h + 32s + 4v + i
//
//   weight[c] = d * q[c];            sum += (d * dx) * (f32)(q . x);  the 1 goes off through Σ x
//
// The including file says: COLS, BYTES, HAS_MINIMUM 0, D_AT, unpack(block, w);
// for the fast path codes_of(block, room): the 64 bytes of codes in the order above, `room` or others.
#include "unpacked.h"

static int block_is_finite(const uint8_t *block) { return f16_is_finite(load_u16(block + D_AT)); }

#if !defined(EXPERT_SCALAR)
enum { CODES = 2 * LANES, GROUP = 66 * LANES };

INLINE void tile(const uint8_t *w, size_t num_blocks, const uint8_t *const *x, const int T,
                 float *y, size_t stride) {
    vf sum[MAX_TILE];
    EACH (t, T) sum[t] = vf_zero();
    for (size_t b = 0; b < num_blocks; b++, w += GROUP) {
        const Block256 *a[MAX_TILE];
        vi dot[MAX_TILE];
        EACH (t, T) {
            a[t] = (const Block256 *)(const void *)x[t] + b;
            int32_t all = 0;
            for (int j = 0; j < 8; j++) all += a[t]->sums32[j];
            dot[t] = vi_splat(-all);
        }
        EACH_ROLLED (h, 2) { // 32 steps of 2 * 3 * 127 stay within i16
            Part part[MAX_TILE];
            EACH (t, T) part[t] = part_zero();
            EACH (v, 8) {
                vi four = vi_load(w + CODES + 4 * LANES * (8 * h + v));
                vi q[4] = {vi_and_bytes(four, 3), vi_and_bytes(vi_shr16(four, 2), 3),
                           vi_and_bytes(vi_shr16(four, 4), 3), vi_and_bytes(vi_shr16(four, 6), 3)};
                EACH (s, 4)
                    EACH (t, T)
                        part[t] =
                            part_dot(part[t], xq_load(&a[t]->quads[32 * h + 8 * s + v]), q[s]);
            }
            EACH (t, T) dot[t] = part_sum(dot[t], part[t]);
        }
        prefetch_group(w, GROUP);
        vf d = vf_of_f16(w);
        EACH (t, T)
            sum[t] = vf_add(sum[t], vf_mul(vf_mul(d, vf_splat(a[t]->scale)), vf_of_vi(dot[t])));
    }
    EACH (t, T) vf_store(y + (size_t)t * stride, sum[t]);
}

static void pack_block(const uint8_t *block, size_t lane, uint8_t *group) {
    uint8_t room[64];
    const uint8_t *codes = codes_of(block, room);
    __builtin_memcpy(group + 2 * lane, block + D_AT, 2);
    for (size_t i = 0; i < 16; i++)
        __builtin_memcpy(group + CODES + 4 * LANES * i + 4 * lane, codes + 4 * i, 4);
}
#endif
#include "block256.h"
