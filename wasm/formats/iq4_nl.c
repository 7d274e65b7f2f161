// IQ4_NL (ggml type 20): blocks of 32 columns, one scale, 4-bit codes into a fixed table.
//
//   in the GGUF, 18 bytes        | d f16 | nibbles 16 bytes |
//     nibbles, c < 16            low = column c, high = column 16 + c
//
//   packed, 18 * LANES bytes     | d f16 [LANES] | nibbles [4 (c/4)][LANES][4 (c%4)] |
//
//   weight[c] = d * level[code];     sum += (d * dx) * (f32)(level . x)
#include "unpacked.h"

enum { COLS = 32, BYTES = 18, HAS_MINIMUM = 0, OFFSET = 0, SIGNED_CODES = 1, FLUSH = 4 };

static int block_is_finite(const uint8_t *block) { return f16_is_finite(load_u16(block)); }

#if defined(EXPERT_SCALAR)
static void unpack(const uint8_t *block, Unpacked *w) {
    *w = (Unpacked){.d = f16_to_f32(load_u16(block)), .scale = {1, 1}};
    for (int c = 0; c < 16; c++) {
        w->q[c] = iq4_levels[block[2 + c] & 15];
        w->q[16 + c] = iq4_levels[block[2 + c] >> 4];
    }
}
#else
INLINE void codes(const uint8_t *w, int v, vi *low, vi *high) {
    vi q = vi_load(w + 2 * LANES + 4 * LANES * v);
    *low = vi_lookup16(iq4_levels, low_nibbles(q));
    *high = vi_lookup16(iq4_levels, high_nibbles(q));
}
INLINE vf scale(const uint8_t *w) { return vf_of_f16(w); }
static void pack_head(const uint8_t *block, size_t lane, uint8_t *group) {
    __builtin_memcpy(group + 2 * lane, block, 2);
}
#endif
#include "block32.h"

const ExpertFormat expert_iq4_nl = {20, COLS, BYTES, WANTS_Q8A32, packed_bytes, pack, rows};
