// MXFP4 (ggml type 39): blocks of 32 columns, a power of two as scale, 4-bit floats (e2m1).
//
//   in the GGUF, 17 bytes        | e u8 | nibbles 16 bytes |
//     nibbles, c < 16            low = column c, high = column 16 + c
//
//   packed, 17 * LANES bytes     | e u8 [LANES] | nibbles [4 (c/4)][LANES][4 (c%4)] |
//
//   weight[c] = d * level[code], d = 2^(e - 128), levels 0 1 2 3 4 6 8 12 and their negatives: the
//   floats doubled.               sum += (d * dx) * (f32)(level . x)
//   The fast path looks up level + 12, which is unsigned, and takes 12 Σ x off.
#include "unpacked.h"

enum { COLS = 32, BYTES = 17, HAS_MINIMUM = 0, OFFSET = 12, SIGNED_CODES = 0, FLUSH = 2 };

static int block_is_finite(const uint8_t *block) {
    (void)block; // every exponent is a number: 2^-128 to 2^127
    return 1;
}

#if defined(EXPERT_SCALAR)
static void unpack(const uint8_t *block, Unpacked *w) {
    *w = (Unpacked){.d = e8m0_to_f32(block[0]), .scale = {1, 1}};
    for (int c = 0; c < 16; c++) {
        w->q[c] = fp4_levels[block[1 + c] & 15];
        w->q[16 + c] = fp4_levels[block[1 + c] >> 4];
    }
}
#else
INLINE void codes(const uint8_t *w, int v, vi *low, vi *high) {
    static const int8_t raised[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    vi q = vi_load(w + LANES + 4 * LANES * v);
    *low = vi_lookup16(raised, low_nibbles(q));
    *high = vi_lookup16(raised, high_nibbles(q));
}
INLINE vf scale(const uint8_t *w) { return vf_of_e8m0(w); }
static void pack_head(const uint8_t *block, size_t lane, uint8_t *group) { group[lane] = block[0]; }
#endif
#include "block32.h"

const ExpertFormat expert_mxfp4 = {39, COLS, BYTES, WANTS_Q8A32, packed_bytes, pack, rows};
