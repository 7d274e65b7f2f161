// Q4_1 (ggml type 3): blocks of 32 columns, a scale and a minimum.
//
//   in the GGUF, 20 bytes        | d f16 | m f16 | nibbles 16 bytes |
//     nibbles, c < 16            low = column c, high = column 16 + c
//
//   packed, 20 * LANES bytes     | d f16 [LANES] | m f16 [LANES]
//                                | nibbles [4 (c/4)][LANES][4 (c%4)] |
//
//   weight[c] = d * q[c] + m;        sum += (d * dx) * (f32)(q . x) + (m * dx) * (f32)(Σ x)
#include "unpacked.h"

enum { COLS = 32, BYTES = 20, HAS_MINIMUM = 1, OFFSET = 0, SIGNED_CODES = 0, FLUSH = 4 };

static int block_is_finite(const uint8_t *block) {
    return f16_is_finite(load_u16(block)) && f16_is_finite(load_u16(block + 2));
}

#if defined(EXPERT_SCALAR)
static void unpack(const uint8_t *block, Unpacked *w) {
    *w = (Unpacked){.d = f16_to_f32(load_u16(block)),
                    .dmin = -f16_to_f32(load_u16(block + 2)),
                    .scale = {1, 1},
                    .minimum = {1, 1}};
    for (int c = 0; c < 16; c++) {
        w->q[c] = block[4 + c] & 15;
        w->q[16 + c] = block[4 + c] >> 4;
    }
}
#else
INLINE void codes(const uint8_t *w, int v, vi *low, vi *high) {
    vi q = vi_load(w + 4 * LANES + 4 * LANES * v);
    *low = low_nibbles(q);
    *high = high_nibbles(q);
}
INLINE vf scale(const uint8_t *w) { return vf_of_f16(w); }
static void pack_head(const uint8_t *block, size_t lane, uint8_t *group) {
    __builtin_memcpy(group + 2 * lane, block, 2);
    __builtin_memcpy(group + 2 * LANES + 2 * lane, block + 2, 2);
}
#endif
#include "block32.h"

const ExpertFormat expert_q4_1 = {3, COLS, BYTES, WANTS_Q8A32, packed_bytes, pack, rows};
