// Q5_1 (ggml type 7): blocks of 32 columns, a scale and a minimum, codes 0..31.
//
//   in the GGUF, 24 bytes        | d f16 | m f16 | top 4 bytes | nibbles 16 bytes |
//     nibbles, c < 16            low = column c, high = column 16 + c
//     top                        bit c of the u32: the fifth bit of column c
//
//   packed, 24 * LANES bytes     | d f16 [LANES] | m f16 [LANES] | top [LANES][4]
//                                | nibbles [4 (c/4)][LANES][4 (c%4)] |
//     top, byte i                bit v: the fifth bit of column 4v + i
//
//   weight[c] = d * q[c] + m;        sum += (d * dx) * (f32)(q . x) + (m * dx) * (f32)(Σ x)
#include "unpacked.h"

enum { COLS = 32, BYTES = 24, HAS_MINIMUM = 1, OFFSET = 0, SIGNED_CODES = 0, FLUSH = 2 };

static int block_is_finite(const uint8_t *block) {
    return f16_is_finite(load_u16(block)) && f16_is_finite(load_u16(block + 2));
}

#if defined(EXPERT_SCALAR)
static void unpack(const uint8_t *block, Unpacked *w) {
    *w = (Unpacked){.d = f16_to_f32(load_u16(block)),
                    .dmin = -f16_to_f32(load_u16(block + 2)),
                    .scale = {1, 1},
                    .minimum = {1, 1}};
    for (int c = 0; c < COLS; c++) {
        const int low = block[8 + c % 16] >> 4 * (c / 16) & 15, top = block[4 + c / 8] >> c % 8 & 1;
        w->q[c] = (int8_t)(low | top << 4);
    }
}
#else
INLINE void codes(const uint8_t *w, int v, vi *low, vi *high) {
    fifth_bits(vi_load(w + 8 * LANES + 4 * LANES * v), vi_load(w + 4 * LANES), v, low, high);
}
INLINE vf scale(const uint8_t *w) { return vf_of_f16(w); }
static void pack_head(const uint8_t *block, size_t lane, uint8_t *group) {
    __builtin_memcpy(group + 2 * lane, block, 2);
    __builtin_memcpy(group + 2 * LANES + 2 * lane, block + 2, 2);
    transpose_top(block + 4, group + 4 * LANES + 4 * lane);
}
#endif
#include "block32.h"

const ExpertFormat expert_q5_1 = {7, COLS, BYTES, WANTS_Q8A32, packed_bytes, pack, rows};
