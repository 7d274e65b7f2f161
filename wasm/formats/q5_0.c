// Q5_0 (ggml type 6): blocks of 32 columns, one scale, codes 0..31 around 16.
//
//   in the GGUF, 22 bytes        | d f16 | top 4 bytes | nibbles 16 bytes |
//     nibbles, c < 16            low = column c, high = column 16 + c
//     top                        bit c of the u32: the fifth bit of column c
//
//   packed, 22 * LANES bytes     | d f16 [LANES] | top [LANES][4] | nibbles [4 (c/4)][LANES][4] |
//     top, byte i                bit v: the fifth bit of column 4v + i
//
//   weight[c] = d * (q[c] - 16);     sum += (d * dx) * (f32)((q - 16) . x)
#include "unpacked.h"

enum { COLS = 32, BYTES = 22, HAS_MINIMUM = 0, OFFSET = 16, SIGNED_CODES = 0, FLUSH = 2 };

static int block_is_finite(const uint8_t *block) { return f16_is_finite(load_u16(block)); }

#if defined(EXPERT_SCALAR)
static void unpack(const uint8_t *block, Unpacked *w) {
    *w = (Unpacked){.d = f16_to_f32(load_u16(block)), .scale = {1, 1}};
    for (int c = 0; c < COLS; c++) {
        const int low = block[6 + c % 16] >> 4 * (c / 16) & 15, top = block[2 + c / 8] >> c % 8 & 1;
        w->q[c] = (int8_t)((low | top << 4) - OFFSET);
    }
}
#else
INLINE void codes(const uint8_t *w, int v, vi *low, vi *high) {
    fifth_bits(vi_load(w + 6 * LANES + 4 * LANES * v), vi_load(w + 2 * LANES), v, low, high);
}
INLINE vf scale(const uint8_t *w) { return vf_of_f16(w); }
static void pack_head(const uint8_t *block, size_t lane, uint8_t *group) {
    __builtin_memcpy(group + 2 * lane, block, 2);
    transpose_top(block + 2, group + 2 * LANES + 4 * lane);
}
#endif
#include "block32.h"

const ExpertFormat expert_q5_0 = {6, COLS, BYTES, WANTS_Q8A32, packed_bytes, pack, rows};
