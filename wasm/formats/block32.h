// What the formats of 32 columns with 4-bit codes share.
//
//   packed, BYTES * LANES bytes  | what stands before the nibbles | nibbles [4][LANES][4] |
//   LANES rows side by side      nibbles, v < 4: low = columns 4v..4v+3, high = 16+4v..16+4v+3
//
//   sum += (d * dx) * (f32)(q . x)                        where HAS_MINIMUM is 0
//   sum += (d * dx) * (f32)(q . x) + (m * dx) * (f32)(Σ x)           is 1
//
// The including file says: COLS, BYTES, HAS_MINIMUM; unpack() for the reference; and for the fast
// path codes(w, v, &low, &high), scale(w), pack_head(block, lane, group), and what codes() gives:
// OFFSET (u8 codes, q = code - OFFSET) with FLUSH (after how many v a sum of 2 * code * 127 per
// step would leave i16), or SIGNED_CODES 1 (the weights themselves).
#include "unpacked.h"

#if defined(EXPERT_SCALAR)
DEFINE_ROWS_UNPACKED(rows)
#else
enum { GROUP = BYTES * LANES, NIBBLES = (BYTES - 16) * LANES };
enum { PART_IS_I32 = PART_STEPS_U6 == 4 }; // and need not be emptied before the end

INLINE void tile(const uint8_t *w, size_t num_blocks, const uint8_t *const *x, const int T,
                 float *y, size_t stride) {
    vf sum[MAX_TILE];
    const Block32 *a[MAX_TILE];
    EACH (t, T) {
        sum[t] = vf_zero();
        a[t] = (const Block32 *)(const void *)x[t];
    }
    for (size_t b = 0; b < num_blocks; b++, w += GROUP) {
        vi dot[MAX_TILE];
        Part part[MAX_TILE];
        PIN(w);
        EACH (t, T) {
            PIN(a[t]);
            dot[t] = vi_zero();
            part[t] = part_zero();
        }
        EACH (v, 4) {
            vi low, high;
            codes(w, v, &low, &high);
            EACH (t, T) {
                if (SIGNED_CODES) {
                    dot[t] = dot_s8(dot[t], xq_load(&a[t]->quads[v]), low);
                    dot[t] = dot_s8(dot[t], xq_load(a[t]->quads + 4 + v), high);
                    PIN(dot[t]);
                    continue;
                }
                part[t] = part_dot(part[t], xq_load(&a[t]->quads[v]), low);
                part[t] = part_dot(part[t], xq_load(a[t]->quads + 4 + v), high);
                PIN(part[t]);
                if (v != 3 && (PART_IS_I32 || v % FLUSH != FLUSH - 1)) continue;
                dot[t] = part_sum(dot[t], part[t]);
                part[t] = part_zero();
            }
        }
        prefetch_group(w, GROUP);
        vf d = scale(w), m = HAS_MINIMUM ? vf_of_f16(w + 2 * LANES) : vf_zero();
        EACH (t, T) {
            vi exact = vi_add(dot[t], vi_splat(-OFFSET * a[t]->sum));
            vf dx = vf_splat(a[t]->scale), term = vf_mul(vf_mul(d, dx), vf_of_vi(exact));
            if (HAS_MINIMUM) term = vf_add(term, vf_mul(vf_mul(m, dx), vf_splat((float)a[t]->sum)));
            sum[t] = vf_add(sum[t], term);
            a[t]++;
        }
    }
    EACH (t, T) vf_store(y + (size_t)t * stride, sum[t]);
}
DEFINE_ROWS(rows, tile, COLS, GROUP)

static void pack_block(const uint8_t *block, size_t lane, uint8_t *group) {
    pack_head(block, lane, group);
    for (size_t v = 0; v < 4; v++)
        __builtin_memcpy(group + NIBBLES + 4 * LANES * v + 4 * lane, block + BYTES - 16 + 4 * v, 4);
}
#endif

static uint64_t packed_bytes(uint64_t num_rows, uint64_t cols) {
    return round_up(num_rows, LANES) / LANES * (cols / COLS) * GROUP;
}

static int32_t pack(const uint8_t *blocks, size_t num_rows, size_t cols, uint8_t *packed) {
    return pack_groups(blocks, num_rows, cols / COLS, BYTES, GROUP, block_is_finite, pack_block,
                       packed);
}
