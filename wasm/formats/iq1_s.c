// IQ1_S (ggml type 19): blocks of 256 columns; 8 sub-blocks of 32 with a 3-bit scale and a delta of
// plus or minus an eighth each; eight columns at a time are a point of a grid of 2048.
//
//   in the GGUF, 50 bytes        | d f16 | points 32 bytes | u16 [8] |
//     u16                        bits 3i..3i+2: bits 8..10 of point i; 12..14: scale; 15: delta < 0
//   packed                       the same, by words or by blocks (looked_up.h)
//
//   weight = d/8 * (2 scale + 1) * (8 level + 8 delta), levels -1 0 1
#include "looked_up.h"

enum { COLS = 256, BYTES = 50, HAS_MINIMUM = 0 };

static int block_is_finite(const uint8_t *block) { return f16_is_finite(load_u16(block)); }

#if defined(HAS_GATHER)
enum { D_SIZE = 2 };
#define D_UNIT 0.125f
INLINE vf d_of_group(const uint8_t *w) { return vf_of_f16(w); }
INLINE void look_up(const uint8_t *w, int j, vi *q, vi *scale) {
    const vi points = word_of(w, j), bits = vi_shr32(word_of(w, 8 + j / 2), 16 * (j % 2));
    const vi minus = bits_of(bits, 15, 1), upper = vi_shl32(bits, 8);
    EACH (k, 4) {
        const vi index = vi_or(bits_of(points, 8 * k, 255), bits_of(upper, 3 * k, 7 << 8));
        iq1_points(iq1_grid, index, minus, q + 2 * k);
    }
    scale[0] = scale[1] = odd_bits(bits, 12, 7);
}
#else
static void unpack(const uint8_t *block, Unpacked *w) {
    w->d = f16_to_f32(load_u16(block)) * 0.125f;
    for (int k = 0; k < 32; k++) {
        const unsigned bits = load_u16(block + 34 + 2 * (k / 4));
        const unsigned point = block[2 + k] | (bits >> 3 * (k % 4) & 7) << 8;
        w->scale[k / 2] = (int8_t)(2 * (bits >> 12 & 7) + 1);
        put8(w, k, iq1_levels(iq1_grid[point], bits >> 15));
    }
}
#endif
DEFINE_LOOKED_UP
#include "block256.h"

const ExpertFormat expert_iq1_s = {19, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};
